// Unbiased estimates with two of four entries.
#include "groupwise.h"
#include "mvue_lanes.h"

namespace s24 {
namespace S24_ISA {
namespace {

template <class T, bool kExact>
struct Mvue {
  using Out = typename T::Bits;
  void draw(const Key& key, int64_t first, int64_t n) {
    w0 = words0.draw(key, uint64_t(first), n, 0);
    w1 = kExact ? w0 : words1.draw(key, uint64_t(first), n, 1);
  }
  template <bool kRows>
  S24_HD void apply(int64_t l, const Out* from, int64_t from_step, Out* to, int64_t to_step) const {
    Quad<Out> in, out;
    load_block<kRows, true>(from, from_step, in);
    mvue_block<T, kExact>(w0 + l, w1 + l, in, out);
    store_block<kRows, true>(to, to_step, out);
  }
  DrawnWords<kBlock> words0, words1;
  const uint32_t *w0, *w1;
};

}  // namespace

template <>
void run(const MvueArgs& a, int64_t begin, int64_t end) {
  for_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.op == GroupwiseOp::kMvueExact) return apply_either<T, Mvue<T, true>>(a, begin, end);
    return apply_either<T, Mvue<T, false>>(a, begin, end);
  });
}

}  // namespace S24_ISA
}  // namespace s24
