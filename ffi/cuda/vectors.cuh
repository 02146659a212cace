// What the kernels share: aligned vectors, index arithmetic, launch sizes, what the device is.
#pragma once
#include "../core/floats.h"
#include "launch.h"

namespace s24 {
namespace cuda {

constexpr int kThreads = 256;

template <class B, int n>
struct alignas(sizeof(B) * n) Vector {
  B at[n];
};

template <class B, int n>
__device__ __forceinline__ Vector<B, n> load(const B* p) {
  return *reinterpret_cast<const Vector<B, n>*>(p);
}

template <class B, int n>
__device__ __forceinline__ void store(B* p, const Vector<B, n>& v) {
  *reinterpret_cast<Vector<B, n>*>(p) = v;
}

inline bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// a / b and a % b; 64-bit division costs several times more than 32-bit.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b, int64_t* rest) {
  if (((a | b) >> 32) == 0) {
    const uint32_t q = uint32_t(a) / uint32_t(b);
    *rest = int64_t(uint32_t(a) - q * uint32_t(b));
    return q;
  }
  const int64_t q = a / b;
  *rest = a - q * b;
  return q;
}

// The compute capability of the current device, 10 major + minor, such as 90; 0 if there is none.
inline int compute_capability() {
  int device = 0, major = 0, minor = 0;
  const bool found = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  return found ? 10 * major + minor : 0;
}

inline unsigned blocks_for(int64_t units, int64_t per_block) { return unsigned(ceil_div(units, per_block)); }

// Blocks that keep a large GPU busy to the end.
#if defined(__CUDACC__)
constexpr int64_t kEnoughBlocks = 4096;
#else
constexpr int64_t kEnoughBlocks = 2;
#endif

// How often a block repeats its work: `most` times, or as often as leaves enough blocks. fewer: what
// kEnoughBlocks is divided by.
inline int rounds_for(int64_t blocks, int most, int fewer = 1) {
  const int64_t enough = ceil_div(kEnoughBlocks, int64_t(fewer));
  return int(blocks < 2 * enough ? 1 : blocks < most * enough ? blocks / enough : most);
}

__device__ __forceinline__ int64_t first_unit(int rounds) { return int64_t(blockIdx.x) * rounds * kThreads + threadIdx.x; }

// work(unit, what load(unit) gave) for the units of a thread, a block of threads apart; the next is loaded before.
template <class Load, class Work>
__device__ __forceinline__ void in_rounds(int64_t units, int rounds, Load load, Work work) {
  int64_t unit = first_unit(rounds);
  if (unit >= units) return;
  auto next = load(unit);
#pragma unroll 1
  for (; rounds > 0 && unit < units; --rounds, unit += kThreads) {
    const auto in = next;
    if (rounds > 1 && unit + kThreads < units) next = load(unit + kThreads);
    work(unit, in);
  }
}

// Where nothing is drawn there is no key.
template <int kDraws>
__device__ __forceinline__ Key read_key(const Draws& draws) {
  if constexpr (kDraws == 0) return {};
  uint32_t words[kShardWords] = {};
  S24_UNROLL
  for (int i = 0; i < kShardWords; ++i)
    if (i < kKeyWords || draws.shard) words[i] = __ldg(draws.words + i);
  return draws.key(words);
}

// Launches a kernel, and memory of the block whose size the launch says. Not CUDA: the tests run kernels on a CPU.
#if defined(__CUDACC__)
template <class... P, class... A>
cudaError_t start(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream, A... args) {
  kernel<<<grid, threads, shared, stream>>>(args...);
  return cudaGetLastError();
}

__device__ __forceinline__ unsigned char* launched_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}
#else
template <class... P, class... A>
cudaError_t start(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t stream, A... args);
unsigned char* launched_memory();
#endif

template <class F>
cudaError_t for_dtype(Dtype dtype, F f) {
  switch (dtype) {
    case Dtype::kF32: return f(F32());
    case Dtype::kBF16: return f(BF16());
    case Dtype::kF16: return f(F16());
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda
}  // namespace s24
