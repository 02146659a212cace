// The arguments of a product of a 2:4 matrix and a dense one. Its sums are rounded as float32 in an order of their own on each
// device.
#pragma once
#include "arguments.h"

namespace s24 {

// The row of a result that a row of P gives: the same or, if P has the first rows of all groups, then the second ones, and so on,
// that row of its group.
struct Collected {
  int64_t groups, size;  // no groups: rows are not collected

  S24_HD static Collected of(int64_t rows, int64_t size, bool collected) { return {collected ? rows / size : 0, size}; }
  template <class Int>
  S24_HD Int row(Int r) const {
    return groups == 0 ? r : r % Int(groups) * Int(size) + r / Int(groups);
  }
};

// out(R, N) = P(R, K) D(K, N), or out^T or D^T as the flags say; P is packed along K. Rows of out^T are never collected.
struct MatmulArgs {
  Dtype in, out_dtype;
  const void* values;
  const uint8_t* metadata;
  const void* dense;
  void* out;
  int64_t rows, depth, cols;  // R, K, N
  bool dense_k_last, out_packed_last;
  Collected collected;
};

}  // namespace s24
