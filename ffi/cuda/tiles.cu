// Tiles of 4x4: transposable masks and pruning along both axes. Compiled without contraction of products and sums.
#include <type_traits>

#include "tile_search.cuh"

namespace s24 {
namespace cuda {
namespace {

template <TileOp op, class T>
using Out = std::conditional_t<op == TileOp::kTransposableMask, uint8_t, typename T::Bits>;

// A thread takes kTiles tiles that stand side by side.
template <TileOp op, class T, int kTiles>
__global__ void __launch_bounds__(kThreads) tile(const typename T::Bits* w, Out<op, T>* y, int64_t units, int64_t cols) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= units) return;
  int64_t column;
  const int64_t row = divide(unit, cols / (4 * kTiles), &column), at = 4 * (row * cols + kTiles * column);
  Vector<Vector<Bits, 4>, kTiles> in[4];
  S24_UNROLL
  for (int r = 0; r < 4; ++r) in[r] = load<Vector<Bits, 4>, kTiles>(reinterpret_cast<const Vector<Bits, 4>*>(w + at + r * cols));
  if constexpr (op == TileOp::kTransposableMask) {
    Vector<uint32_t, kTiles> out[4];
    S24_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const TileRows<T> rows = {in[0].at[t], in[1].at[t], in[2].at[t], in[3].at[t]};
      const uint32_t mask = tile_mask<T>(rows);
      S24_UNROLL
      for (int r = 0; r < 4; ++r) out[r].at[t] = row_bytes(mask, r);
    }
    S24_UNROLL
    for (int r = 0; r < 4; ++r) store(reinterpret_cast<uint32_t*>(y + at + r * cols), out[r]);
  } else {
    Bits all[16];
    S24_UNROLL
    for (int i = 0; i < 16; ++i) all[i] = in[i / 4].at[0].at[i % 4];
    double_prune_tile<T, op == TileOp::kPruneColumnsFirst>(all);
    S24_UNROLL
    for (int r = 0; r < 4; ++r) {
      const Bits* v = all + 4 * r;
      store(y + at + r * cols, Vector<Bits, 4>{{v[0], v[1], v[2], v[3]}});
    }
  }
}

template <TileOp op, class T, int kTiles>
cudaError_t launch_tiles(const TileArgs& a, cudaStream_t stream) {
  const int64_t units = a.rows / 4 * (a.cols / (4 * kTiles));
  return start(tile<op, T, kTiles>, dim3(blocks_for(units, kThreads)), kThreads, 0, stream,
               static_cast<const typename T::Bits*>(a.w), static_cast<Out<op, T>*>(a.out), units, a.cols);
}

template <TileOp op, class T>
cudaError_t launch(const TileArgs& a, cudaStream_t stream) {
  if constexpr (op == TileOp::kTransposableMask && sizeof(typename T::Bits) == 2)
    if (a.cols % 8 == 0 && aligned(a.w, 16) && aligned(a.out, 8)) return launch_tiles<op, T, 2>(a, stream);
  return launch_tiles<op, T, 1>(a, stream);
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
