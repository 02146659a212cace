// Masks and pruned arrays: two of four by magnitude.
#include "../core/select.h"
#include "groupwise.h"

namespace s24 {
namespace S24_ISA {
namespace {

struct PruneOp {
  template <class T, class B>
  static S24_HD bool usual(const Quad<B>& in, Quad<B>& out) {
    for_lanes(in, out, [](const B x[4], B y[4]) { prune24<T>(x, y); });
    return true;
  }
  template <class T, class B>
  static S24_HD void any(const B x[4], B y[4]) {
    prune24<T>(x, y);
  }
};

template <class T>
struct Mask {
  using Bits = typename T::Bits;
  using Out = uint8_t;
  void draw(const Key&, int64_t, int64_t) {}
  template <bool kRows>
  S24_HD void apply(int64_t, const Bits* from, int64_t from_step, uint8_t* to, int64_t to_step) const {
    constexpr int kMembers = int(sizeof(Bits));  // whose bytes one lane holds
    Quad<Bits> in, keep;
    load_block<kRows, true>(from, from_step, in);
    for (int l = 0; l < kLanes<Bits>; ++l) {
      const Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      Bits y[4];
      keep24<T>(x, y);
      for (int j = 0; j < 4; ++j) keep.at[j][l] = y[j];
    }
    if (!kRows) {
      for (int j = 0; j < 4; ++j)
        for (int l = 0; l < kLanes<Bits>; ++l) to[j * to_step + l] = uint8_t(keep.at[j][l] & 1);
      return;
    }
    Bits bytes[4 * kLanes<Bits> / kMembers];
    for (int l = 0; l < kLanes<Bits>; ++l) {
      S24_UNROLL
      for (int h = 0; h < 4 / kMembers; ++h) {
        Bits b = 0;
        S24_UNROLL
        for (int i = 0; i < kMembers; ++i) b = Bits(b | (keep.at[h * kMembers + i][l] & (Bits(1) << 8 * i)));
        bytes[4 / kMembers * l + h] = b;
      }
    }
    __builtin_memcpy(to, bytes, sizeof bytes);
  }
};

}  // namespace

template <>
void run(const SelectArgs& a, int64_t begin, int64_t end) {
  for_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.op == GroupwiseOp::kMask) return apply_either<T, Mask<T>>(a, begin, end);
    return apply_either<T, EachGroup<T, PruneOp>>(a, begin, end);
  });
}

}  // namespace S24_ISA
}  // namespace s24
