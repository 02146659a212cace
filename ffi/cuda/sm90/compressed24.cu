// The metadata of a packed matrix in cuSPARSELt's order for sm_90.
//
// Operands: metadata (rows, depth / 8) as packing writes them, and as many bytes in the library's order, for rows padded to a
// multiple of 64.
// Steps: a block takes 64 rows of 64 bytes, which are as many bytes together in cuSPARSELt's order. They pass through shared
// memory, so that lines are read and written whole.
// Constraints: depth is a multiple of 32 for 16-bit values and of 64 for 8-bit ones.
#include "metadata_words.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kTileRows = 64, kTileWords = 16;  // of eight groups each
constexpr uint32_t kPaddingWord = kPaddingNibble * 0x11111111u;

struct Tile {
  uint32_t words[kTileRows][kTileWords + 1];  // one more, against bank conflicts
};

// Which 16 bytes of its tile's result a thread writes, by their first row and group.
struct Place {
  int row, group;
};

struct Width16 {
  static __device__ __forceinline__ int64_t at(int64_t m, int64_t q, int64_t depth) { return cusparselt_sm90_16bit(m, q, depth); }

  static __device__ __forceinline__ Place place(int thread) {
    const SixteenBytes own = SixteenBytes::of(thread);
    return {own.row, own.word * 8};
  }

  // The 16 bytes, which hold metadata of the row and of the next one, each with the eighth row after it.
  static __device__ __forceinline__ Vector<uint32_t, 4> made(const Tile& tile, Place p) {
    return SixteenBytes{p.row, p.group / 8}.made([&](int row) { return tile.words[row][p.group / 8]; });
  }
};

struct Width8 {
  static __device__ __forceinline__ int64_t at(int64_t m, int64_t q, int64_t depth) { return cusparselt_sm90_8bit(m, q, depth); }

  static __device__ __forceinline__ Place place(int thread) { return {thread % 32 / 8 * 16 + thread % 8, thread / 32 * 16}; }

  // The 16 bytes, which hold metadata of the row and of the eighth row after it.
  static __device__ __forceinline__ Vector<uint32_t, 4> made(const Tile& tile, Place p) {
    Vector<uint32_t, 4> out;
    S24_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t halves[2];
      S24_UNROLL
      for (int j = 0; j < 2; ++j)
        halves[j] = select_bytes(tile.words[p.row][p.group / 8 + j], tile.words[p.row + 8][p.group / 8 + j], 0x0040u + 0x11u * i);
      out.at[i] = select_bytes(halves[0], halves[1], 0x5410u);
    }
    return out;
  }
};

template <class Width>
__global__ void __launch_bounds__(kThreads) metadata_sm90(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth,
                                                          int64_t tiles) {
  static_assert(kThreads * 16 == kTileRows * kTileWords * 4, "a thread writes 16 bytes");
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
  const Place p = Width::place(thread);
  const int64_t group = n * kTileWords * 8 + p.group;
  if (group < depth / 4)
    store(reinterpret_cast<uint32_t*>(out + Width::at(row0 + p.row, group, depth) / 2), Width::made(tile, p));
}

template <class Width>
cudaError_t launch(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth, cudaStream_t stream) {
  const int64_t tiles = ceil_div(depth, kTileWords * 32), blocks = ceil_div(rows, kTileRows) * tiles;
  if (blocks == 0) return cudaSuccess;
  return start(metadata_sm90<Width>, dim3(unsigned(blocks)), kThreads, 0, stream, metadata, out, rows, depth, tiles);
}

}  // namespace

cudaError_t launch_metadata(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth, int64_t value_bytes,
                            cudaStream_t stream) {
  return value_bytes == 1 ? launch<Width8>(metadata, out, rows, depth, stream)
                          : launch<Width16>(metadata, out, rows, depth, stream);
}

}  // namespace cuda
}  // namespace s24
