// The FFI targets of this module, and what their handlers share.
#pragma once
#include <string>

#include "../cpu/calls.h"
#include "launch.h"

namespace s24 {
namespace cuda {

struct Target {
  const char* name;
  XLA_FFI_Error* (*execute)(XLA_FFI_CallFrame*);
  XLA_FFI_Error* (*initialize)(XLA_FFI_CallFrame*);  // null: none
};

// Null-terminated.
extern const Target kProducerTargets[];
extern const Target kPackTargets[];
extern const Target kPackBothTargets[];
extern const Target kGatedTargets[];
extern const Target kMatmulTargets[];
extern const Target kVnmTargets[];
extern const Target kCusparseltTargets[];

using Stream = ffi::PlatformStream<cudaStream_t>;

inline ffi::Error status(const char* target, cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(e));
}

}  // namespace cuda
}  // namespace s24
