// The product of a V:N:M matrix and a dense one.
//
// A block of V rows meets only four of M rows of D. Those of a few groups, gathered from the panel, fit into the
// first-level cache and serve all V rows; the panel itself stays in the second-level one and serves all rows of a task.
// Values and metadata are read as they are stored: one byte names four entries, and the scalar work of finding them
// hides behind the FMAs of a whole panel.
#include "matmul_pairs.h"
#include "matmul_tiles.h"
#include "panels.h"

namespace s24 {
namespace S24_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVnmTileRows = 4;
#else
constexpr int kVnmTileRows = 2;
#endif
constexpr int kGatheredRows = 96;  // of an entry each, so that they fit into a first-level cache
constexpr int kGatheredWords = 256;  // of tiles: as many as a row's metadata in a vector name
constexpr int kFills = kCols / kPanel;

struct VnmScratch {
  // Scratch of the 2:4 product, divided in another way: its kFills panels are one panel that is kFills times as deep, and its
  // sums are those of kFills times as many rows.
  Scratch parts;
  float gathered[kGatheredWords][kPanel];
};

static_assert(sizeof(VnmScratch) <= kScratch, "scratch");
static_assert(kFills * kDepth >= kVnmMatmulDepth && kFills * kRows >= kVnmMatmulRows, "scratch");
static_assert(kVnmMatmulCols % kPanel == 0, "blocking");

// Rows of P, restricted to some of their groups.
template <class B>
struct PackedRows {
  const B* values;
  const uint8_t* metadata;
  int64_t value_step, byte_step;
};

// The rows of the next tile.
template <class B>
S24_HD void prefetch_rows(const PackedRows<B>& p, int64_t groups) {
  for (int r = kVnmTileRows; r < 2 * kVnmTileRows; ++r) {
    prefetch(p.values + r * p.value_step, 2 * groups * int64_t(sizeof(B)));
    prefetch(p.metadata + r * p.byte_step, 1);
  }
}

// Where the entries of a byte of metadata, of two groups, lie in the gathered rows of these, in bytes.
template <int kEntries>
struct Places {
  uint16_t at[256][kEntries];
};

constexpr Places<4> make_element_places() {
  Places<4> t{};
  for (int byte = 0; byte < 256; ++byte)
    for (int j = 0; j < 4; ++j)
      t.at[byte][j] = uint16_t((j / 2 * 4 + ((byte >> (2 * j)) & 3)) * kPanel * int(sizeof(float)));
  return t;
}

constexpr Places<4> kElementPlaces = make_element_places();

// An entry is a kept element.
template <class T>
struct GatheredElements {
  // Gathered rows of a group, and how many there are at most; bytes of metadata of a step of four entries.
  static constexpr int kRows = 4, kGathered = kGatheredRows, kBytes = 1;

  S24_HD static Offsets offsets(const uint8_t* metadata, int) { return Offsets(kElementPlaces.at[*metadata]); }
  S24_HD static Values<T> values(const typename T::Bits* from, int entries) { return {from, entries}; }
  S24_HD static void add(Vec& sum, Vec a, const Vec& d) { sum += a * d; }
  S24_HD static void gather(const float* const row[4], float (*to)[kPanel]) {
    for (int i = 0; i < 4; ++i) __builtin_memcpy(to[i], row[i], sizeof to[i]);
  }
};

template <class T, class Entry, int kVectors>
void multiply_gathered(const PackedRows<typename T::Bits>& p, int64_t groups, const float* __restrict__ gathered,
                       float* __restrict__ sums, bool accumulate) {
  Vec acc[kVnmTileRows][kVectors];
  S24_UNROLL
  for (int r = 0; r < kVnmTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = accumulate ? *reinterpret_cast<const Vec*>(sums + r * kPanel + v * kWidth) : Vec{};
  }
  const auto add = [&](int64_t byte, int entries) __attribute__((always_inline)) {
    const char* rows = reinterpret_cast<const char*>(gathered) + byte * 2 * Entry::kRows * kPanel * sizeof(float);
    S24_UNROLL
    for (int r = 0; r < kVnmTileRows; ++r) {
      const Offsets offsets = Entry::offsets(p.metadata + r * p.byte_step + byte, entries);
      const auto values = Entry::values(p.values + r * p.value_step + 4 * byte, entries);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (j >= entries) break;
        const Vec a = values.splat(j);
        const Vec* d = reinterpret_cast<const Vec*>(rows + offsets[j]);
        S24_UNROLL
        for (int v = 0; v < kVectors; ++v) Entry::add(acc[r][v], a, d[v]);
      }
    }
  };
  constexpr int kEntries = 2 / Entry::kBytes;  // of a group
  int64_t g = 0;
  for (; g + 2 * Entry::kBytes <= groups; g += 2 * Entry::kBytes) add(g / 2, 4);
  if (kEntries == 1 && groups - g >= 2) add(g / 2, 2), g += 2;
  if (groups > g) add(g / 2, kEntries);
  S24_UNROLL
  for (int r = 0; r < kVnmTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(sums + r * kPanel + v * kWidth) = acc[r][v];
  }
}

template <class T, class Entry>
void multiply_gathered_any(const PackedRows<typename T::Bits>& p, int64_t groups, const float* gathered, float* sums,
                           int64_t cols, bool accumulate) {
  switch (ceil_div(cols, kWidth)) {
    case 1: return multiply_gathered<T, Entry, 1>(p, groups, gathered, sums, accumulate);
    case 2: return multiply_gathered<T, Entry, 2>(p, groups, gathered, sums, accumulate);
    case 3: return multiply_gathered<T, Entry, 3>(p, groups, gathered, sums, accumulate);
    default: return multiply_gathered<T, Entry, 4>(p, groups, gathered, sums, accumulate);
  }
}

#if defined(__AVX512F__)
constexpr Places<2> make_pair_places() {
  Places<2> t{};
  for (int byte = 0; byte < 256; ++byte)
    for (int j = 0; j < 2; ++j)
      t.at[byte][j] = uint16_t((j * kPairs + kPairNumbers.at[byte >> (4 * j) & 15]) * kPanel * int(sizeof(float)));
  return t;
}

constexpr Places<2> kPairPlaces = make_pair_places();

// An entry is a pair of kept elements, a word as it is stored: a group has one.
struct GatheredPairs {
  static constexpr int kRows = kPairs, kGathered = kGatheredRows, kBytes = 2;

  S24_HD static Offsets offsets(const uint8_t* metadata, int entries) {
    constexpr uint32_t kNext = 2 * kRows * kPanel * sizeof(float);
    uint32_t low, high = 0;
    __builtin_memcpy(&low, kPairPlaces.at[metadata[0]], sizeof low);
    if (entries == 4) __builtin_memcpy(&high, kPairPlaces.at[metadata[1]], sizeof high);
    return Offsets(low | uint64_t(high + (kNext << 16 | kNext)) << 32);
  }
  S24_HD static Four values(const uint16_t* from, int entries) {
    float words[4] = {};
    __builtin_memcpy(words, from, size_t(4 * entries));
    return Four(words);
  }
  S24_HD static void add(Vec& sum, Vec a, const Vec& d) { Pairs::add(sum, a, d); }
  // Of rows of float32, whose low halves are zeros.
  S24_HD static void gather(const float* const row[4], float (*to)[kPanel]) {
    for (int c = 0; c < kPanel; c += kWidth) {
      WordVec high[4];
      for (int i = 0; i < 4; ++i) __builtin_memcpy(&high[i], row[i] + c, sizeof high[i]);
      store_pairs(high[0] >> 16 | high[1], high[2] >> 16 | high[3], to[0] + c);
    }
  }
};
#endif

// The sums of the rows of one block of V over groups [g, end), whose rows of D are gathered.
template <class T, class Entry>
void multiply_block(const MatmulVnmArgs& a, int64_t row, int64_t g, int64_t end, VnmScratch& scratch, float (*sums)[kPanel],
                    int64_t cols) {
  const MatmulArgs& p = a.product;
  const int64_t groups = p.depth / a.grouping.m;
  for (int64_t r = row; r < row + a.v; r += kVnmTileRows) {
    const PackedRows<typename T::Bits> rows = {static_cast<const typename T::Bits*>(p.values) + 2 * (r * groups + g),
                                               p.metadata + r * ceil_div(groups, 2) + g / 2, 2 * groups, ceil_div(groups, 2)};
    if (r + kVnmTileRows < row + a.v) prefetch_rows(rows, end - g);
    multiply_gathered_any<T, Entry>(rows, end - g, scratch.gathered[0], sums[r - row], cols, g > 0);
  }
}

#if defined(S24_TILES)
// The four gathered rows of a group are a part of a dense product, of which P keeps two of four.
struct GatheredTiles {
  static constexpr int kRows = 2, kGathered = kGatheredWords;

  static bool fit(const MatmulVnmArgs& a) { return a.v % kTileChunk == 0; }
  // Of rows of float32, whose low halves are zeros.
  S24_HD static void gather(const float* const row[4], float (*to)[kPanel]) {
    for (int c = 0; c < kPanel; c += kWidth) {
      WordVec high[4];
      for (int i = 0; i < 4; ++i) __builtin_memcpy(&high[i], row[i] + c, sizeof high[i]);
      const WordVec first = high[0] >> 16 | high[1], last = high[2] >> 16 | high[3];
      __builtin_memcpy(to[0] + c, &first, sizeof first);
      __builtin_memcpy(to[1] + c, &last, sizeof last);
    }
  }
};

template <>
void multiply_block<BF16, GatheredTiles>(const MatmulVnmArgs& a, int64_t row, int64_t g, int64_t end, VnmScratch& scratch,
                                         float (*sums)[kPanel], int64_t cols) {
  const MatmulArgs& p = a.product;
  const int64_t groups = p.depth / a.grouping.m, words = GatheredTiles::kRows * (end - g), depth = 2 * words;
  for (int64_t w = words; w < ceil_div(words, kTile) * kTile; ++w)
    __builtin_memset(scratch.gathered[w], 0, sizeof scratch.gathered[w]);
  const TileState state;
  ChunkTiles tiles;
  for (int64_t r = row; r < row + a.v; r += kTileChunk) {
    for (int64_t i = 0; i < kTileChunk; ++i)
      unpack_row(static_cast<const uint16_t*>(p.values) + 2 * ((r + i) * groups + g),
                 p.metadata + (r + i) * ceil_div(groups, 2) + g / 2, depth, i, tiles);
    multiply_tiles(tiles, depth, scratch.gathered[0], sums[r - row], cols, g > 0);
  }
}
#endif

// The rows of D of groups [g0, g1) -> the panel, where they are grouped as in D: neighbours are one run, or of strided groups a
// run for each of M columns. Runs begin at multiples of kWidth: to fill the first rows, by way of which all go, may write more.
template <class T>
Grouping fill_deep_panel(const MatmulVnmArgs& a, const Block& m, int64_t g0, int64_t g1, Scratch& s) {
  const bool strided = a.grouping.strided();
  const Grouping panel = Grouping::of(a.grouping.m, ceil_div(g1 - g0, kWidth) * kWidth, strided);
  const int64_t length = (g1 - g0) * (strided ? 1 : panel.m);
  for (int64_t run = strided ? panel.m - 1 : 0; run >= 0; --run) {
    for (int64_t i = ceil_div(length, kDepth) - 1; i >= 0; --i) {
      const int64_t rows = length - i * kDepth < kDepth ? length - i * kDepth : kDepth;
      const int64_t from = a.grouping.column(g0, uint32_t(run)) + i * kDepth;
      const int64_t to = panel.column(int64_t(0), uint32_t(run)) + i * kDepth;
      fill_panels<T>(a.product, m, from, from + rows, s);
      if (to > 0) __builtin_memcpy(s.panels[to], s.panels[0], size_t(rows) * sizeof s.panels[0]);
    }
  }
  return panel;
}

template <class T, class Entry>
void vnm_matmul_panel(const MatmulVnmArgs& a, const Block& m, VnmScratch& scratch) {
  Scratch& s = scratch.parts;
  const MatmulArgs& p = a.product;
  constexpr int64_t kStep = Entry::kGathered / Entry::kRows / 4 * 4;  // of groups
  const int64_t groups = p.depth / a.grouping.m, deep = kFills * kDepth / a.grouping.m / kWidth * kWidth;
  const int64_t cols = m.col1 - m.col0;
  for (int64_t g0 = 0; g0 < groups; g0 += deep) {
    const int64_t g1 = groups - g0 < deep ? groups : g0 + deep;
    const Grouping panel = fill_deep_panel<T>(a, m, g0, g1, s);
    for (int64_t row = m.row0; row < m.row1; row += a.v) {
      float(*sums)[kPanel] = s.sums + (groups > deep ? row - m.row0 : 0);
      for (int64_t g = g0; g < g1; g += kStep) {
        const int64_t end = g1 - g < kStep ? g1 : g + kStep;
        const uint8_t* columns = a.columns + (row / a.v * groups + g) * 4;
        for (int64_t i = 0; i < end - g; ++i) {
          const float* rows[4];
          for (int j = 0; j < 4; ++j) rows[j] = s.panels[panel.column(g - g0 + i, columns[4 * i + j])];
          Entry::gather(rows, scratch.gathered + i * Entry::kRows);
        }
        multiply_block<T, Entry>(a, row, g, end, scratch, sums, cols);
      }
      for (int64_t r = 0; r < a.v && g1 == groups; r += kChunk)
        write_any(p, sums + r, row + r, a.v - r < kChunk ? a.v - r : kChunk, m.col0, cols, a.collected);
    }
  }
}

template <class T, class Entry = GatheredElements<T>>
void vnm_matmul_by(const MatmulVnmArgs& a, const Block& m, VnmScratch& scratch) {
  for (int64_t c = m.col0; c < m.col1; c += kPanel)
    vnm_matmul_panel<T, Entry>(a, {m.row0, m.row1, c, m.col1 - c < kPanel ? m.col1 : c + kPanel}, scratch);
}

}  // namespace

template <>
void run(const MatmulVnmArgs& a, const Block& m, void* scratch) {
  VnmScratch& s = *static_cast<VnmScratch*>(scratch);
  switch (a.product.in) {
    case Dtype::kF32: return vnm_matmul_by<F32>(a, m, s);
    case Dtype::kBF16:
#if defined(S24_TILES)
      if (GatheredTiles::fit(a)) return vnm_matmul_by<BF16, GatheredTiles>(a, m, s);
#endif
#if defined(__AVX512F__)
      if (Pairs::here()) return vnm_matmul_by<BF16, GatheredPairs>(a, m, s);
#endif
      return vnm_matmul_by<BF16>(a, m, s);
    case Dtype::kF16: return vnm_matmul_by<F16>(a, m, s);
  }
}

}  // namespace S24_ISA
}  // namespace s24
