// Metadata in cuSPARSELt's order for sm_90 and 16-bit values, see metadata_layouts.h.
#pragma once
#include "../simt/select.h"
#include "../vectors.cuh"
#include "metadata_layouts.h"

namespace s24 {
namespace cuda {

// The 16 bytes that one of 64 threads writes. Together they write the 1024 bytes of 64 rows and 32 groups.
struct SixteenBytes {
  int row, word;  // the first row, and which word of eight groups
  static __device__ __forceinline__ SixteenBytes of(int thread) { return {thread % 16 / 4 * 16 + thread % 4 * 2, thread / 16}; }

  // The bytes in cuSPARSELt's order. word_of(row) gives eight nibbles as they are stored in rows.
  template <class F>
  __device__ __forceinline__ Vector<uint32_t, 4> made(F word_of) const {
    Vector<uint32_t, 4> out;
    S24_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = select_bytes(word_of(row + i / 2), word_of(row + i / 2 + 8), i % 2 == 0 ? 0x6420u : 0x7531u);
      const uint32_t l = both & 0xffffu, h = both >> 16;  // two bytes of either
      out.at[i] = (l & 0x0f0fu) | (h & 0x0f0fu) << 4 | (l >> 4 & 0x0f0fu) << 16 | (h & 0xf0f0u) << 16;
    }
    return out;
  }
};

}  // namespace cuda
}  // namespace s24
