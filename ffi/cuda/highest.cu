// The places of the n largest of some numbers, in one block: they are few, and a sort of them takes many kernels.
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kSearchers = 512, kWarps = kSearchers / 32;

// The sum of a block's numbers. A thread may be one call ahead of another, so `slots` are taken in turn.
__device__ __forceinline__ uint32_t sum_of_block(uint32_t own, uint32_t (&slots)[kWarps]) {
  S24_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) own += __shfl_xor_sync(0xffffffffu, own, distance);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = own;
  __syncthreads();
  uint32_t sum = 0;
  S24_UNROLL
  for (int w = 0; w < kWarps; ++w) sum += slots[w];
  return sum;
}

__global__ void __launch_bounds__(kSearchers) highest(const int32_t* scores, int32_t* places, unsigned count, unsigned n,
                                                    int bits) {
  __shared__ uint32_t slots[2][kWarps], above[kSearchers], equal[kSearchers];
  const auto in_block = [&](int turn, int32_t least) {
    uint32_t own = 0;
    for (unsigned i = threadIdx.x; i < count; i += kSearchers) own += scores[i] >= least;
    return sum_of_block(own, slots[turn]);
  };
  // The largest number that n scores reach, from its highest bit down.
  int32_t least = 0;
  for (int bit = bits - 1; bit >= 0; --bit)
    if (in_block(bit % 2, least | 1 << bit) >= n) least |= 1 << bit;
  // Those above it, and the first of those equal to it.
  const unsigned each = (count + kSearchers - 1) / kSearchers;
  const unsigned begin = threadIdx.x * each, end = min(begin + each, count);
  uint32_t own_above = 0, own_equal = 0;
  for (unsigned i = begin; i < end; ++i) own_above += scores[i] > least, own_equal += scores[i] == least;
  above[threadIdx.x] = own_above;
  equal[threadIdx.x] = own_equal;
  const uint32_t wanted = n - sum_of_block(own_above, slots[1]);  // of those equal; its barrier is also that of the arrays
  uint32_t above_before = 0, equal_before = 0;
  for (unsigned t = 0; t < threadIdx.x; ++t) above_before += above[t], equal_before += equal[t];
  for (unsigned i = begin; i < end; ++i) {
    const bool is_above = scores[i] > least, is_equal = scores[i] == least;
    if (is_above || (is_equal && equal_before < wanted)) places[above_before + min(equal_before, wanted)] = int32_t(i);
    above_before += is_above;
    equal_before += is_equal;
  }
}

}  // namespace

cudaError_t launch_highest(const int32_t* scores, int32_t* places, int64_t count, int64_t n, int bits, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  return start(highest, dim3(1), kSearchers, 0, stream, scores, places, unsigned(count), unsigned(n), bits);
}

}  // namespace cuda
}  // namespace s24
