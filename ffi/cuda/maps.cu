// Maps from groups to groups: masks and pruned arrays. Compiled without contraction of products and sums.
#include <type_traits>

#include "../core/pairs.h"
#include "../core/soft.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

template <MapOp op, class T>
using Out = std::conditional_t<op == MapOp::kMask, uint8_t, typename T::Bits>;

template <MapOp op, class T>
__device__ __forceinline__ void apply(const typename T::Bits x[4], Key key, int64_t group, Out<op, T> y[4]) {
  if constexpr (op == MapOp::kMask) {
    typename T::Bits keep[4];
    keep24<T>(x, keep);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint8_t(keep[i] & 1);
  } else if constexpr (op == MapOp::kPrune) {
    prune24<T>(x, y);
  } else if constexpr (op == MapOp::kSoft) {
    soft24<T>(x, y);
  } else {
    const uint32_t word = group_word(key.k0, key.k1, uint64_t(group), 0);
    if constexpr (op == MapOp::kMvueExact && sizeof(typename T::Bits) == 2) {
      const Words out = put_nibble(keep_drawn<T>(words_of(x), word));
      S24_UNROLL
      for (int i = 0; i < 4; ++i) y[i] = uint16_t((i < 2 ? out.low : out.high) >> (i % 2 * 16));
    } else {
      const bool exact = op == MapOp::kMvueExact;
      mvue24<T, exact>(x, word, exact ? 0 : group_word(key.k0, key.k1, uint64_t(group), 1), y);
    }
  }
}

template <MapOp op>
constexpr bool kHeavy = op == MapOp::kMvueExact || op == MapOp::kMvueSequential;

// Groups of neighbours: a thread takes kGroups of them per access, several accesses apart by a block.
template <MapOp op, class T, int kGroups>
__global__ void __launch_bounds__(kThreads) map_rows(const typename T::Bits* x, Out<op, T>* y, int64_t groups,
                                                     const uint32_t* key_words) {
  using Bits = typename T::Bits;
  constexpr int kAccesses = kHeavy<op> ? 1 : 4;
  const int64_t first = (int64_t(blockIdx.x) * kThreads * kAccesses + threadIdx.x) * kGroups;
  const Key key = read_key(key_words);
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
    S24_UNROLL
    for (int i = 0; i < kGroups; ++i) apply<op, T>(in[a].at + 4 * i, key, q + i, out.at + 4 * i);
    store(y + 4 * q, out);
  }
}

// Groups across rows: a thread takes kLanes neighbours of four rows.
template <MapOp op, class T, int kLanes>
__global__ void __launch_bounds__(kThreads) map_columns(const typename T::Bits* x, Out<op, T>* y, Groups g,
                                                        const uint32_t* key_words) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x, per_row = g.inner / kLanes;
  if (unit >= g.count() / kLanes) return;
  int64_t lane;
  const int64_t row = divide(unit, per_row, &lane);  // of groups
  const int64_t at = 4 * row * g.inner + lane * kLanes;
  const Key key = read_key(key_words);
  Vector<Bits, kLanes> in[4];
  Vector<Out<op, T>, kLanes> out[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) in[j] = load<Bits, kLanes>(x + at + j * g.inner);
  S24_UNROLL
  for (int l = 0; l < kLanes; ++l) {
    const Bits group[4] = {in[0].at[l], in[1].at[l], in[2].at[l], in[3].at[l]};
    Out<op, T> result[4];
    apply<op, T>(group, key, unit * kLanes + l, result);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) out[j].at[l] = result[j];
  }
  S24_UNROLL
  for (int j = 0; j < 4; ++j) store(y + at + j * g.inner, out[j]);
}

template <MapOp op, class T>
cudaError_t launch(const MapArgs& a, const uint32_t* key, cudaStream_t stream) {
  using Bits = typename T::Bits;
  constexpr int kPair = sizeof(Bits) == 2 ? 2 : 1;  // groups of 16 bytes
  constexpr int kWide = kHeavy<op> ? 2 : 16 / int(sizeof(Bits));
  constexpr int kAccesses = kHeavy<op> ? 1 : 4;
  const auto* x = static_cast<const Bits*>(a.x);
  auto* y = static_cast<Out<op, T>*>(a.out);
  const int64_t groups = a.groups.count();
  const bool whole = aligned(x, 16) && aligned(y, 16);
  if (a.groups.inner == 1) {
    if (whole && groups % kPair == 0)
      map_rows<op, T, kPair><<<blocks_for(groups, kPair * kThreads * kAccesses), kThreads, 0, stream>>>(x, y, groups, key);
    else
      map_rows<op, T, 1><<<blocks_for(groups, kThreads * kAccesses), kThreads, 0, stream>>>(x, y, groups, key);
  } else if (whole && a.groups.inner % kWide == 0) {
    map_columns<op, T, kWide><<<blocks_for(groups, kWide * kThreads), kThreads, 0, stream>>>(x, y, a.groups, key);
  } else {
    map_columns<op, T, 1><<<blocks_for(groups, kThreads), kThreads, 0, stream>>>(x, y, a.groups, key);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_map(const MapArgs& a, const uint32_t* key, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    switch (a.op) {
      case MapOp::kMask: return launch<MapOp::kMask, T>(a, key, stream);
      case MapOp::kPrune: return launch<MapOp::kPrune, T>(a, key, stream);
      case MapOp::kSoft: return launch<MapOp::kSoft, T>(a, key, stream);
      case MapOp::kMvueExact: return launch<MapOp::kMvueExact, T>(a, key, stream);
      case MapOp::kMvueSequential: return launch<MapOp::kMvueSequential, T>(a, key, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace cuda
}  // namespace s24
