// The FFI targets of this module.
#pragma once
#include "xla/ffi/api/c_api.h"

namespace s24 {

struct Target {
  const char* name;
  XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*);
};

// Null-terminated.
extern const Target kProducerTargets[];
extern const Target kPackTargets[];
extern const Target kMatmulTargets[];
extern const Target kVnmTargets[];

}  // namespace s24
