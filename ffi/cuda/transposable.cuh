// The best mask of a thread's tile, and its bytes.
#pragma once
#include "simt/transposable.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {

template <class T>
using TileRows = Vector<typename T::Bits, 4>[4];

// The mask of a tile of float32, or of 16-bit floats whose scores are not exact as integers. It is not inlined, because such
// tiles of 16-bit floats are rare.
template <class T>
__device__ __noinline__ uint32_t any_tile_mask(Vector<typename T::Bits, 4> w0, Vector<typename T::Bits, 4> w1,
                                               Vector<typename T::Bits, 4> w2, Vector<typename T::Bits, 4> w3) {
  uint32_t wide[16];
  S24_UNROLL
  for (int i = 0; i < 16; ++i) wide[i] = T::to_f32((i < 4 ? w0 : i < 8 ? w1 : i < 12 ? w2 : w3).at[i % 4]);
  if constexpr (sizeof(typename T::Bits) == 2) {
    float numbers[16], largest = 0;
    S24_UNROLL
    for (int i = 0; i < 16; ++i) {
      numbers[i] = float_of(wide[i]);
      largest = larger_magnitude(largest, numbers[i]);
    }
    if (largest < 0x1p127f) return best_tile_mask_of_numbers(numbers, largest);
  }
  return best_tile_mask(wide);
}

template <class T>
__device__ __forceinline__ uint32_t tile_mask(const TileRows<T>& rows) {
  if constexpr (sizeof(typename T::Bits) == 2) {
    uint32_t words[8], mask;
    __builtin_memcpy(words, rows, sizeof words);
    if (search_tile<T>(words, mask)) return mask;
  }
  return any_tile_mask<T>(rows[0], rows[1], rows[2], rows[3]);
}

// A row of a mask as four bytes, 0 or 1.
__device__ __forceinline__ uint32_t row_bytes(uint32_t mask, int row) {
  return (mask >> (4 * row) & 15u) * 0x00204081u & 0x01010101u;  // the four shifted copies share no bit
}

}  // namespace cuda
}  // namespace s24
