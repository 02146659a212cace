// Where sparse tensor cores and libraries want the metadata of a (rows, depth) matrix, in closed form.
//
// Positions count nibbles (see metadata.h; the low half of a byte comes first). Row-major, as stored here, the nibble of
// row m and group q stands at m * depth / 4 + q.
#pragma once
#include "base.h"

namespace s24 {

// cuSPARSELt on sm_90, 16-bit values, rows padded to 64 with kPaddingNibble; depth is a multiple of 32. Blocks of 16 rows
// and 8 groups are 64 bytes; a byte holds rows m (low) and m + 8.
S24_HD int64_t cusparselt_sm90_16bit(int64_t m, int64_t q, int64_t depth) {
  return m / 64 * 16 * depth + q / 8 * 512 + m % 64 / 16 * 128 + m % 8 * 16 + q % 4 * 4 + q / 4 % 2 * 2 + m / 8 % 2;
}

// The same for 8-bit values; depth is a multiple of 64.
S24_HD int64_t cusparselt_sm90_8bit(int64_t m, int64_t q, int64_t depth) {
  return m / 64 * 16 * depth + q / 16 * 1024 + m % 64 / 16 * 256 + m % 8 * 32 + q / 2 % 4 * 8 + q / 8 % 2 * 4 +
         m / 8 % 2 * 2 + q % 2;
}

constexpr uint8_t kPaddingNibble = 0xe;

// cuSPARSELt's compressed matrix: rows of values, stored as here, and as many more as its metadata fill behind them.
S24_HD int64_t compressed_rows(int64_t rows, int64_t value_bytes) { return rows + (rows + 63) / 64 * (16 / value_bytes); }

// CUTLASS's reordered metadata for mma.sp on sm_80, 16-bit values: words of 16 columns, pairs of columns of words
// interleaved, rows permuted within 32.
S24_HD int64_t cutlass_sm80_16bit(int64_t m, int64_t q, int64_t rows) {
  int64_t row = m / 32 * 32 + m % 8 * 4 + m % 32 / 8, column = q / 4;
  if (row % 2 == 0 && column % 2 == 1) {
    ++row, --column;
  } else if (row % 2 == 1 && column % 2 == 0) {
    --row, ++column;
  }
  return 4 * (column / 2 * 2 * rows + 2 * row + column % 2) + q % 4;
}

// The metadata operand of mma.sp.m16n8k32 with 16-bit values and selector `pair`: the word of lane `lane` whose half
// `half` it fills holds 16 columns, number `column`, of row `row` of the 16 x 64 block.
struct MmaWord {
  int row, column;
};
S24_HD MmaWord mma_sp_word(int lane, int half) { return {lane / 4 + 8 * half, lane % 4}; }

}  // namespace s24
