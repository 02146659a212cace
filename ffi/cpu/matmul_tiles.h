// What products of bfloat16 need where a processor multiplies tiles (AMX).
//
// A tile holds sixteen rows of 64 bytes, and one instruction adds the product of two tiles to a third: on an Intel Xeon
// (family 6, model 167) 3.3 TFLOP/s of a core, of which multiply-adds of float32 reach 0.2. That is so much faster that
// entries of P are put back among zeros: P becomes tiles of [16 rows][32 along K], D a panel of words of two neighbours along
// K. An instruction sums 32 of them from zero, even and odd k apart (measured), and adds both to what was there.
// Subnormal numbers count as zeros, and Inf that meets a pruned element is NaN, as in the masked dense product.
#pragma once
#include "panels.h"

#if defined(S24_TILES)
namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kTile = 16;          // rows of a tile, and the words of each
constexpr int kTileDepth = 2 * kTile;  // along K
constexpr int kTileChunk = 2 * kTile;  // rows that are multiplied together
constexpr int kTileBlock = 512;        // along K: the metadata of a row are one vector
static_assert(kTileBlock / 8 == 64 && kTileBlock / 2 <= kDepth, "scratch");
static_assert(kPanel % (2 * kTile) == 0 && kRows % kTileChunk == 0, "blocking");

// The use of whole tiles by a thread, while it lives.
class TileState {
 public:
  TileState() {
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kTile;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileState() { asm volatile("tilerelease"); }
  TileState(const TileState&) = delete;

 private:
  struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64, "as the processor reads it");
};

// Tiles of one chunk of rows of P: [along K][rows][16][32].
struct ChunkTiles {
  alignas(64) uint16_t at[kTileBlock / kTileDepth][kTileChunk / kTile][kTile][kTileDepth];
};

// sums (kTileChunk rows of a panel's columns) += tiles * panel, or =.
inline void multiply_tiles(const ChunkTiles& tiles, int64_t depth, const float* panel, float* sums, int64_t cols,
                           bool accumulate) {
  constexpr int64_t kStep = kPanel * sizeof(float), kRowStep = kTileDepth * sizeof(uint16_t);
  const int64_t steps = ceil_div(depth, kTileDepth);
  for (int64_t c = 0; c < cols; c += 2 * kTile) {
    float* const upper = sums + c;
    float* const lower = upper + kTile * kPanel;
    if (accumulate) {
      asm volatile("tileloadd (%0,%2,1), %%tmm0\n\ttileloadd 64(%0,%2,1), %%tmm1\n\t"
                   "tileloadd (%1,%2,1), %%tmm2\n\ttileloadd 64(%1,%2,1), %%tmm3" ::"r"(upper), "r"(lower), "r"(kStep)
                   : "memory");
    } else {
      asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::);
    }
    for (int64_t k = 0; k < steps; ++k) {
      asm volatile(
          "tileloadd (%2,%3,1), %%tmm6\n\ttileloadd (%0,%1,1), %%tmm4\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
          "tileloadd 64(%2,%3,1), %%tmm7\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
          "tileloadd 1024(%0,%1,1), %%tmm5\n\ttdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(
              tiles.at[k]),
          "r"(kRowStep), "r"(panel + k * kTile * kPanel + c), "r"(kStep)
          : "memory");
    }
    asm volatile("tilestored %%tmm0, (%0,%2,1)\n\ttilestored %%tmm1, 64(%0,%2,1)\n\t"
                 "tilestored %%tmm2, (%1,%2,1)\n\ttilestored %%tmm3, 64(%1,%2,1)" ::"r"(upper), "r"(lower), "r"(kStep)
                 : "memory");
  }
}

// Which of four are kept, as bits, by nibbles of metadata; one that names no pair stands for the first.
struct KeptBits {
  alignas(64) uint8_t at[64];
};

constexpr KeptBits make_kept_bits() {
  KeptBits t{};
  for (int n = 0; n < 64; ++n) {
    const int i = n & 3, j = n >> 2 & 3;
    t.at[n] = uint8_t(i < j ? 1 << i | 1 << j : 3);
  }
  return t;
}

constexpr KeptBits kKeptBits = make_kept_bits();

// A row of `depth` elements, of which half are stored -> its place in the tiles, zeros up to a whole tile.
inline void unpack_row(const uint16_t* values, const uint8_t* metadata, int64_t depth, int64_t row, ChunkTiles& tiles) {
  alignas(64) uint8_t kept[kTileBlock / 8];
  uint16_t padded[kTileBlock / 2 + kTileDepth / 2];
  __m512i bytes;
  if (depth == kTileBlock) {
    bytes = _mm512_loadu_si512(metadata);
  } else {
    const uint64_t whole = uint64_t(ceil_div(depth, 8));
    bytes = _mm512_maskz_loadu_epi8(whole == 64 ? ~uint64_t{0} : (uint64_t{1} << whole) - 1, metadata);
  }
  if (depth % kTileDepth) {  // values beyond the end may be another row's
    __builtin_memcpy(padded, values, size_t(depth));
    __builtin_memset(padded + depth / 2, 0, kTileDepth / 2 * sizeof *padded);
    values = padded;
  }
  const __m512i table = _mm512_load_si512(kKeptBits.at), nibble = _mm512_set1_epi8(15);
  const __m512i low = _mm512_shuffle_epi8(table, _mm512_and_si512(bytes, nibble));
  const __m512i high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble));
  _mm512_store_si512(kept, _mm512_or_si512(low, _mm512_slli_epi16(high, 4)));
  uint16_t* to = tiles.at[0][row / kTile][row % kTile];
  for (int64_t k = 0; k < depth; k += kTileDepth, to += sizeof tiles.at[0] / sizeof *to) {
    uint32_t bits;
    __builtin_memcpy(&bits, kept + k / 8, sizeof bits);
    __m512i four = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + k / 2)));
    asm("vpexpandw %0, %0 %{%1%}%{z%}" : "+v"(four) : "Yk"(__mmask32(bits)));
    _mm512_store_si512(to, four);
  }
}

inline void zero_row(int64_t depth, int64_t row, ChunkTiles& tiles) {
  for (int64_t k = 0; k < ceil_div(depth, kTileDepth); ++k)
    _mm512_store_si512(tiles.at[k][row / kTile][row % kTile], __m512i{});
}

// D[k0:k1, col0:col1] -> panels of words, zeros in the columns that fill up the last panel and the rows that fill up a tile.
inline void fill_words(const MatmulArgs& a, const Block& m, int64_t k0, int64_t k1, Scratch& s) {
  typedef uint32_t WordVec __attribute__((vector_size(4 * kWidth)));
  typedef uint16_t HalfVec __attribute__((vector_size(2 * kWidth)));
  const auto* dense = static_cast<const uint16_t*>(a.dense);
  const int64_t cols = m.col1 - m.col0, padded = ceil_div(cols, kPanel) * kPanel, words = (k1 - k0) / 2;
  const auto place = [&](int64_t c, int64_t w) { return &s.panels[c / kPanel * kDepth + w][c % kPanel]; };
  for (int64_t w = words; w < ceil_div(words, kTile) * kTile; ++w)
    for (int64_t c = 0; c < padded; c += kPanel) __builtin_memset(place(c, w), 0, sizeof s.panels[0]);
  if (!a.dense_k_last) {
    for (int64_t w = 0; w < words; ++w) {
      const uint16_t* rows = dense + (k0 + 2 * w) * a.cols + m.col0;
      for (int64_t c = 0; c < padded; c += kWidth) {
        HalfVec row[2] = {};
        const size_t bytes = c + kWidth <= cols ? sizeof row[0] : c < cols ? size_t(2 * (cols - c)) : 0;
        for (int i = 0; i < 2 && bytes; ++i) __builtin_memcpy(&row[i], rows + i * a.cols + c, bytes);
        const WordVec both = __builtin_convertvector(row[0], WordVec) | __builtin_convertvector(row[1], WordVec) << 16;
        __builtin_memcpy(place(c, w), &both, sizeof both);
      }
    }
    return;
  }
  for (int64_t c = 0; c < padded; c += kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      if (c + i < cols) {
        __builtin_memcpy(s.stripe[i], dense + (m.col0 + c + i) * a.depth + k0, size_t(4 * words));
      } else {
        __builtin_memset(s.stripe[i], 0, size_t(4 * words));
      }
      if (words % kTile) __builtin_memset(&s.stripe[i][words], 0, kTile * sizeof(float));
    }
    for (int64_t w = 0; w < words; w += kTile) transpose(s.stripe[0] + w, kDepth, place(c, w), kPanel);
  }
}

inline void matmul_by_tiles(const MatmulArgs& a, const Block& m, Scratch& s) {
  const TileState state;
  ChunkTiles tiles;
  const int64_t rows = m.row1 - m.row0, cols = m.col1 - m.col0, value_step = a.depth / 2, byte_step = ceil_div(a.depth, 8);
  for (int64_t k0 = 0; k0 < a.depth; k0 += kTileBlock) {
    const int64_t k1 = a.depth - k0 < kTileBlock ? a.depth : k0 + kTileBlock;
    fill_words(a, m, k0, k1, s);
    for (int64_t r0 = 0; r0 < rows; r0 += kTileChunk) {
      const int64_t now = rows - r0 < kTileChunk ? rows - r0 : kTileChunk;
      for (int64_t r = 0; r < kTileChunk; ++r) {
        const int64_t row = m.row0 + r0 + r;
        if (r < now) {
          unpack_row(static_cast<const uint16_t*>(a.values) + row * value_step + k0 / 2, a.metadata + row * byte_step + k0 / 8,
                     k1 - k0, r, tiles);
        } else {
          zero_row(k1 - k0, r, tiles);
        }
      }
      for (int64_t c = 0; c < cols; c += kPanel) {
        const int64_t n = cols - c < kPanel ? cols - c : kPanel;
        float(*sums)[kPanel] = s.sums + c / kPanel * kRows + r0;
        multiply_tiles(tiles, k1 - k0, s.panels[c / kPanel * kDepth], sums[0], n, k0 > 0);
        if (k1 == a.depth) write_any(a, sums, m.row0 + r0, now, m.col0 + c, n);
      }
    }
  }
}

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
#endif
