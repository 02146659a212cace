// Tiles of 4x4: transposable masks and pruning along both axes. Compiled without contraction of products and sums.
#include <type_traits>

#include "../core/tiles.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {
namespace {

template <TileOp op, class T>
using Out = std::conditional_t<op == TileOp::kTransposableMask, uint8_t, typename T::Bits>;

template <TileOp op, class T>
__global__ void __launch_bounds__(kThreads) tile(const typename T::Bits* w, Out<op, T>* y, int64_t tiles, int64_t cols) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= tiles) return;
  int64_t column;
  const int64_t row = divide(unit, cols / 4, &column), at = 4 * (row * cols + column);
  Bits in[16];
  S24_UNROLL
  for (int r = 0; r < 4; ++r) {
    const Vector<Bits, 4> v = load<Bits, 4>(w + at + r * cols);
    S24_UNROLL
    for (int c = 0; c < 4; ++c) in[4 * r + c] = v.at[c];
  }
  uint32_t mask = 0;
  if constexpr (op == TileOp::kTransposableMask) {
    uint32_t wide[16];
    S24_UNROLL
    for (int i = 0; i < 16; ++i) wide[i] = T::to_f32(in[i]);
    mask = best_tile_mask(wide);
  } else {
    double_prune_tile<T, op == TileOp::kPruneColumnsFirst>(in);
  }
  S24_UNROLL
  for (int r = 0; r < 4; ++r) {
    Vector<Out<op, T>, 4> v;
    S24_UNROLL
    for (int c = 0; c < 4; ++c) {
      if constexpr (op == TileOp::kTransposableMask)
        v.at[c] = uint8_t(mask >> (4 * r + c) & 1);
      else
        v.at[c] = in[4 * r + c];
    }
    store(y + at + r * cols, v);
  }
}

template <TileOp op, class T>
cudaError_t launch(const TileArgs& a, cudaStream_t stream) {
  const int64_t tiles = a.rows / 4 * (a.cols / 4);
  tile<op, T><<<blocks_for(tiles, kThreads), kThreads, 0, stream>>>(static_cast<const typename T::Bits*>(a.w),
                                                                    static_cast<Out<op, T>*>(a.out), tiles, a.cols);
  return cudaGetLastError();
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
