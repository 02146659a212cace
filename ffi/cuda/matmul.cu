// out(R, N) = P(R, K) D(K, N) on sparse tensor cores, bfloat16 and float16: mma.sp, sm_80 and later.
//
// A block computes 128 x 128 with eight warps; tiles of 64 along K pass through shared memory, three in flight. Metadata
// are read as they are stored. Any shape: what does not fill a tile is zero, or is not written.
#include "../core/metadata.h"
#include "../core/metadata_layouts.h"
#include "mma_sp.cuh"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kTile = 128, kDepth = 64, kStages = 3;
constexpr int kWarpRows = 64, kWarpCols = 32;
constexpr int kRowTiles = kWarpRows / 16, kColTiles = kWarpCols / 8;
// Elements from one row to the next in shared memory: 16 bytes more than the row, so that eight rows fall on all banks.
constexpr int kValuesStride = kDepth / 2 + 8, kDenseByK = kDepth + 8, kDenseByN = kTile + 8, kOutStride = kTile + 4;
constexpr uint8_t kEmptyByte = kEmptyNibble | kEmptyNibble << 4;

struct Stage {
  uint16_t values[kTile * kValuesStride];
  uint16_t dense[kTile * kDenseByK > kDepth * kDenseByN ? kTile * kDenseByK : kDepth * kDenseByN];
  uint8_t metadata[kTile * kDepth / 8];
};

union Shared {
  Stage stages[kStages];
  float out[kTile * kOutStride];
};

// Which row of D belongs to column k of P: itself. (A gathering product has a table of columns here.)
struct EveryColumn {
  __device__ __forceinline__ int64_t operator()(int64_t k) const { return k; }
};

// kWhole: every 16 bytes of the operands are aligned and wholly inside or outside; else they are read one by one.
template <class Columns, bool kDenseKLast, bool kWhole>
struct Loader {
  const MatmulArgs& a;
  int64_t row0, col0;
  Columns column;

  __device__ __forceinline__ void operator()(Stage& s, int64_t k0) const {
    const auto* values = static_cast<const uint16_t*>(a.values) + row0 * (a.depth / 2) + k0 / 2;
    const auto* metadata = a.metadata + row0 * ceil_div(a.depth, 8) + k0 / 8;
    const int rows = int(min(a.rows - row0, int64_t(kTile))), cols = int(min(a.cols - col0, int64_t(kTile)));
    const int depth = int(min(a.depth - k0, int64_t(kDepth)));  // what is left of each
    S24_UNROLL
    for (int i = 0; i < kTile * kDepth / 2 / 8 / kThreads; ++i) {
      const int c = i * kThreads + int(threadIdx.x), r = c / (kDepth / 16), at = c % (kDepth / 16) * 8;
      copy8<kWhole>(s.values + r * kValuesStride + at, values + r * (a.depth / 2) + at, r < rows ? depth / 2 - at : 0);
    }
    if (threadIdx.x < kTile) {
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
      const auto* dense = static_cast<const uint16_t*>(a.dense) + col0 * a.depth + k0;
      S24_UNROLL
      for (int i = 0; i < kTile * kDepth / 8 / kThreads; ++i) {
        const int c = i * kThreads + int(threadIdx.x), n = c / (kDepth / 8), at = c % (kDepth / 8) * 8;
        copy8<kWhole>(s.dense + n * kDenseByK + at, dense + n * a.depth + at, n < cols ? depth - at : 0);
      }
    } else {
      const auto* dense = static_cast<const uint16_t*>(a.dense) + col0;
      S24_UNROLL
      for (int i = 0; i < kTile * kDepth / 8 / kThreads; ++i) {
        const int c = i * kThreads + int(threadIdx.x), k = c / (kTile / 8), at = c % (kTile / 8) * 8;
        const int64_t row = k < depth ? column(k0 + k) : 0;
        copy8<kWhole>(s.dense + k * kDenseByN + at, dense + row * a.cols + at, k < depth ? cols - at : 0);
      }
    }
  }
};

template <class T, bool kDenseKLast>
__device__ __forceinline__ void multiply(const Stage& s, int warp_row, int warp_col,
                                         float acc[kRowTiles][kColTiles][4]) {
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
template <class Out>
__device__ __forceinline__ void write_out(const MatmulArgs& a, Shared& shared, int64_t row0, int64_t col0, int warp_row,
                                          int warp_col, const float acc[kRowTiles][kColTiles][4], bool whole) {
  using Bits = typename Out::Bits;
  const int lane = threadIdx.x % 32;
  S24_UNROLL
  for (int m = 0; m < kRowTiles; ++m) {
    S24_UNROLL
    for (int n = 0; n < kColTiles; ++n) {
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = warp_row + 16 * m + lane / 4 + i / 2 * 8, c = warp_col + 8 * n + lane % 4 * 2 + i % 2;
        shared.out[a.out_packed_last ? c * kOutStride + r : r * kOutStride + c] = acc[m][n][i];
      }
    }
  }
  __syncthreads();
  const int64_t line0 = a.out_packed_last ? col0 : row0, at0 = a.out_packed_last ? row0 : col0;
  const int64_t lines = a.out_packed_last ? a.cols : a.rows, length = a.out_packed_last ? a.rows : a.cols;
  auto* out = static_cast<Bits*>(a.out);
  for (int c = threadIdx.x; c < kTile * kTile / 8; c += kThreads) {
    const int line = c / (kTile / 8), at = c % (kTile / 8) * 8;
    if (line0 + line >= lines) break;
    const float* from = shared.out + line * kOutStride + at;
    Bits* const to = out + (line0 + line) * length + at0 + at;
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

template <class T, class Columns, bool kDenseKLast, bool kWhole>
__global__ void __launch_bounds__(kThreads, kWhole ? 2 : 1) matmul_sp(MatmulArgs a, Columns column, bool whole_out) {
  extern __shared__ __align__(128) unsigned char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const int64_t row0 = int64_t(blockIdx.x) * kTile, col0 = int64_t(blockIdx.y) * kTile;
  const int warp = threadIdx.x / 32, warp_row = warp / 4 * kWarpRows, warp_col = warp % 4 * kWarpCols;
  const Loader<Columns, kDenseKLast, kWhole> load_stage{a, row0, col0, column};
  const int steps = int(ceil_div(a.depth, kDepth));
  float acc[kRowTiles][kColTiles][4] = {};
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
    multiply<T, kDenseKLast>(shared.stages[s % kStages], warp_row, warp_col, acc);
  }
  wait_copies<0>();
  __syncthreads();
  if (a.out_dtype == Dtype::kF32)
    write_out<F32>(a, shared, row0, col0, warp_row, warp_col, acc, whole_out);
  else
    write_out<T>(a, shared, row0, col0, warp_row, warp_col, acc, whole_out);
}

template <class T, bool kDenseKLast, bool kWhole>
cudaError_t launch(const MatmulArgs& a, cudaStream_t stream) {
  const auto kernel = matmul_sp<T, EveryColumn, kDenseKLast, kWhole>;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(sizeof(Shared)));
  if (e != cudaSuccess) return e;
  const int64_t length = a.out_packed_last ? a.rows : a.cols;
  const dim3 grid(blocks_for(a.rows, kTile), blocks_for(a.cols, kTile));
  kernel<<<grid, kThreads, sizeof(Shared), stream>>>(a, EveryColumn(), aligned(a.out, 16) && length % 8 == 0);
  return cudaGetLastError();
}

}  // namespace

// A check of the machine code compiles one dtype.
#if defined(S24_ONE_DTYPE)
template <class T>
constexpr bool kCompiled = std::is_same_v<T, BF16>;
#else
template <class T>
constexpr bool kCompiled = sizeof(typename T::Bits) == 2;
#endif

cudaError_t launch_matmul(const MatmulArgs& a, cudaStream_t stream) {
  const bool whole = aligned(a.values, 16) && aligned(a.dense, 16) && aligned(a.metadata, 8) && a.depth % kDepth == 0 &&
                     (a.dense_k_last || a.cols % 8 == 0);
  return for_dtype(a.in, [&](auto type) {
    using T = decltype(type);
    if constexpr (kCompiled<T>) {
      if (a.dense_k_last) return whole ? launch<T, true, true>(a, stream) : launch<T, true, false>(a, stream);
      return whole ? launch<T, false, true>(a, stream) : launch<T, false, false>(a, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

}  // namespace cuda
}  // namespace s24
