// CUDA as handlers see it: a stream, on which kernels are launched.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>

#include "../call/shapes.h"
#include "launch.h"

namespace s24 {

using Context = ffi::PlatformStream<cudaStream_t>;  // what XLA is asked for
using Device = cudaStream_t;                        // and what it gives

// Launches never wait, allocate or copy to the host, so that XLA may capture them into a CUDA graph.
constexpr std::initializer_list<ffi::Traits> kTraits = {ffi::Traits::kCmdBufferCompatible};
constexpr size_t kAlignment = 16;  // of arrays; XLA's begin at multiples of 128, and those that a program is given of 16
constexpr SavedSizes kSavedSizes = {cuda::kSavedTokens, 8, false, cuda::kSavedLimit};

using cuda::metadata_rows;

inline ffi::Error status(const char* target, cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(e));
}

// The error of a call of what Hopper alone computes. use: what computes it elsewhere.
inline ffi::Error only_on_hopper(const char* target, const char* use) {
  return ffi::Error::Internal(std::string(target) +
                              ": needs a GPU of compute capability 9.0 that runs its machine code (without CUDA_FORCE_PTX_JIT); use " +
                              use);
}

// Requires the sizes that our kernels for Hopper take of a product of a compressed matrix (R, K) and N rows or columns of the dense one,
// a multiple of so many.
inline void require_hopper_sizes(Check& check, int64_t rows, int64_t depth, int64_t cols, int64_t multiple, const Dims& out,
                                 const Dims& dense) {
  using namespace cuda;
  check.require(rows % kHopperRows == 0 && depth % kHopperDepth == 0 && depth > 0 && cols % multiple == 0,
                "needs R a multiple of " + std::to_string(kHopperRows) + ", K a positive multiple of " + std::to_string(kHopperDepth) +
                    " and N a multiple of " + std::to_string(multiple) + ", got a result " + text(out) + " and dense " + text(dense));
  check.require(std::max({rows, depth, cols}) <= kHopperMost,
                "needs sizes of at most " + std::to_string(kHopperMost) + ", got " + text({rows, depth, cols}));
}

inline ffi::Error clear(const char* target, Device stream, void* p, int64_t bytes) {
  return status(target, bytes == 0 ? cudaSuccess : cudaMemsetAsync(p, 0, size_t(bytes), stream));
}

// Launches the kernel for each array of a call, until it fails.
template <class Call>
ffi::Error compute(Device stream, const Call& call) {
  if (call.error.failure()) return call.error;
  cudaError_t e = cudaSuccess;
  for (int64_t b = 0; b < call.batch.count() && e == cudaSuccess; ++b) e = cuda::run(call.at(b), stream);
  return status(call.target, e);
}

}  // namespace s24
