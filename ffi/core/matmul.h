// The arguments of a product of a 2:4 matrix and a dense one. Its sums are rounded as float32 in an order of their own on each
// device.
#pragma once
#include "arguments.h"

namespace s24 {

// out(R, N) = P(R, K) D(K, N), or out^T or D^T as the flags say; P is packed along K.
struct MatmulArgs {
  Dtype in, out_dtype;
  const void* values;
  const uint8_t* metadata;
  const void* dense;
  void* out;
  int64_t rows, depth, cols;  // R, K, N
  bool dense_k_last, out_packed_last;
};

}  // namespace s24
