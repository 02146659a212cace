// The product on sparse tensor cores as a kernel for any table of columns: mma.sp, sm_80 and later.
//
// A block computes kRows x 128 with eight warps; tiles of 64 along K pass through shared memory, three in flight. Metadata
// are read as they are stored. Any shape: what does not fill a tile is zero, or is not written.
#pragma once
#include "../core/matmul_vnm.h"
#include "../core/packed24.h"
#include "../core/packed_vnm.h"
#include "mma_sp.cuh"
#include "vectors.cuh"

namespace s24 {
namespace cuda {

constexpr int kTile = 128, kDepth = 64, kStages = 3;
// Elements from one row to the next in shared memory: 16 bytes more than the row, so that eight rows fall on all banks.
constexpr int kValuesStride = kDepth / 2 + 8, kDenseByK = kDepth + 8, kDenseByN = kTile + 8;
constexpr uint8_t kEmptyByte = kEmptyNibble | kEmptyNibble << 4;

// What a warp computes of a block's kRows x 128.
template <int kRows>
struct Warps {
  static constexpr int kDown = kRows >= 32 ? 2 : 1, kAcross = kThreads / 32 / kDown;
  static constexpr int kWarpRows = kRows / kDown, kWarpCols = kTile / kAcross;
  static constexpr int kRowTiles = kWarpRows / 16, kColTiles = kWarpCols / 8;
  static_assert(kRowTiles * 16 * kDown == kRows, "whole tiles of mma.sp");
  using Sums = float[kRowTiles][kColTiles][4];
};

template <int kRows>
struct Stage {
  uint16_t values[kRows * kValuesStride];
  uint16_t dense[kTile * kDenseByK > kDepth * kDenseByN ? kTile * kDenseByK : kDepth * kDenseByN];
  uint8_t metadata[kRows * kDepth / 8];
};

template <int kRows>
union Shared {
  Stage<kRows> stages[kStages];
  float out[(kRows + 4) * (kTile + 4)];
};

// Which row of D belongs to column k of P, and which of the result to row r: the same; or what a table says, for a block of rows of
// P, and Collected.
struct EveryColumn {
  static constexpr bool kGathers = false;
  __device__ EveryColumn of_block(int64_t, int64_t) const { return *this; }
  __device__ int64_t operator()(int64_t k) const { return k; }
  __device__ int64_t depth(int64_t packed_depth) const { return packed_depth; }
  __device__ int64_t row(int64_t r) const { return r; }
};

struct GatheredColumns {
  static constexpr bool kGathers = true;
  const uint8_t* columns;
  int v;
  Grouping grouping;
  Collected collected;
  __device__ GatheredColumns of_block(int64_t row, int64_t depth) const {
    return {columns + row / v * depth, v, grouping, collected};
  }
  __device__ int64_t operator()(int64_t k) const { return grouping.column(k / 4, columns[k]); }
  __device__ int64_t depth(int64_t packed_depth) const { return packed_depth / 4 * grouping.m; }  // of D
  __device__ int64_t row(int64_t r) const { return collected.row(r); }
};

// kWhole: every 16 bytes of the operands are aligned and wholly inside or outside; else they are read one by one.
template <int kRows, class Columns, bool kDenseKLast, bool kWhole>
struct Loader {
  const MatmulArgs& a;
  int64_t row0, col0;
  Columns column;

  __device__ __forceinline__ void operator()(Stage<kRows>& s, int64_t k0) const {
    const auto* values = static_cast<const uint16_t*>(a.values) + row0 * (a.depth / 2) + k0 / 2;
    const auto* metadata = a.metadata + row0 * ceil_div(a.depth, 8) + k0 / 8;
    const int rows = int(min(a.rows - row0, int64_t(kRows))), cols = int(min(a.cols - col0, int64_t(kTile)));
    const int depth = int(min(a.depth - k0, int64_t(kDepth)));  // what is left of each
    S24_UNROLL
    for (int i = 0; i < (kRows * kDepth / 16 + kThreads - 1) / kThreads; ++i) {
      const int c = i * kThreads + int(threadIdx.x), r = c / (kDepth / 16), at = c % (kDepth / 16) * 8;
      if (kRows * kDepth / 16 % kThreads != 0 && r >= kRows) break;
      copy8<kWhole>(s.values + r * kValuesStride + at, values + r * (a.depth / 2) + at, r < rows ? depth / 2 - at : 0);
    }
    if (threadIdx.x < kRows) {
      const int r = threadIdx.x, bytes = r < rows ? (depth + 7) / 8 : 0;
      uint8_t* const to = s.metadata + r * (kDepth / 8);
      const uint8_t* const from = metadata + r * ceil_div(a.depth, 8);
      if (kWhole) {
        copy_async<8>(to, from, r < rows);
      } else {
        for (int b = 0; b < kDepth / 8; ++b) to[b] = b < bytes ? from[b] : kEmptyByte;
      }
    }
    if constexpr (kDenseKLast) {
      static_assert(!Columns::kGathers, "rows of D are gathered whole");
      const auto* dense = static_cast<const uint16_t*>(a.dense) + col0 * a.depth + k0;
      S24_UNROLL
      for (int i = 0; i < kTile * kDepth / 8 / kThreads; ++i) {
        const int c = i * kThreads + int(threadIdx.x), n = c / (kDepth / 8), at = c % (kDepth / 8) * 8;
        copy8<kWhole>(s.dense + n * kDenseByK + at, dense + n * a.depth + at, n < cols ? depth - at : 0);
      }
    } else {
      const auto* dense = static_cast<const uint16_t*>(a.dense) + col0;
#pragma unroll(Columns::kGathers ? 2 : kTile * kDepth / 8 / kThreads)
      for (int i = 0; i < kTile * kDepth / 8 / kThreads; ++i) {
        const int c = i * kThreads + int(threadIdx.x), k = c / (kTile / 8), at = c % (kTile / 8) * 8;
        const int64_t row = k < depth ? column(k0 + k) : 0;
        copy8<kWhole>(s.dense + k * kDenseByN + at, dense + row * a.cols + at, k < depth ? cols - at : 0);
      }
    }
  }
};

template <class T, int kRows, bool kDenseKLast>
__device__ __forceinline__ void multiply(const Stage<kRows>& s, int warp_row, int warp_col,
                                         typename Warps<kRows>::Sums& acc) {
  constexpr int kRowTiles = Warps<kRows>::kRowTiles, kColTiles = Warps<kRows>::kColTiles;
  const int lane = threadIdx.x % 32;
  uint32_t words[kRowTiles];
  S24_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    words[m] = 0;
    S24_UNROLL
    for (int half = 0; half < 2; ++half) {
      const MmaWord w = mma_sp_word(lane, half);
      const int row = warp_row + 16 * m + w.row;
      const uint32_t word = *reinterpret_cast<const uint16_t*>(s.metadata + row * (kDepth / 8) + 2 * w.column);
      words[m] |= word << (16 * half);
    }
  }
  const auto step = [&](auto selector) {
    constexpr int kStep = decltype(selector)::value;
    uint32_t sparse[kRowTiles][4];
    S24_UNROLL
    for (int m = 0; m < kRowTiles; ++m)
      load_matrices<false>(s.values + (warp_row + 16 * m + lane % 16) * kValuesStride + 16 * kStep + lane / 16 * 8,
                           sparse[m]);
    S24_UNROLL
    for (int n = 0; n < kColTiles; ++n) {
      uint32_t dense[4];
      if constexpr (kDenseKLast)
        load_matrices<false>(s.dense + (warp_col + 8 * n + lane % 8) * kDenseByK + 32 * kStep + lane / 8 * 8, dense);
      else
        load_matrices<true>(s.dense + (32 * kStep + lane) * kDenseByN + warp_col + 8 * n, dense);
      S24_UNROLL
      for (int m = 0; m < kRowTiles; ++m) mma_sp<T, kStep>(acc[m][n], sparse[m], dense, words[m]);
    }
  };
  step(std::integral_constant<int, 0>());
  step(std::integral_constant<int, 1>());
}

// The block's results leave through shared memory, so that whole lines of the result are written whichever way it lies.
template <class Out, int kRows, class Columns>
__device__ __forceinline__ void write_out(const MatmulArgs& a, const Columns& columns, Shared<kRows>& shared, int64_t row0,
                                          int64_t col0, int warp_row, int warp_col,
                                          const typename Warps<kRows>::Sums& acc, bool whole) {
  using Bits = typename Out::Bits;
  constexpr int kRowTiles = Warps<kRows>::kRowTiles, kColTiles = Warps<kRows>::kColTiles;
  const int lane = threadIdx.x % 32, height = a.out_packed_last ? kTile : kRows, width = a.out_packed_last ? kRows : kTile;
  const int stride = width + 4;
  S24_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    S24_UNROLL
    for (int n = 0; n < kColTiles; ++n) {
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = warp_row + 16 * m + lane / 4 + i / 2 * 8, c = warp_col + 8 * n + lane % 4 * 2 + i % 2;
        shared.out[a.out_packed_last ? c * stride + r : r * stride + c] = acc[m][n][i];
      }
    }
  }
  __syncthreads();
  const int64_t line0 = a.out_packed_last ? col0 : row0, at0 = a.out_packed_last ? row0 : col0;
  const int64_t lines = a.out_packed_last ? a.cols : a.rows, length = a.out_packed_last ? a.rows : a.cols;
  auto* out = static_cast<Bits*>(a.out);
  for (int c = threadIdx.x; c < height * width / 8; c += kThreads) {
    const int line = c / (width / 8), at = c % (width / 8) * 8;
    if (line0 + line >= lines) break;
    const float* from = shared.out + line * stride + at;
    Bits* const to = out + columns.row(line0 + line) * length + at0 + at;
    const int64_t left = length - at0 - at;
    Vector<Bits, 8> v;
    S24_UNROLL
    for (int i = 0; i < 8; ++i) v.at[i] = Out::from_f32(bits_of(from[i]));
    if (whole && left >= 8) {
      S24_UNROLL
      for (int i = 0; i < 8; i += 16 / int(sizeof(Bits)))
        store(to + i, *reinterpret_cast<const Vector<Bits, 16 / int(sizeof(Bits))>*>(v.at + i));
    } else {
      S24_UNROLL
      for (int i = 0; i < 8; ++i)
        if (i < left) to[i] = v.at[i];
    }
  }
}

template <class T, int kRows, class Columns, bool kDenseKLast, bool kWhole>
__global__ void __launch_bounds__(kThreads, kWhole ? 2 : 1) matmul_sp(MatmulArgs a, Columns columns, bool whole_out) {
  using W = Warps<kRows>;
  auto& shared = *reinterpret_cast<Shared<kRows>*>(launched_memory());
  const int64_t row0 = int64_t(blockIdx.x) * kRows, col0 = int64_t(blockIdx.y) * kTile;
  const int warp = threadIdx.x / 32, warp_row = warp / W::kAcross * W::kWarpRows, warp_col = warp % W::kAcross * W::kWarpCols;
  const Loader<kRows, Columns, kDenseKLast, kWhole> load_stage{a, row0, col0, columns.of_block(row0, a.depth)};
  const int steps = int(ceil_div(a.depth, kDepth));
  typename W::Sums acc = {};
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) load_stage(shared.stages[s], int64_t(s) * kDepth);
    commit_copies();
  }
  for (int s = 0; s < steps; ++s) {
    wait_copies<kStages - 2>();
    __syncthreads();
    const int ahead = s + kStages - 1;
    if (ahead < steps) load_stage(shared.stages[ahead % kStages], int64_t(ahead) * kDepth);
    commit_copies();
    multiply<T, kRows, kDenseKLast>(shared.stages[s % kStages], warp_row, warp_col, acc);
  }
  wait_copies<0>();
  __syncthreads();
  if (a.out_dtype == Dtype::kF32)
    write_out<F32, kRows>(a, columns, shared, row0, col0, warp_row, warp_col, acc, whole_out);
  else
    write_out<T, kRows>(a, columns, shared, row0, col0, warp_row, warp_col, acc, whole_out);
}

template <class T, int kRows, bool kDenseKLast, bool kWhole, class Columns>
cudaError_t launch_matmul_sp(const MatmulArgs& a, const Columns& columns, cudaStream_t stream) {
  const auto kernel = matmul_sp<T, kRows, Columns, kDenseKLast, kWhole>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared<kRows>)));
  if (e != cudaSuccess) return e;
  const int64_t length = a.out_packed_last ? a.rows : a.cols;
  const dim3 grid(blocks_for(a.rows, kRows), blocks_for(a.cols, kTile));
  return start(kernel, grid, kThreads, sizeof(Shared<kRows>), stream, a, columns, aligned(a.out, 16) && length % 8 == 0);
}

// Whether all operands but a gathered one fall into whole accesses.
inline bool whole_accesses(const MatmulArgs& a) {
  return aligned(a.values, 16) && aligned(a.dense, 16) && aligned(a.metadata, 8) && a.depth % kDepth == 0 &&
         (a.dense_k_last || a.cols % 8 == 0);
}

// The same products of float32, whose sums are float32 FMAs.
cudaError_t launch_matmul_f32(const MatmulArgs& args, cudaStream_t stream);
cudaError_t launch_matmul_vnm_f32(const MatmulVnmArgs& args, cudaStream_t stream);

// f(T). A check of the machine code compiles one dtype.
template <class F>
cudaError_t for_type(Dtype in, F f) {
  if (in == Dtype::kBF16) return f(BF16());
#if !defined(S24_ONE_DTYPE)
  if (in == Dtype::kF16) return f(F16());
#endif
  return cudaErrorInvalidValue;
}

}  // namespace cuda
}  // namespace s24
