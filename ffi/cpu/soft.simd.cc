// Soft thresholds.
#include "../core/soft.h"
#include "groupwise.h"

namespace s24 {
namespace S24_ISA {
namespace {

struct SoftOp {
  template <class T, class B>
  static S24_HD bool usual(const Quad<B>& in, Quad<B>& out) {
    if constexpr (T::kInf == BF16::kInf) {
      return soft_bf16(in, out);
    } else {
      alignas(64) uint32_t unusual[kLanes<B>];
      for (int l = 0; l < kLanes<B>; ++l) {
        const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
        B y[4];
        unusual[l] = ~soft24_finite<T>(x, y);
        for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
      }
      return !any_bit(unusual);
    }
  }
  template <class T, class B>
  static S24_HD void any(const B x[4], B y[4]) {
    soft24<T>(x, y);
  }

 private:
  using B = uint16_t;
  static S24_HD bool soft_bf16(const Quad<B>& in, Quad<B>& out) {
    constexpr int kCount = kLanes<B>;
    Quad<B> a;
    alignas(64) B threshold[kCount], unusual[kCount];
    for (int l = 0; l < kCount; ++l) {
      const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      B m[4], t;
      const int16_t largest = soft24_threshold(x, m, t);
      unusual[l] = mask_if<B>(largest >= int16_t(BF16::kInf));
      threshold[l] = t;
      for (int j = 0; j < 4; ++j) a.at[j][l] = m[j];
    }
    for (int j = 0; j < 4; ++j) {
      for_words(a.at[j], threshold, out.at[j], subtract_two);
      for (int l = 0; l < kCount; ++l) out.at[j][l] = soft24_result(in.at[j][l], out.at[j][l]);
    }
    return !any_bit(unusual);
  }
};

}  // namespace

template <>
void run(const SoftArgs& a, int64_t begin, int64_t end) {
  for_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    return apply_either<T, EachGroup<T, SoftOp>>(a, begin, end);
  });
}

}  // namespace S24_ISA
}  // namespace s24
