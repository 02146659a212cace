// The loop that applies an operation to each group of four, and stores a result of the same shape. Compiled once per
// instruction set, in the namespace that S24_ISA names.
#pragma once
#include "../core/floats.h"
#include "lanes.h"

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kBlock = 64;  // groups that share one drawing of random words

// An operation has two forms. `usual` takes a block of groups, and its result stands if it says that all of them are usual;
// `any` takes one group.
template <class T, class Op>
struct EachGroup {
  using Out = typename T::Bits;
  void draw(const Key&, int64_t, int64_t) {}
  template <bool kRows>
  S24_HD void apply(int64_t, const Out* from, int64_t from_step, Out* to, int64_t to_step) const {
    Quad<Out> in, out;
    load_block<kRows, false>(from, from_step, in);
    if (!Op::template usual<T>(in, out))
      for_lanes(in, out, [](const Out x[4], Out y[4]) { Op::template any<T>(x, y); });
    store_block<kRows, false>(to, to_step, out);
  }
};

template <class T, class Op, bool kRows>
void apply_groups(const GroupwiseArgs& a, int64_t begin, int64_t end, Op& op) {
  using Bits = typename T::Bits;
  using Out = typename Op::Out;
  constexpr int64_t kCount = kLanes<Bits>, kMember = kRows ? 4 : 1;
  const int64_t step = a.groups.inner;
  const Key key = read_key(a.draws);
  Bits in[4 * kCount] = {};
  Out out[4 * kCount];
  for_blocks<kBlock, kRows>(a.groups, begin, end, [&](int64_t q, int64_t at, int64_t n) {
    const Bits* from = static_cast<const Bits*>(a.x) + at;
    Out* to = static_cast<Out*>(a.out) + at;
    op.draw(key, q, n);
    int64_t l = 0;
    for (; l + kCount <= n; l += kCount) {
      // The next group's rows: hardware prefetchers follow a row to the end of its page.
      for (int j = 0; !kRows && j < 4; ++j) __builtin_prefetch(from + l + (j + 4) * step, 0, 2);
      op.template apply<kRows>(l, from + l * kMember, step, to + l * kMember, step);
    }
    if (l < n) {
      copy_groups<kRows>(from + l * kMember, step, n - l, in, kCount);
      op.template apply<kRows>(l, in, kCount, out, kCount);
      copy_groups<kRows>(out, kCount, n - l, to + l * kMember, step);
    }
  });
}

template <class T, class Op>
void apply_either(const GroupwiseArgs& a, int64_t begin, int64_t end, Op&& op = Op()) {
  if (a.groups.inner == 1) return apply_groups<T, Op, true>(a, begin, end, op);
  apply_groups<T, Op, false>(a, begin, end, op);
}

// kernel(type) for the type of the elements.
template <class F>
void for_type(Dtype dtype, F kernel) {
  switch (dtype) {
    case Dtype::kF32: return kernel(F32());
    case Dtype::kBF16: return kernel(BF16());
    case Dtype::kF16: return kernel(F16());
  }
}

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
