// The metadata of a packed matrix in the order of the current device's cuSPARSELt.
//
// Operands: metadata (rows, depth / 8) as packing writes them, and as many bytes in the library's order, for rows that are padded
// as the order says.
// Steps: a block takes 64 rows of 64 bytes. They pass through shared memory, so that lines are read and written whole.
// Constraints: depth is a multiple of 32 for 16-bit values and of 64 for 8-bit ones.
#include "metadata_order.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kTileWords = 16;  // of eight groups each

struct Tile {
  uint32_t words[kTileRows][kTileWords + 1];  // one more, against bank conflicts
};

template <class Order, class Share>
__global__ void __launch_bounds__(kThreads) reorder(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth,
                                                    int64_t tiles) {
  static_assert(kThreads * 16 == kTileRows * kTileWords * 4, "a thread writes 16 bytes");
  constexpr uint32_t kPaddingWord = Order::kPaddingNibble * 0x11111111u;
  __shared__ Tile tile;
  const int thread = int(threadIdx.x);
  int64_t n;
  const int64_t row0 = divide(blockIdx.x, tiles, &n) * kTileRows, words = depth / 32;
  const auto* const from = reinterpret_cast<const uint32_t*>(metadata);
  uint32_t read[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int64_t row = row0 + thread / kTileWords + i * (kThreads / kTileWords), word = n * kTileWords + thread % kTileWords;
    read[i] = row < rows && word < words ? from[row * words + word] : kPaddingWord;
  }
  S24_UNROLL
  for (int i = 0; i < 4; ++i) tile.words[thread / kTileWords + i * (kThreads / kTileWords)][thread % kTileWords] = read[i];
  __syncthreads();
  const Share own = Share::of(thread);
  const int64_t group = (n * kTileWords + own.word) * 8;
  if (group < depth / 4)
    store(reinterpret_cast<uint32_t*>(out + Share::at(row0 + own.row, group, depth) / 2),
          own.made([&](int row, int word) { return tile.words[row][word]; }));
}

template <class Order, class Share>
cudaError_t launch(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth, cudaStream_t stream) {
  static_assert(Order::kRows % kTileRows == 0, "whole tiles");
  const int64_t tiles = ceil_div(depth, kTileWords * 32);
  const int64_t blocks = ceil_div(rows, Order::kRows) * (Order::kRows / kTileRows) * tiles;
  if (blocks == 0) return cudaSuccess;
  return start(reorder<Order, Share>, dim3(unsigned(blocks)), kThreads, 0, stream, metadata, out, rows, depth, tiles);
}

}  // namespace

int64_t metadata_rows() {
  return with_order([](auto order) { return int64_t(decltype(order)::kRows); });
}

cudaError_t launch_metadata(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth, int64_t value_bytes,
                            cudaStream_t stream) {
  return with_order([&](auto order) {
    using Order = decltype(order);
    return value_bytes == 1 ? launch<Order, typename Order::Of8Bits>(metadata, out, rows, depth, stream)
                            : launch<Order, typename Order::Of16Bits>(metadata, out, rows, depth, stream);
  });
}

}  // namespace cuda
}  // namespace s24
