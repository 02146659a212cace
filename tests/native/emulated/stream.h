// CUDA's handlers on XLA's CPU, which has no streams: they get none.
#pragma once
#include <cuda_runtime_api.h>

#include "xla/ffi/api/ffi.h"

namespace xla::ffi {

template <>
struct CtxDecoding<PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return cudaStream_t{nullptr};
  }
};

}  // namespace xla::ffi
