// The shape of a compressed matrix of cuSPARSELt: packed values with their metadata behind them in one buffer.
#pragma once
#include "handler.h"

namespace s24 {

// How many rows of depth / 2 values a compressed matrix of cuSPARSELt fills: its values, and after them its metadata.
inline int64_t compressed_rows(int64_t rows, int64_t value_bytes) {
  const int64_t padded = ceil_div(rows, metadata_rows()) * metadata_rows();
  return rows + padded / (4 * value_bytes);
}

// Returns whether d, the dims of packed values (..., rows, depth / 2), are those of a compressed matrix of cuSPARSELt. If so,
// drops the rows of its metadata from d. There is none on a CPU.
inline bool drop_metadata(Dims& d, int64_t rows, int64_t depth, const ffi::AnyBuffer& values) {
  if (metadata_rows() == 0 || d.size() < 2 || rows == 0 || depth % 32 != 0 || values.element_type() == ffi::DataType::F32) return false;
  int64_t& found = d[d.size() - 2];
  if (found != compressed_rows(rows, 2)) return false;
  found = rows;
  return true;
}

}  // namespace s24
