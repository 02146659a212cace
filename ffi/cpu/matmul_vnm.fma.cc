// The product of a V:N:M matrix and a dense one.
//
// A block of V rows meets only four of M rows of D. Those of a few groups, gathered from the panel, fit into the
// first-level cache and serve all V rows; the panel itself stays in the second-level one and serves all rows of a task.
// Values and metadata are read as they are stored: one byte names four entries, and the scalar work of finding them
// hides behind the FMAs of a whole panel.
#include "panels.h"

namespace s24 {
namespace S24_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVnmTileRows = 4;
#else
constexpr int kVnmTileRows = 2;
#endif
constexpr int kGatheredGroups = 24;
constexpr int kFills = kCols / kPanel;

struct VnmScratch {
  // Scratch of the 2:4 product, divided in another way: its kFills panels are one panel that is kFills times as deep, and its
  // sums are those of kFills times as many rows.
  Scratch parts;
  float gathered[4 * kGatheredGroups][kPanel];
};

static_assert(sizeof(VnmScratch) <= kScratch, "scratch");
static_assert(kFills * kDepth >= kVnmMatmulDepth && kFills * kRows >= kVnmMatmulRows, "scratch");
static_assert(kVnmMatmulCols % kPanel == 0 && kGatheredGroups % 2 == 0, "blocking");

// Where the four entries of a byte of metadata lie in the eight gathered rows of its two groups, in bytes.
struct EntryOffsets {
  uint16_t at[256][4];
};

constexpr EntryOffsets make_entry_offsets() {
  EntryOffsets t{};
  for (int byte = 0; byte < 256; ++byte)
    for (int j = 0; j < 4; ++j)
      t.at[byte][j] = uint16_t((j / 2 * 4 + ((byte >> (2 * j)) & 3)) * kPanel * int(sizeof(float)));
  return t;
}

constexpr EntryOffsets kEntryOffsets = make_entry_offsets();

// Rows of P, restricted to some of their groups.
template <class B>
struct PackedRows {
  const B* values;
  const uint8_t* metadata;
  int64_t value_step, byte_step;
};

// Prefetches the next rows, which hardware prefetchers do not follow: each lies several lines after the last one.
template <class B>
S24_HD void prefetch_rows(const PackedRows<B>& p, int64_t groups) {
  for (int r = kVnmTileRows; r < 2 * kVnmTileRows; ++r) {
    const char* values = reinterpret_cast<const char*>(p.values + r * p.value_step);
    for (int64_t b = 0; b < 2 * groups * int64_t(sizeof(B)); b += 64) __builtin_prefetch(values + b, 0, 3);
    __builtin_prefetch(p.metadata + r * p.byte_step, 0, 3);
  }
}

template <class T, int kVectors>
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
    const char* rows = reinterpret_cast<const char*>(gathered) + byte * 8 * kPanel * sizeof(float);
    S24_UNROLL
    for (int r = 0; r < kVnmTileRows; ++r) {
      const Offsets offsets(kEntryOffsets.at[p.metadata[r * p.byte_step + byte]]);
      const Values<T> values(p.values + r * p.value_step + 4 * byte, entries);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (j >= entries) break;
        const Vec a = values.splat(j);
        const Vec* d = reinterpret_cast<const Vec*>(rows + offsets[j]);
        S24_UNROLL
        for (int v = 0; v < kVectors; ++v) acc[r][v] += a * d[v];
      }
    }
  };
  for (int64_t byte = 0; byte < groups / 2; ++byte) add(byte, 4);
  if (groups % 2) add(groups / 2, 2);
  S24_UNROLL
  for (int r = 0; r < kVnmTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(sums + r * kPanel + v * kWidth) = acc[r][v];
  }
}

template <class T>
void multiply_gathered_any(const PackedRows<typename T::Bits>& p, int64_t groups, const float* gathered, float* sums,
                           int64_t cols, bool accumulate) {
  switch (ceil_div(cols, kWidth)) {
    case 1: return multiply_gathered<T, 1>(p, groups, gathered, sums, accumulate);
    case 2: return multiply_gathered<T, 2>(p, groups, gathered, sums, accumulate);
    case 3: return multiply_gathered<T, 3>(p, groups, gathered, sums, accumulate);
    default: return multiply_gathered<T, 4>(p, groups, gathered, sums, accumulate);
  }
}

template <class T>
void fill_deep_panel(const MatmulArgs& a, const Block& m, int64_t k0, int64_t k1, Scratch& s) {
  for (int64_t i = ceil_div(k1 - k0, kDepth) - 1; i >= 0; --i) {
    const int64_t from = k0 + i * kDepth;
    fill_panels<T>(a, m, from, k1 - from < kDepth ? k1 : from + kDepth, s);
    if (i > 0) __builtin_memcpy(s.panels[i * kDepth], s.panels[0], kDepth * sizeof s.panels[0]);
  }
}

template <class T>
void vnm_matmul_panel(const MatmulVnmArgs& a, const Block& m, VnmScratch& scratch) {
  Scratch& s = scratch.parts;
  const MatmulArgs& p = a.product;
  const int64_t groups = p.depth / a.m, deep = kFills * kDepth / a.m / 2 * 2;
  const int64_t cols = m.col1 - m.col0;
  for (int64_t g0 = 0; g0 < groups; g0 += deep) {
    const int64_t g1 = groups - g0 < deep ? groups : g0 + deep;
    fill_deep_panel<T>(p, m, g0 * a.m, g1 * a.m, s);
    for (int64_t row = m.row0; row < m.row1; row += a.v) {
      float(*sums)[kPanel] = s.sums + (groups > deep ? row - m.row0 : 0);
      for (int64_t g = g0; g < g1; g += kGatheredGroups) {
        const int64_t end = g1 - g < kGatheredGroups ? g1 : g + kGatheredGroups;
        const uint8_t* columns = a.columns + (row / a.v * groups + g) * 4;
        for (int64_t i = 0; i < 4 * (end - g); ++i) {
          const int64_t column = columns[i] < a.m ? columns[i] : a.m - 1;
          __builtin_memcpy(scratch.gathered[i], s.panels[(g - g0 + i / 4) * a.m + column], sizeof scratch.gathered[i]);
        }
        for (int64_t r = row; r < row + a.v; r += kVnmTileRows) {
          const PackedRows<typename T::Bits> rows = {
              static_cast<const typename T::Bits*>(p.values) + 2 * (r * groups + g),
              p.metadata + r * ceil_div(groups, 2) + g / 2, 2 * groups, ceil_div(groups, 2)};
          if (r + kVnmTileRows < row + a.v) prefetch_rows(rows, end - g);
          multiply_gathered_any<T>(rows, end - g, scratch.gathered[0], sums[r - row], cols, g > 0);
        }
      }
      for (int64_t r = 0; r < a.v && g1 == groups; r += kChunk)
        write_any(p, sums + r, row + r, a.v - r < kChunk ? a.v - r : kChunk, m.col0, cols);
    }
  }
}

template <class T>
void vnm_matmul_typed(const MatmulVnmArgs& a, const Block& m, VnmScratch& scratch) {
  for (int64_t c = m.col0; c < m.col1; c += kPanel)
    vnm_matmul_panel<T>(a, {m.row0, m.row1, c, m.col1 - c < kPanel ? m.col1 : c + kPanel}, scratch);
}

}  // namespace

template <>
void run(const MatmulVnmArgs& a, const Block& m, void* scratch) {
  VnmScratch& s = *static_cast<VnmScratch*>(scratch);
  switch (a.product.in) {
    case Dtype::kF32: return vnm_matmul_typed<F32>(a, m, s);
    case Dtype::kBF16: return vnm_matmul_typed<BF16>(a, m, s);
    case Dtype::kF16: return vnm_matmul_typed<F16>(a, m, s);
  }
}

}  // namespace S24_ISA
}  // namespace s24
