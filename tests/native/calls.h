// Calls of FFI handlers with any arrays and attributes, without XLA: of its functions they get those that they use.
#pragma once
#include <cstdint>

#include "xla/ffi/api/c_api.h"

// As tests/native/hostile.py declares them.
struct ArrayOfCall {
  const char* dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// `text` if it is not null, else `fraction` if it is not null, else `whole`.
struct AttributeOfCall {
  const char* name;
  int64_t whole;
  double* fraction;
  const char* text;
};

extern "C" {

// What a handler raises, or an empty string. Operands come before results, attributes sorted by name. The thread pool has so
// many threads, but all work is the caller's.
const char* call_handler(XLA_FFI_Handler* handler, const ArrayOfCall* arrays, int64_t operands, int64_t results,
                         const AttributeOfCall* attributes, int64_t count, int64_t threads);

}  // extern "C"
