// Metadata in the order of libraries.
#include "../core/metadata_layouts.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

// Of a thread: which rows m and m + 8, and which piece of them, `groups` groups each.
struct Place {
  int64_t m, piece;

  static __device__ __forceinline__ Place of(int64_t unit, int64_t pieces) {
    Place p;
    const int64_t pair = divide(unit, pieces, &p.piece);
    p.m = pair / 8 * 16 + pair % 8;
    return p;
  }
};

constexpr uint8_t kPaddingByte = kPaddingNibble * 0x11;

// The bytes of a piece in a row; padding beyond the last row.
template <int bytes>
__device__ __forceinline__ Vector<uint8_t, bytes> read_piece(const uint8_t* metadata, int64_t row, int64_t rows,
                                                             int64_t depth, int64_t piece) {
  if (row < rows) return load<uint8_t, bytes>(metadata + row * (depth / 8) + bytes * piece);
  Vector<uint8_t, bytes> padding;
  S24_UNROLL
  for (int i = 0; i < bytes; ++i) padding.at[i] = kPaddingByte;
  return padding;
}

// Eight groups of rows m and m + 8 make eight bytes of cuSPARSELt's order.
__global__ void __launch_bounds__(kThreads) metadata_sm90_16bit(const uint8_t* metadata, uint8_t* out, int64_t rows,
                                                                int64_t depth, int64_t units) {
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= units) return;
  const Place p = Place::of(unit, depth / 32);
  const Vector<uint8_t, 4> low = read_piece<4>(metadata, p.m, rows, depth, p.piece);
  const Vector<uint8_t, 4> high = read_piece<4>(metadata, p.m + 8, rows, depth, p.piece);
  Vector<uint8_t, 8> made;
  S24_UNROLL
  for (int q = 0; q < 8; ++q) {
    const int shift = 4 * (q % 2);
    made.at[cusparselt_sm90_16bit(0, q, 0) / 2] = uint8_t((low.at[q / 2] >> shift & 15) | (high.at[q / 2] >> shift & 15) << 4);
  }
  store(out + cusparselt_sm90_16bit(p.m, 8 * p.piece, depth) / 2, made);
}

// Sixteen groups of them make sixteen bytes, each a byte of one row.
__global__ void __launch_bounds__(kThreads) metadata_sm90_8bit(const uint8_t* metadata, uint8_t* out, int64_t rows,
                                                               int64_t depth, int64_t units) {
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= units) return;
  const Place p = Place::of(unit, depth / 64);
  Vector<uint8_t, 16> made;
  S24_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Vector<uint8_t, 8> row = read_piece<8>(metadata, p.m + 8 * half, rows, depth, p.piece);
    S24_UNROLL
    for (int b = 0; b < 8; ++b) made.at[cusparselt_sm90_8bit(8 * half, 2 * b, 0) / 2] = row.at[b];
  }
  store(out + cusparselt_sm90_8bit(p.m, 16 * p.piece, depth) / 2, made);
}

}  // namespace

cudaError_t launch_metadata_sm90_16bit(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth,
                                       cudaStream_t stream) {
  const int64_t units = ceil_div(rows, 64) * 32 * (depth / 32);
  return start(metadata_sm90_16bit, dim3(blocks_for(units, kThreads)), kThreads, 0, stream, metadata, out, rows, depth, units);
}

cudaError_t launch_metadata_sm90_8bit(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth,
                                      cudaStream_t stream) {
  const int64_t units = ceil_div(rows, 64) * 32 * (depth / 64);
  return start(metadata_sm90_8bit, dim3(blocks_for(units, kThreads)), kThreads, 0, stream, metadata, out, rows, depth, units);
}

}  // namespace cuda
}  // namespace s24
