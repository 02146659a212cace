// The FFI targets of this module, and what their handlers share.
#pragma once
#include <string>

#include "../call/packed24.h"
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
extern const Target kKeptTargets[];
extern const Target kPackBothTargets[];
extern const Target kGatedTargets[];
extern const Target kMatmulTargets[];
extern const Target kVnmTargets[];
extern const Target kCusparseltTargets[];

using Stream = ffi::PlatformStream<cudaStream_t>;

inline ffi::Error status(const char* target, cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(e));
}

// What makes a compressed matrix of 16-bit values, rows x depth: metadata in cuSPARSELt's order behind them.
inline cudaError_t write_behind(void* values, const uint8_t* metadata, int64_t rows, int64_t depth, cudaStream_t stream) {
  return launch_metadata_sm90_16bit(metadata, static_cast<uint8_t*>(values) + rows * depth, rows, depth, stream);
}

// The same after the packing of element b, if its values stand in one.
inline cudaError_t finish(const PackCall& c, int64_t b, cudaStream_t stream) {
  const PackArgs a = c.at(b);
  return c.rows == 0 ? cudaSuccess : write_behind(a.values, a.metadata, c.rows, c.depth, stream);
}

// One array packed along its rows and along its columns: the loop over its batch is one, and compressed matrices have a
// batch of their own.
inline ffi::Error check_both(const PackCall& rows, const PackCall& columns) {
  if (rows.error.failure()) return rows.error;
  if (columns.error.failure()) return columns.error;
  if (rows.batch.count() == columns.batch.count()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(rows.target) + ": both values must be compressed matrices, or neither");
}

}  // namespace cuda
}  // namespace s24
