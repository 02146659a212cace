// out(R, N) = P(R, K) D(K, N) in float32, by fused multiply-adds: sparse tensor cores have no exact float32.
//
// A block computes 64 x 64, a thread 4 x 4 of them. Only kept elements are multiplied, in ascending order of K.
#include "../core/metadata.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kTile = 64, kDepth = 32, kGroups = kDepth / 4, kOwn = 4;

struct Shared {
  float values[kTile][kDepth / 2 + 1];
  uint8_t nibbles[kTile][kGroups];
  float dense[kDepth][kTile + 4];
};

__global__ void __launch_bounds__(kThreads) matmul_f32(MatmulArgs a) {
  __shared__ Shared s;
  const int64_t row0 = int64_t(blockIdx.x) * kTile, col0 = int64_t(blockIdx.y) * kTile;
  const int own_row = threadIdx.x / 16 * kOwn, own_col = threadIdx.x % 16 * kOwn;
  const auto* values = static_cast<const float*>(a.values);
  const auto* dense = static_cast<const float*>(a.dense);
  const int64_t half = a.depth / 2, bytes = ceil_div(a.depth, 8);
  float acc[kOwn][kOwn] = {};
  for (int64_t k0 = 0; k0 < a.depth; k0 += kDepth) {
    for (int c = threadIdx.x; c < kTile * kDepth / 2; c += kThreads) {
      const int r = c / (kDepth / 2), k = c % (kDepth / 2);
      s.values[r][k] = row0 + r < a.rows && k0 / 2 + k < half ? values[(row0 + r) * half + k0 / 2 + k] : 0.0f;
    }
    for (int c = threadIdx.x; c < kTile * kGroups; c += kThreads) {
      const int r = c / kGroups;
      const int64_t q = k0 / 4 + c % kGroups;
      s.nibbles[r][c % kGroups] =
          row0 + r < a.rows && 4 * q < a.depth ? a.metadata[(row0 + r) * bytes + q / 2] >> (q % 2 * 4) & 15 : kEmptyNibble;
    }
    for (int c = threadIdx.x; c < kDepth * kTile; c += kThreads) {
      const int k = a.dense_k_last ? c % kDepth : c / kTile, n = a.dense_k_last ? c / kDepth : c % kTile;
      const bool inside = k0 + k < a.depth && col0 + n < a.cols;
      const int64_t at = a.dense_k_last ? (col0 + n) * a.depth + k0 + k : (k0 + k) * a.cols + col0 + n;
      s.dense[k][n] = inside ? dense[at] : 0.0f;
    }
    __syncthreads();
    for (int q = 0; q < kGroups; ++q) {
      S24_UNROLL
      for (int r = 0; r < kOwn; ++r) {
        const uint32_t nibble = s.nibbles[own_row + r][q];
        S24_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float v = s.values[own_row + r][2 * q + j];
          const float* d = &s.dense[4 * q + (nibble >> (2 * j) & 3)][own_col];
          S24_UNROLL
          for (int c = 0; c < kOwn; ++c) acc[r][c] = fmaf(v, d[c], acc[r][c]);
        }
      }
    }
    __syncthreads();
  }
  auto* out = static_cast<float*>(a.out);
  S24_UNROLL
  for (int r = 0; r < kOwn; ++r) {
    S24_UNROLL
    for (int c = 0; c < kOwn; ++c) {
      const int64_t row = row0 + own_row + r, col = col0 + own_col + c;
      if (row < a.rows && col < a.cols) out[a.out_packed_last ? col * a.rows + row : row * a.cols + col] = acc[r][c];
    }
  }
}

}  // namespace

cudaError_t launch_matmul_f32(const MatmulArgs& a, cudaStream_t stream) {
  const dim3 grid(blocks_for(a.rows, kTile), blocks_for(a.cols, kTile));
  matmul_f32<<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace s24
