// Kernels that apply an operation to each group of four: masks, pruned arrays, soft thresholds and estimates.
//
// Operands: x and a result of its shape, seen as (outer, len, inner) with groups along len; a key if groups draw.
// Steps: a thread loads its groups, calls `apply` on each of them, and stores the results. A file that includes this defines
// `apply` for its operations.
// Constraints: none. Arrays that are aligned to 16 bytes, with whole accesses in a row, take wide accesses.
#pragma once
#include <type_traits>

#include "mvue.cuh"

namespace s24 {
namespace cuda {
namespace {

template <GroupwiseOp op, class T>
using Out = std::conditional_t<op == GroupwiseOp::kMask, uint8_t, typename T::Bits>;

template <GroupwiseOp op>
constexpr int kDraws = op == GroupwiseOp::kMvueExact ? 1 : op == GroupwiseOp::kMvueSequential ? 2 : 0;

// The operation on one group: x -> y, with the words that the group draws.
template <GroupwiseOp op, class T>
__device__ __forceinline__ void apply(const typename T::Bits x[4], const Draw<kDraws<op>>& draw, Out<op, T> y[4]);

// f(i, draw) for kGroups groups whose numbers begin with `first`. Four of a quartet share a call of Philox.
template <int kDraws, int kGroups, class F>
__device__ __forceinline__ void for_draws(const Key& key, int64_t first, F f) {
  if constexpr (kGroups % 4 == 0) {
    S24_UNROLL
    for (int q = 0; q < kGroups; q += 4) {
      const auto draws = QuartetDraw<kDraws>::of(key, (first + q) / 4);
      S24_UNROLL
      for (int i = 0; i < 4; ++i) f(q + i, draws.group[i]);
    }
  } else {
    S24_UNROLL
    for (int i = 0; i < kGroups; ++i) f(i, Draw<kDraws>::of(key, first + i));
  }
}

// Groups of neighbours: a thread takes kGroups of them per access, several accesses apart by a block.
template <GroupwiseOp op, class T, int kGroups>
__global__ void __launch_bounds__(kThreads) group_rows(const typename T::Bits* x, Out<op, T>* y, int64_t groups,
                                                     Draws draws) {
  using Bits = typename T::Bits;
  constexpr int kAccesses = kDraws<op> > 0 ? 1 : 4;
  const int64_t first = (int64_t(blockIdx.x) * kThreads * kAccesses + threadIdx.x) * kGroups;
  const Key key = read_key<kDraws<op>>(draws);
  Vector<Bits, 4 * kGroups> in[kAccesses];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t q = first + int64_t(a) * kThreads * kGroups;
    if (q < groups) in[a] = load<Bits, 4 * kGroups>(x + 4 * q);
  }
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t q = first + int64_t(a) * kThreads * kGroups;
    if (q >= groups) break;
    Vector<Out<op, T>, 4 * kGroups> out;
    for_draws<kDraws<op>, kGroups>(key, key.number(q), [&](int i, const auto& draw) { apply<op, T>(in[a].at + 4 * i, draw, out.at + 4 * i); });
    store(y + 4 * q, out);
  }
}

// Groups across rows: a thread takes kLanes neighbours of four rows.
template <GroupwiseOp op, class T, int kLanes>
__global__ void __launch_bounds__(kThreads) group_columns(const typename T::Bits* x, Out<op, T>* y, Groups g,
                                                        Draws draws) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x, per_row = g.inner / kLanes;
  if (unit >= g.count() / kLanes) return;
  int64_t lane;
  const int64_t row = divide(unit, per_row, &lane);  // of groups
  const int64_t at = 4 * row * g.inner + lane * kLanes;
  const Key key = read_key<kDraws<op>>(draws);
  Vector<Bits, kLanes> in[4];
  Vector<Out<op, T>, kLanes> out[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) in[j] = load<Bits, kLanes>(x + at + j * g.inner);
  for_draws<kDraws<op>, kLanes>(key, key.number(unit * kLanes, row), [&](int l, const auto& draw) {
    const Bits group[4] = {in[0].at[l], in[1].at[l], in[2].at[l], in[3].at[l]};
    Out<op, T> result[4];
    apply<op, T>(group, draw, result);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) out[j].at[l] = result[j];
  });
  S24_UNROLL
  for (int j = 0; j < 4; ++j) store(y + at + j * g.inner, out[j]);
}

template <GroupwiseOp op, class T>
cudaError_t launch_groups(const GroupwiseArgs& a, cudaStream_t stream) {
  using Bits = typename T::Bits;
  constexpr bool kEstimate = kDraws<op> > 0;
  // Groups of an access: of 16 bytes, or a quartet. Quartets of 16-bit estimates have kernels of their own, in mvue.cu.
  constexpr bool kShort = sizeof(Bits) == 2;
  constexpr int kRun = kEstimate ? (kShort ? 1 : 4) : (kShort ? 2 : 1);
  constexpr int kWide = kEstimate ? kRun : 16 / int(sizeof(Bits));
  constexpr int kAccesses = kEstimate ? 1 : 4;
  const auto* x = static_cast<const Bits*>(a.x);
  auto* y = static_cast<Out<op, T>*>(a.out);
  const int64_t groups = a.groups.count();
  if (a.groups.inner == 1) {
    constexpr size_t kAlign = 4 * kRun * sizeof(Bits);
    if (aligned(x, kAlign) && aligned(y, kAlign) && groups % kRun == 0 && a.draws.in_quartets())
      return start(group_rows<op, T, kRun>, dim3(blocks_for(groups, kRun * kThreads * kAccesses)), kThreads, 0, stream, x, y,
                   groups, a.draws);
    return start(group_rows<op, T, 1>, dim3(blocks_for(groups, kThreads * kAccesses)), kThreads, 0, stream, x, y, groups,
                 a.draws);
  }
  if (aligned(x, 16) && aligned(y, 16) && a.groups.inner % kWide == 0)
    return start(group_columns<op, T, kWide>, dim3(blocks_for(groups, kWide * kThreads)), kThreads, 0, stream, x, y, a.groups,
                 a.draws);
  return start(group_columns<op, T, 1>, dim3(blocks_for(groups, kThreads)), kThreads, 0, stream, x, y, a.groups, a.draws);
}

}  // namespace
}  // namespace cuda
}  // namespace s24
