// Where cuSPARSELt wants the metadata of a packed (rows, depth) matrix on sm_90, in closed form.
//
// Positions count nibbles (see core/packed24.h; the low half of a byte comes first). Row-major, as stored here, the nibble of
// row m and group q stands at m * depth / 4 + q.
#pragma once
#include "../../core/base.h"

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

}  // namespace s24
