// The product of a packed matrix and a dense one in float32, by fused multiply-adds: sparse tensor cores have no exact float32.
//
// Operands: as in matmul.fma.cu and matmul_vnm.fma.cu, all float32.
// Steps: a block computes 16 kOwn x 64 of the result, a thread kOwn x 4. Tiles of 32 along K pass through shared memory. Only
// kept elements are multiplied, in ascending order of K.
// Constraints: none; V of V:N:M matrices is a multiple of 16.
#include "matmul.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kCols = 64, kStep = 32, kGroups = kStep / 4, kOwnCols = 4;

template <int kRows>
struct Operands {
  float values[kRows][kStep / 2 + 1];
  uint8_t nibbles[kRows][kGroups];
  float dense[kStep][kCols + 4];
};

template <int kOwn, class Columns>
__global__ void __launch_bounds__(kThreads) matmul_f32(MatmulArgs a, Columns columns) {
  constexpr int kRows = 16 * kOwn;
  __shared__ Operands<kRows> s;
  const int64_t row0 = int64_t(blockIdx.x) * kRows, col0 = int64_t(blockIdx.y) * kCols;
  const int own_row = threadIdx.x / 16 * kOwn, own_col = threadIdx.x % 16 * kOwnCols;
  const Columns column = columns.of_block(row0, a.depth);
  const int64_t dense_depth = column.depth(a.depth);
  const auto* values = static_cast<const float*>(a.values);
  const auto* dense = static_cast<const float*>(a.dense);
  const int64_t half = a.depth / 2, bytes = ceil_div(a.depth, 8);
  float acc[kOwn][kOwnCols] = {};
  for (int64_t k0 = 0; k0 < a.depth; k0 += kStep) {
    for (int c = threadIdx.x; c < kRows * kStep / 2; c += kThreads) {
      const int r = c / (kStep / 2), k = c % (kStep / 2);
      s.values[r][k] = row0 + r < a.rows && k0 / 2 + k < half ? values[(row0 + r) * half + k0 / 2 + k] : 0.0f;
    }
    for (int c = threadIdx.x; c < kRows * kGroups; c += kThreads) {
      const int r = c / kGroups;
      const int64_t q = k0 / 4 + c % kGroups;
      s.nibbles[r][c % kGroups] =
          row0 + r < a.rows && 4 * q < a.depth ? a.metadata[(row0 + r) * bytes + q / 2] >> (q % 2 * 4) & 15 : kEmptyNibble;
    }
    for (int c = threadIdx.x; c < kStep * kCols; c += kThreads) {
      const int k = a.dense_k_last ? c % kStep : c / kCols, n = a.dense_k_last ? c / kStep : c % kCols;
      const bool inside = k0 + k < a.depth && col0 + n < a.cols;
      const int64_t from = inside ? column(k0 + k) : 0;
      s.dense[k][n] = inside ? dense[a.dense_k_last ? (col0 + n) * dense_depth + from : from * a.cols + col0 + n] : 0.0f;
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
          for (int c = 0; c < kOwnCols; ++c) acc[r][c] = fmaf(v, d[c], acc[r][c]);
        }
      }
    }
    __syncthreads();
  }
  auto* out = static_cast<float*>(a.out);
  S24_UNROLL
  for (int r = 0; r < kOwn; ++r) {
    S24_UNROLL
    for (int c = 0; c < kOwnCols; ++c) {
      const int64_t row = row0 + own_row + r, col = col0 + own_col + c;
      if (row < a.rows && col < a.cols)
        out[a.out_packed_last ? col * a.rows + row : column.row(row) * a.cols + col] = acc[r][c];
    }
  }
}

}  // namespace

cudaError_t launch_matmul_f32(const MatmulArgs& a, cudaStream_t stream) {
  const dim3 grid(blocks_for(a.rows, 64), blocks_for(a.cols, kCols));
  return start(matmul_f32<4, EveryColumn>, grid, kThreads, 0, stream, a, EveryColumn());
}

cudaError_t launch_matmul_vnm_f32(const MatmulVnmArgs& args, cudaStream_t stream) {
  MatmulArgs a = args.product;
  a.depth = a.depth / args.grouping.m * 4;  // of P as it is stored
  const GatheredColumns columns = {args.columns, int(args.v), args.grouping, args.collected};
  const bool tall = args.v % 64 == 0;
  const dim3 grid(blocks_for(a.rows, tall ? 64 : 16), blocks_for(a.cols, kCols));
  return start(tall ? matmul_f32<4, GatheredColumns> : matmul_f32<1, GatheredColumns>, grid, kThreads, 0, stream, a, columns);
}

}  // namespace cuda
}  // namespace s24
