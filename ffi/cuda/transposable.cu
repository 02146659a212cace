// Operations on tiles of 4x4: transposable masks, and pruning along both axes.
//
// Operands: w (rows, cols), and a mask (bytes 0 or 1) or a pruned array of its shape.
// Steps: a thread loads a tile, or two side by side of 16-bit floats whose mask is searched; searches or prunes; and stores
// four rows. The next tiles are loaded before the search of the present ones.
// Constraints: rows and cols are multiples of 4.
#include <type_traits>

#include "transposable.cuh"

namespace s24 {
namespace cuda {
namespace {

template <TileOp op, class T>
using Out = std::conditional_t<op == TileOp::kTransposableMask, uint8_t, typename T::Bits>;

// Pruning, and masks of any shape and type.
template <TileOp op, class T>
__global__ void __launch_bounds__(kThreads) tile(const typename T::Bits* w, Out<op, T>* y, int64_t tiles, int64_t cols) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= tiles) return;
  int64_t column;
  const int64_t row = divide(unit, cols / 4, &column), at = 4 * (row * cols + column);
  TileRows<T> in;
  S24_UNROLL
  for (int r = 0; r < 4; ++r) in[r] = load<Bits, 4>(w + at + r * cols);
  if constexpr (op == TileOp::kTransposableMask) {
    const uint32_t mask = tile_mask<T>(in);
    S24_UNROLL
    for (int r = 0; r < 4; ++r)
      store(reinterpret_cast<uint32_t*>(y + at + r * cols), Vector<uint32_t, 1>{{row_bytes(mask, r)}});
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

constexpr int kSearchThreads = 128, kAcross = 32, kDown = kSearchThreads / kAcross;  // of a block: all, side by side, in rows
constexpr int kTiles = 2;                                                              // of a thread, side by side

// Masks of 16-bit floats: a thread searches in up to `rounds` rows of tiles, and reads the next tiles before it searches.
template <class T>
__global__ void __launch_bounds__(kSearchThreads) search(const uint16_t* w, uint8_t* y, int64_t tile_rows, int64_t cols,
                                                        int rounds) {
  using Row = Vector<uint16_t, 4>;
  struct Tiles {
    Vector<Row, kTiles> of[4];
  };
  const int64_t column = 4 * kTiles * (int64_t(blockIdx.x) * kAcross + threadIdx.x % kAcross);
  int64_t row = int64_t(blockIdx.y) * rounds * kDown + threadIdx.x / kAcross;
  if (column >= cols || row >= tile_rows) return;
  const auto read = [&](int64_t from) {
    Tiles tiles;
    S24_UNROLL
    for (int r = 0; r < 4; ++r)
      tiles.of[r] = load<Row, kTiles>(reinterpret_cast<const Row*>(w + (4 * from + r) * cols + column));
    return tiles;
  };
  Tiles next = read(row);
#pragma unroll 1
  for (; rounds > 0 && row < tile_rows; --rounds, row += kDown) {
    const Tiles in = next;
    if (rounds > 1 && row + kDown < tile_rows) next = read(row + kDown);
    Vector<uint32_t, kTiles> out[4];
    S24_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      const TileRows<T> numbers = {in.of[0].at[t], in.of[1].at[t], in.of[2].at[t], in.of[3].at[t]};
      const uint32_t mask = tile_mask<T>(numbers);
      S24_UNROLL
      for (int r = 0; r < 4; ++r) out[r].at[t] = row_bytes(mask, r);
    }
    S24_UNROLL
    for (int r = 0; r < 4; ++r) store(reinterpret_cast<uint32_t*>(y + (4 * row + r) * cols + column), out[r]);
  }
}

template <TileOp op, class T>
cudaError_t launch(const TileArgs& a, cudaStream_t stream) {
  if constexpr (op == TileOp::kTransposableMask && sizeof(typename T::Bits) == 2) {
    const int64_t tile_rows = a.rows / 4, across = ceil_div(a.cols, int64_t(4 * kTiles * kAcross));
    const int rounds = rounds_for(ceil_div(tile_rows, int64_t(kDown)) * across, 8);
    const int64_t down = ceil_div(tile_rows, int64_t(kDown) * rounds);
    if (a.cols % (4 * kTiles) == 0 && aligned(a.w, 8 * kTiles) && aligned(a.out, 4 * kTiles) && down <= 65535)
      return start(search<T>, dim3(unsigned(across), unsigned(down)), kSearchThreads, 0, stream,
                   static_cast<const uint16_t*>(a.w), static_cast<uint8_t*>(a.out), tile_rows, a.cols, rounds);
  }
  const int64_t tiles = a.rows / 4 * (a.cols / 4);
  return start(tile<op, T>, dim3(blocks_for(tiles, kThreads)), kThreads, 0, stream, static_cast<const typename T::Bits*>(a.w),
               static_cast<Out<op, T>*>(a.out), tiles, a.cols);
}

}  // namespace

template <>
cudaError_t run(const TileArgs& a, cudaStream_t stream) {
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
