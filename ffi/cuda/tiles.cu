// Tiles of 4x4: transposable masks and pruning along both axes. Compiled without contraction of products and sums.
#include <type_traits>

#include "tile_search.cuh"

namespace s24 {
namespace cuda {
namespace {

template <TileOp op, class T>
using Out = std::conditional_t<op == TileOp::kTransposableMask, uint8_t, typename T::Bits>;

constexpr unsigned kAcross = 32;  // threads side by side where a thread takes two tiles

// A thread takes kTiles tiles that stand side by side. One: threads follow each other in rows of tiles; two: a block takes
// kAcross threads of each of several rows of tiles, which spares a division.
template <TileOp op, class T, int kTiles>
__global__ void __launch_bounds__(kThreads) tile(const typename T::Bits* w, Out<op, T>* y, int64_t rows, int64_t cols) {
  using Bits = typename T::Bits;
  int64_t row, column;  // of tiles
  if constexpr (kTiles == 1) {
    row = divide(int64_t(blockIdx.x) * kThreads + threadIdx.x, cols / 4, &column);
  } else {
    row = int64_t(blockIdx.y) * (kThreads / kAcross) + threadIdx.x / kAcross;
    column = kTiles * (int64_t(blockIdx.x) * kAcross + threadIdx.x % kAcross);
  }
  if (4 * row >= rows || 4 * column >= cols) return;
  const int64_t at = 4 * (row * cols + column);
  Vector<Vector<Bits, 4>, kTiles> in[4];
  S24_UNROLL
  for (int r = 0; r < 4; ++r) in[r] = load<Vector<Bits, 4>, kTiles>(reinterpret_cast<const Vector<Bits, 4>*>(w + at + r * cols));
  if constexpr (op == TileOp::kTransposableMask) {
    Vector<uint32_t, kTiles> out[4];
    S24_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const TileRows<T> numbers = {in[0].at[t], in[1].at[t], in[2].at[t], in[3].at[t]};
      const uint32_t mask = tile_mask<T>(numbers);
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

template <TileOp op, class T>
cudaError_t launch(const TileArgs& a, cudaStream_t stream) {
  const auto* w = static_cast<const typename T::Bits*>(a.w);
  auto* y = static_cast<Out<op, T>*>(a.out);
  if constexpr (op == TileOp::kTransposableMask && sizeof(typename T::Bits) == 2) {
    const int64_t down = ceil_div(a.rows / 4, int64_t(kThreads / kAcross));
    if (a.cols % 8 == 0 && aligned(w, 16) && aligned(y, 8) && down <= 65535)
      return start(tile<op, T, 2>, dim3(blocks_for(a.cols / 8, kAcross), unsigned(down)), kThreads, 0, stream, w, y, a.rows,
                   a.cols);
  }
  const int64_t tiles = a.rows / 4 * (a.cols / 4);
  return start(tile<op, T, 1>, dim3(blocks_for(tiles, kThreads)), kThreads, 0, stream, w, y, a.rows, a.cols);
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
