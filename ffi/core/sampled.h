// The arguments of a product at given entries.
#pragma once
#include "arguments.h"

namespace s24 {

// values (R, 2N/M) of A(R, K) B(N, K)^T at the entries that metadata and columns name, in blocks of V rows x M columns.
struct SampledArgs {
  Dtype dtype;
  const void *a, *b;
  void* values;
  const uint8_t *metadata, *columns;
  int64_t rows, depth, cols;  // R, K, N
  int64_t v, m;
};

}  // namespace s24
