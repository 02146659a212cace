// Metadata in the order of libraries.
#include "../core/metadata_layouts.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

// Eight groups of rows m and m + 8 make eight bytes of cuSPARSELt's order. Rows beyond the last are padding.
__global__ void __launch_bounds__(kThreads) metadata_sm90(const uint8_t* metadata, uint8_t* out, int64_t rows,
                                                          int64_t depth, int64_t units) {
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= units) return;
  int64_t block;
  const int64_t pair = divide(unit, depth / 32, &block);  // of rows, then which eight groups
  const int64_t m = pair / 8 * 16 + pair % 8;
  uint32_t nibbles[2];
  S24_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t row = m + 8 * half;
    nibbles[half] = row < rows ? *reinterpret_cast<const uint32_t*>(metadata + row * (depth / 8) + 4 * block)
                               : uint32_t(kPaddingNibble) * 0x11111111u;
  }
  Vector<uint8_t, 8> bytes;
  S24_UNROLL
  for (int q = 0; q < 8; ++q) {
    const int at = int(cusparselt_sm90_16bit(0, q, 0)) / 2;
    bytes.at[at] = uint8_t((nibbles[0] >> (4 * q) & 15) | (nibbles[1] >> (4 * q) & 15) << 4);
  }
  store(out + cusparselt_sm90_16bit(m, 8 * block, depth) / 2, bytes);
}

}  // namespace

cudaError_t launch_metadata_sm90(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth,
                                 cudaStream_t stream) {
  const int64_t units = ceil_div(rows, 64) * 32 * (depth / 32);
  metadata_sm90<<<blocks_for(units, kThreads), kThreads, 0, stream>>>(metadata, out, rows, depth, units);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace s24
