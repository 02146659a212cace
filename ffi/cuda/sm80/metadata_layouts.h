// Where mma.sp wants the metadata of a packed (rows, depth) matrix, in closed form.
#pragma once
#include "../../core/base.h"

namespace s24 {

// The metadata operand of mma.sp.m16n8k32 with 16-bit values and selector `pair`: the word of lane `lane` whose half
// `half` it fills holds 16 columns, number `column`, of row `row` of the 16 x 64 block.
struct MmaWord {
  int row, column;
};
S24_HD MmaWord mma_sp_word(int lane, int half) { return {lane / 4 + 8 * half, lane % 4}; }

}  // namespace s24
