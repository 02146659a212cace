// The orders in which cuSPARSELt has the metadata of a packed (rows, depth) matrix: a struct for each generation of GPUs whose
// order the kernels write, and which of them the current device has.
//
// Positions count nibbles (see core/packed24.h; the low half of a byte comes first). Row-major, as stored here, the nibble of
// row m and group q stands at m * depth / 4 + q.
//
// An order says to a multiple of how many rows metadata are padded (kRows, a multiple of kTileRows), with which nibble, and how
// it is written for values of 16 and of 8 bits. Kernels hold tiles of kTileRows rows and 16 words of eight groups, of which each
// of 256 threads writes 16 bytes; the first 64 threads write the first four words. `of(thread)` is the share of a thread, `row`
// and `word` the first place in the tile from which it comes, `made(f)` the bytes, where f(row, word) gives a word of the tile,
// and `at(m, q, depth)` the nibble in the whole matrix where those begin that come from (m, q).
#pragma once
#include "simt/select.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {

constexpr int kTileRows = 64;

// Hopper. The depth is a multiple of 32 for 16-bit values and of 64 for 8-bit ones.
struct Sm90 {
  static constexpr int kRows = 64;
  static constexpr uint8_t kPaddingNibble = 0xe;
  static bool is_of(int capability) { return capability / 10 == 9; }

  // Blocks of 16 rows and 8 groups are 64 bytes; a byte holds rows m (low) and m + 8.
  struct Of16Bits {
    int row, word;

    static S24_HD int64_t at(int64_t m, int64_t q, int64_t depth) {
      return m / 64 * 16 * depth + q / 8 * 512 + m % 64 / 16 * 128 + m % 8 * 16 + q % 4 * 4 + q / 4 % 2 * 2 + m / 8 % 2;
    }
    static __device__ __forceinline__ Of16Bits of(int thread) { return {thread % 16 / 4 * 16 + thread % 4 * 2, thread / 16}; }

    // Metadata of the row and of the next one, each with the eighth row after it.
    template <class F>
    __device__ __forceinline__ Vector<uint32_t, 4> made(F word_of) const {
      Vector<uint32_t, 4> out;
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int m = row + i / 2;
        const uint32_t both = select_bytes(word_of(m, word), word_of(m + 8, word), i % 2 == 0 ? 0x6420u : 0x7531u);
        const uint32_t l = both & 0xffffu, h = both >> 16;  // two bytes of either
        out.at[i] = (l & 0x0f0fu) | (h & 0x0f0fu) << 4 | (l >> 4 & 0x0f0fu) << 16 | (h & 0xf0f0u) << 16;
      }
      return out;
    }
  };

  struct Of8Bits {
    int row, word;

    static S24_HD int64_t at(int64_t m, int64_t q, int64_t depth) {
      return m / 64 * 16 * depth + q / 16 * 1024 + m % 64 / 16 * 256 + m % 8 * 32 + q / 2 % 4 * 8 + q / 8 % 2 * 4 +
             m / 8 % 2 * 2 + q % 2;
    }
    static __device__ __forceinline__ Of8Bits of(int thread) { return {thread % 32 / 8 * 16 + thread % 8, thread / 32 * 2}; }

    // Metadata of the row and of the eighth row after it.
    template <class F>
    __device__ __forceinline__ Vector<uint32_t, 4> made(F word_of) const {
      Vector<uint32_t, 4> out;
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t halves[2];
        S24_UNROLL
        for (int j = 0; j < 2; ++j)
          halves[j] = select_bytes(word_of(row, word + j), word_of(row + 8, word + j), 0x0040u + 0x11u * i);
        out.at[i] = select_bytes(halves[0], halves[1], 0x5410u);
      }
      return out;
    }
  };
};

// f(order) with the first of these orders that the current device has. Where it has none, f gets the last one, as programs do
// that are lowered elsewhere (dispatch/cusparselt.py).
template <class F, class Order, class... Others>
auto with_order_of(F f, Order order, Others... others) {
  if constexpr (sizeof...(others) > 0)
    if (!Order::is_of(compute_capability())) return with_order_of(f, others...);
  return f(order);
}

// f(order) with that of the current device. A generation with an order of its own adds it here.
template <class F>
auto with_order(F f) {
  return with_order_of(f, Sm90());
}

}  // namespace cuda
}  // namespace s24
