// What the handlers of CUDA share.
#pragma once
#include <initializer_list>
#include <string>

#include "../call/packed24.h"
#include "../call/target.h"
#include "launch.h"

namespace s24 {
namespace cuda {

using Stream = ffi::PlatformStream<cudaStream_t>;

// The binding of a handler that launches on a stream, see S24_TARGET.
template <size_t kOperands, size_t kResults, class... Names>
auto on_stream(Takes<kOperands> operands, Gives<kResults> results, Names... attributes) {
  return signature(ffi::Ffi::Bind().Ctx<Stream>(), operands, results, attributes...);
}

// Launches never wait, allocate or copy to the host, so that XLA may capture them into a CUDA graph.
constexpr std::initializer_list<ffi::Traits> kInGraphs = {ffi::Traits::kCmdBufferCompatible};

inline ffi::Error status(const char* target, cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(e));
}

// launch(b) for each of the `count` arrays of a call, until one fails.
template <class Call, class F>
ffi::Error launch_each(const Call& call, int64_t count, F launch) {
  if (call.error.failure()) return call.error;
  for (int64_t b = 0; b < count; ++b) {
    const cudaError_t e = launch(b);
    if (e != cudaSuccess) return status(call.target, e);
  }
  return ffi::Error::Success();
}

// Appends the metadata in cuSPARSELt's order to 16-bit values (rows, depth / 2): together they are a compressed matrix.
inline cudaError_t write_behind(void* values, const uint8_t* metadata, int64_t rows, int64_t depth, cudaStream_t stream) {
  return launch_metadata_sm90_16bit(metadata, static_cast<uint8_t*>(values) + rows * depth, rows, depth, stream);
}

// Appends the metadata to batch element b if its values are the head of a compressed matrix.
inline cudaError_t finish(const PackCall& c, int64_t b, cudaStream_t stream) {
  const PackArgs a = c.at(b);
  return c.rows == 0 ? cudaSuccess : write_behind(a.values, a.metadata, c.rows, c.depth, stream);
}

}  // namespace cuda
}  // namespace s24
