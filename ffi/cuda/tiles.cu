// Tiles of 4x4: transposable masks and pruning along both axes. Compiled without contraction of products and sums.
#include <type_traits>

#include "../core/tiles.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

template <TileOp op, class T>
using Out = std::conditional_t<op == TileOp::kTransposableMask, uint8_t, typename T::Bits>;

// Never inlined: it is rare.
template <class T>
__device__ __noinline__ uint32_t rare_tile_mask(Vector<typename T::Bits, 4> w0, Vector<typename T::Bits, 4> w1,
                                                Vector<typename T::Bits, 4> w2, Vector<typename T::Bits, 4> w3) {
  uint32_t wide[16];
  S24_UNROLL
  for (int i = 0; i < 16; ++i) wide[i] = T::to_f32((i < 4 ? w0 : i < 8 ? w1 : i < 12 ? w2 : w3).at[i % 4]);
  return best_tile_mask(wide);
}

template <class T>
__device__ __forceinline__ uint32_t tile_mask(const Vector<typename T::Bits, 4> (&rows)[4]) {
  if constexpr (sizeof(typename T::Bits) == 2) {
    float w[16], largest = 0;
    S24_UNROLL
    for (int r = 0; r < 4; ++r) {
      uint32_t words[2];
      __builtin_memcpy(words, rows[r].at, sizeof words);
      S24_UNROLL
      for (int i = 0; i < 2; ++i) {
        w[4 * r + 2 * i] = low_number<T>(words[i]);
        w[4 * r + 2 * i + 1] = high_number<T>(words[i]);
      }
      largest = larger_magnitude(largest, larger_magnitude(larger_magnitude(w[4 * r], w[4 * r + 1]),
                                                           larger_magnitude(w[4 * r + 2], w[4 * r + 3])));
    }
    if (largest < 0x1p127f) return best_tile_mask_of_numbers(w, largest);
  }
  return rare_tile_mask<T>(rows[0], rows[1], rows[2], rows[3]);
}

template <TileOp op, class T>
__global__ void __launch_bounds__(kThreads) tile(const typename T::Bits* w, Out<op, T>* y, int64_t tiles, int64_t cols) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= tiles) return;
  int64_t column;
  const int64_t row = divide(unit, cols / 4, &column), at = 4 * (row * cols + column);
  Vector<Bits, 4> in[4];
  S24_UNROLL
  for (int r = 0; r < 4; ++r) in[r] = load<Bits, 4>(w + at + r * cols);
  if constexpr (op == TileOp::kTransposableMask) {
    const uint32_t mask = tile_mask<T>(in);
    S24_UNROLL
    for (int r = 0; r < 4; ++r) {
      const uint32_t bits = mask >> (4 * r) & 15u;  // to four bytes, 0 or 1 each: the products do not meet
      store(reinterpret_cast<uint32_t*>(y + at + r * cols), Vector<uint32_t, 1>{{bits * 0x00204081u & 0x01010101u}});
    }
  } else {
    Bits all[16];
    S24_UNROLL
    for (int i = 0; i < 16; ++i) all[i] = in[i / 4].at[i % 4];
    double_prune_tile<T, op == TileOp::kPruneColumnsFirst>(all);
    S24_UNROLL
    for (int r = 0; r < 4; ++r) {
      const Bits* v = all + 4 * r;
      store(y + at + r * cols, Vector<Bits, 4>{{v[0], v[1], v[2], v[3]}});
    }
  }
}

template <TileOp op, class T>
cudaError_t launch(const TileArgs& a, cudaStream_t stream) {
  const int64_t tiles = a.rows / 4 * (a.cols / 4);
  return start(tile<op, T>, dim3(blocks_for(tiles, kThreads)), kThreads, 0, stream, static_cast<const typename T::Bits*>(a.w),
               static_cast<Out<op, T>*>(a.out), tiles, a.cols);
}

}  // namespace

cudaError_t launch_tile(const TileArgs& a, cudaStream_t stream) {
  if (a.rows == 0 || a.cols == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    switch (a.op) {
      case TileOp::kTransposableMask: return launch<TileOp::kTransposableMask, T>(a, stream);
      case TileOp::kPruneColumnsFirst: return launch<TileOp::kPruneColumnsFirst, T>(a, stream);
      case TileOp::kPruneRowsFirst: return launch<TileOp::kPruneRowsFirst, T>(a, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace cuda
}  // namespace s24
