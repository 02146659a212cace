// Maps from groups to groups: masks and pruned arrays. Compiled once per instruction set, with S24_ISA naming the namespace, and without
// contraction of products and sums.
#include "../core/select.h"
#include "../core/soft.h"
#include "mvue_lanes.h"

namespace s24 {
namespace S24_ISA {

// An operation that looks at each group by itself.
template <class Op>
struct EachGroup {
  template <class T>
  using Out = typename Op::template Out<T>;
  template <class T>
  static S24_HD void apply_lanes(Key, int64_t, const Quad<typename T::Bits>& in, Quad<Out<T>>& out) {
    for (int l = 0; l < kLanes; ++l) {
      const typename T::Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      Out<T> y[4];
      Op::template apply<T>(x, y);
      for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
    }
  }
};

struct MaskOp {
  template <class T>
  using Out = uint8_t;
  template <class T>
  static S24_HD void apply(const typename T::Bits x[4], uint8_t y[4]) {
    typename T::Bits keep[4];
    keep24<T>(x, keep);
    for (int j = 0; j < 4; ++j) y[j] = uint8_t(keep[j] & 1);
  }
};

struct PruneOp {
  template <class T>
  using Out = typename T::Bits;
  template <class T>
  static S24_HD void apply(const typename T::Bits x[4], typename T::Bits y[4]) {
    prune24<T>(x, y);
  }
};

struct SoftOp {
  template <class T>
  using Out = typename T::Bits;
  template <class T>
  static S24_HD void apply(const typename T::Bits x[4], typename T::Bits y[4]) {
    soft24<T>(x, y);
  }
};

template <bool kExact>
struct MvueOp {
  template <class T>
  using Out = typename T::Bits;
  template <class T>
  static S24_HD void apply_lanes(Key key, int64_t q, const Quad<Out<T>>& in, Quad<Out<T>>& out) {
    mvue_lanes<T, kExact>(key, q, in, out);
  }
};

template <class T, class Op>
void map_groups(const MapArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  using Out = typename Op::template Out<T>;
  Quad<Bits> in;
  Quad<Out> out;
  for (int64_t q = begin; q < end; q += kLanes) {
    const int64_t n = end - q < kLanes ? end - q : kLanes;
    load_quads(static_cast<const Bits*>(a.x), a.groups, q, n, in);
    Op::template apply_lanes<T>(a.key, q, in, out);
    store_quads(static_cast<Out*>(a.out), a.groups, q, n, out);
  }
}

template <class T>
void map_typed(const MapArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case MapOp::kMask: return map_groups<T, EachGroup<MaskOp>>(a, begin, end);
    case MapOp::kPrune: return map_groups<T, EachGroup<PruneOp>>(a, begin, end);
    case MapOp::kSoft: return map_groups<T, EachGroup<SoftOp>>(a, begin, end);
    case MapOp::kMvueExact: return map_groups<T, MvueOp<true>>(a, begin, end);
    case MapOp::kMvueSequential: return map_groups<T, MvueOp<false>>(a, begin, end);
  }
}

void map(const MapArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return map_typed<F32>(a, begin, end);
    case Dtype::kBF16: return map_typed<BF16>(a, begin, end);
    case Dtype::kF16: return map_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
