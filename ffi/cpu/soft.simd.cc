// Soft thresholds, times a scale.
#include "groupwise.h"
#include "soft_block.h"

namespace s24 {
namespace S24_ISA {
namespace {

template <class T>
struct EachSoft {
  using Out = typename T::Bits;
  float scale;
  void draw(const Key&, int64_t, int64_t) {}
  template <bool kRows>
  S24_HD void apply(int64_t, const Out* from, int64_t from_step, Out* to, int64_t to_step) const {
    Quad<Out> in, out;
    load_block<kRows, false>(from, from_step, in);
    const bool finite = soft_block<T>(in, out);
    for (int j = 0; j < 4; ++j) multiply<T>(out.at[j], scale, finite);
    store_block<kRows, false>(to, to_step, out);
  }
};

}  // namespace

template <>
void run(const SoftArgs& a, int64_t begin, int64_t end) {
  for_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    return apply_either<T>(a, begin, end, EachSoft<T>{scale_of<T>(a.scale)});
  });
}

}  // namespace S24_ISA
}  // namespace s24
