// The FFI targets of this module, and what their handlers share.
#pragma once
#include <string>

#include "../cpu/shapes.h"
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
extern const Target kMatmulTargets[];
extern const Target kCusparseltTargets[];

using Stream = ffi::PlatformStream<cudaStream_t>;

inline ffi::Error status(const char* target, cudaError_t e) {
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(std::string(target) + ": " + cudaGetErrorString(e));
}

// The operands of a product, after checks: out(R, N) = P(R, K) D(K, N), for each element of a batch.
struct Product {
  MatmulArgs args{};  // of the first element
  Batch batch;
  ffi::Error error;

  static Product of(const char* target, bool dense_k_last, bool out_packed_last, const ffi::AnyBuffer& values,
                    const ffi::AnyBuffer& metadata, const ffi::AnyBuffer& dense, const ffi::AnyBuffer& out);
  MatmulArgs at(int64_t b) const;
  bool empty() const { return batch.count() * args.rows * args.cols == 0; }
  int64_t out_bytes() const { return args.rows * args.cols * size_of(args.out_dtype); }
};

}  // namespace cuda
}  // namespace s24
