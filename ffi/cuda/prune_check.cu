// Counts the groups of four with more than two non-zeros.
//
// Operands: x, seen as (outer, len, inner) with groups along len, and one int32.
// Steps: a thread counts its groups, a warp adds the counts of its threads, and the first of them adds the sum, unless it is
// zero, to the result.
// Constraints: none. Arrays that are aligned to 16 bytes, with whole accesses in a row, take wide accesses.
#include "../core/prune_check.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kMostRounds = 8;

__device__ __forceinline__ void add_up(uint32_t own, int32_t* found) {
  own = __reduce_add_sync(0xffffffffu, own);
  if (threadIdx.x % 32 == 0 && own != 0) atomicAdd(found, int32_t(own));
}

// Groups of neighbours: an access has kGroups of them.
template <class B, int kGroups>
__global__ void __launch_bounds__(kThreads) check_rows(const B* x, int32_t* found, int64_t units, int rounds) {
  uint32_t own = 0;
  in_rounds(
      units, rounds, [&](int64_t unit) { return load<B, 4 * kGroups>(x + unit * 4 * kGroups); },
      [&](int64_t, const Vector<B, 4 * kGroups>& in) {
        S24_UNROLL
        for (int i = 0; i < kGroups; ++i) own += more_than_two(in.at + 4 * i);
      });
  add_up(own, found);
}

template <class B, int kLanes>
struct FourRows {
  Vector<B, kLanes> at[4];
};

// Groups across rows: an access has kLanes neighbours of a row.
template <class B, int kLanes>
__global__ void __launch_bounds__(kThreads) check_columns(const B* x, int32_t* found, Groups g, int rounds) {
  uint32_t own = 0;
  in_rounds(
      g.count() / kLanes, rounds,
      [&](int64_t unit) {
        int64_t lane;
        const int64_t row = divide(unit, g.inner / kLanes, &lane);  // of groups
        const B* const from = x + 4 * row * g.inner + lane * kLanes;
        FourRows<B, kLanes> in;
        S24_UNROLL
        for (int j = 0; j < 4; ++j) in.at[j] = load<B, kLanes>(from + j * g.inner);
        return in;
      },
      [&](int64_t, const FourRows<B, kLanes>& in) {
        S24_UNROLL
        for (int l = 0; l < kLanes; ++l) {
          const B group[4] = {in.at[0].at[l], in.at[1].at[l], in.at[2].at[l], in.at[3].at[l]};
          own += more_than_two(group);
        }
      });
  add_up(own, found);
}

template <class B>
cudaError_t launch(const PruneCheckArgs& a, cudaStream_t stream) {
  constexpr int kWide = 16 / int(sizeof(B)), kRun = kWide / 4;  // elements and groups of 16 bytes
  const B* const x = static_cast<const B*>(a.x);
  const int64_t groups = a.groups.count();
  const auto start_on = [&](int64_t units, auto kernel, auto sizes) {
    const int rounds = rounds_for(blocks_for(units, kThreads), kMostRounds);
    return start(kernel, dim3(blocks_for(units, int64_t(rounds) * kThreads)), kThreads, 0, stream, x, a.found, sizes, rounds);
  };
  if (aligned(x, 16) && a.groups.inner == 1 && groups % kRun == 0)
    return start_on(groups / kRun, check_rows<B, kRun>, groups / kRun);
  if (aligned(x, 16) && a.groups.inner % kWide == 0) return start_on(groups / kWide, check_columns<B, kWide>, a.groups);
  return start_on(groups, check_columns<B, 1>, a.groups);
}

}  // namespace

template <>
cudaError_t run(const PruneCheckArgs& a, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return a.width == 4   ? launch<uint32_t>(a, stream)
         : a.width == 2 ? launch<uint16_t>(a, stream)
                        : launch<uint8_t>(a, stream);
}

}  // namespace cuda
}  // namespace s24
