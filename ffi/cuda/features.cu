// The features with the n highest scores, in ascending order; of equal scores the first ones.
//
// Operands: scores (count) of int32 and the places of the n highest ones (n), both in device memory.
// Steps: one block of threads finds the largest number that n scores reach, from its highest bit down; counts the scores above
// it and those equal to it before each thread; and writes the places.
// Constraints: n <= count; scores count as the nearest number from 0 to 2^bits - 1, bits < 32. One block is enough because
// features are few, and a sort of them would take many kernels.
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kSearchers = 1024, kWarps = kSearchers / 32;
constexpr unsigned kHeld = 16;  // scores that a thread keeps in registers

// The sum of a block's numbers. A thread may be one call ahead of another, so `slots` are taken in turn.
__device__ __forceinline__ uint32_t sum_of_block(uint32_t own, uint32_t (&slots)[kWarps]) {
  own = __reduce_add_sync(0xffffffffu, own);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = own;
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, slots[threadIdx.x % 32]);
}

// The sum of the numbers of all threads before this one.
__device__ __forceinline__ uint32_t sum_before(uint32_t own, uint32_t (&slots)[kWarps]) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto running = [lane](uint32_t v) {
    S24_UNROLL
    for (unsigned distance = 1; distance < 32; distance *= 2) {
      const uint32_t before = __shfl_sync(0xffffffffu, v, int(lane < distance ? lane : lane - distance));
      if (lane >= distance) v += before;
    }
    return v;
  };
  const uint32_t within = running(own);
  if (lane == 31) slots[warp] = within;
  __syncthreads();
  const uint32_t warps = running(slots[lane]);
  const uint32_t before = __shfl_sync(0xffffffffu, warps, int(warp == 0 ? 0 : warp - 1));
  return within - own + (warp == 0 ? 0 : before);
}

// A thread takes the scores from `begin` to `end`, the first kHeld of them in registers. Scores are clamped to [0, 2^bits), so
// that exactly n places are written: scores above would be written past the end, and negative ones nowhere.
__global__ void __launch_bounds__(kSearchers) top_features(const int32_t* scores, int32_t* places, unsigned count, unsigned n,
                                                    int bits) {
  __shared__ uint32_t slots[2][kWarps];
  const unsigned each = (count + kSearchers - 1) / kSearchers;
  const unsigned begin = min(threadIdx.x * each, count), end = min(begin + each, count);
  const int32_t most = int32_t((uint32_t{1} << bits) - 1u);
  const auto score_at = [&](unsigned i) { return min(max(scores[i], 0), most); };
  int32_t held[kHeld];
  S24_UNROLL
  for (unsigned i = 0; i < kHeld; ++i) held[i] = begin + i < end ? score_at(begin + i) : -1;
  const auto for_own = [&](auto work) {
    S24_UNROLL
    for (unsigned i = 0; i < kHeld; ++i) work(begin + i, held[i]);
    for (unsigned i = begin + kHeld; i < end; ++i) work(i, score_at(i));
  };
  // The largest number that n scores reach, from its highest bit down.
  int32_t least = 0;
  for (int bit = bits - 1; bit >= 0; --bit) {
    uint32_t reach = 0;
    for_own([&](unsigned, int32_t score) { reach += score >= (least | 1 << bit); });
    if (sum_of_block(reach, slots[bit % 2]) >= n) least |= 1 << bit;
  }
  // The result is all scores above it, and the first of the scores equal to it.
  uint32_t above = 0, equal = 0;
  for_own([&](unsigned, int32_t score) { above += score > least, equal += score == least; });
  const uint32_t wanted = n - sum_of_block(above, slots[1]);  // of those equal
  above = sum_before(above, slots[0]);
  equal = sum_before(equal, slots[1]);
  for_own([&](unsigned i, int32_t score) {
    const bool is_above = score > least, is_equal = score == least;
    if (is_above || (is_equal && equal < wanted)) places[above + min(equal, wanted)] = int32_t(i);
    above += is_above;
    equal += is_equal;
  });
}

}  // namespace

cudaError_t launch_features(const int32_t* scores, int32_t* places, int64_t count, int64_t n, int bits, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return start(top_features, dim3(1), kSearchers, 0, stream, scores, places, unsigned(count), unsigned(n), bits);
}

}  // namespace cuda
}  // namespace s24
