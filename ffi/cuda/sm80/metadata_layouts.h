// Where mma.sp wants the metadata of a packed (rows, depth) matrix, and how CUTLASS stores it for sm_80, in closed form.
//
// Positions count nibbles (see core/packed24.h; the low half of a byte comes first).
#pragma once
#include "../../core/base.h"

namespace s24 {

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
