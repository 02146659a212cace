// The product of two dense matrices at the entries of a V:N:M matrix.
//
// A block of V rows needs four of every M columns: the dot products of its rows with four rows of B each, of which a row
// of the block keeps two. Rows of A stand in a panel as [k][row], so that vectors run along them: a row of B is read as
// scalars, each in one FMA per vector. That is 4 / M of the dense FMAs.
#include "panels.h"

namespace s24 {
namespace S24_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kSampledVectors = 24;  // of sums in registers
#else
constexpr int kSampledVectors = 8;
#endif

struct SampledScratch {
  Scratch parts;  // its panels hold A, its sums those of all columns
  float wide[kSampledVectors][kBlock];
  float* sums(int64_t column) { return parts.sums[column]; }
};

static_assert(sizeof(SampledScratch) <= kScratch, "scratch");
static_assert(4 * kSampledGroups + kSampledVectors <= kCols / kPanel * kRows, "scratch");

// sums[c][row] of kVectors * kWidth rows and several columns, over `depth` terms.
template <int kVectors>
void sample(const float* __restrict__ panel, int64_t depth, const float* const* b, float* __restrict__ sums, bool accumulate) {
  constexpr int kColumns = kSampledVectors / kVectors;
  Vec acc[kColumns][kVectors];
  S24_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v)
      acc[c][v] = accumulate ? *reinterpret_cast<const Vec*>(sums + c * kPanel + v * kWidth) : Vec{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    const Vec* a = reinterpret_cast<const Vec*>(panel + k * kPanel);
    S24_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const Vec w = b[c][k] - Vec{};
      S24_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[c][v] += a[v] * w;
    }
  }
  S24_UNROLL
  for (int c = 0; c < kColumns; ++c) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(sums + c * kPanel + v * kWidth) = acc[c][v];
  }
}

// The sums of all columns of groups [group0, group1) over k0..k1.
template <class T, int kVectors>
void sample_groups(const SampledArgs& a, const uint8_t* columns, int64_t groups, int64_t k0, int64_t k1, SampledScratch& s) {
  using Bits = typename T::Bits;
  constexpr int kColumns = kSampledVectors / kVectors;
  const Bits* const b = static_cast<const Bits*>(a.b) + k0;
  const int64_t depth = k1 - k0, all = 4 * groups;
  const auto row_of = [&](int64_t i) {
    const int64_t column = columns[i] < a.m ? columns[i] : a.m - 1;
    return b + (i / 4 * a.m + column) * a.depth;
  };
  for (int64_t i = 0; i < all; i += kColumns) {
    const float* rows[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      const Bits* const row = row_of(i + c < all ? i + c : i);  // where fewer are left, sums that nobody reads
      if constexpr (sizeof(Bits) == 4) {
        rows[c] = reinterpret_cast<const float*>(row);
      } else {
        widen<T>(row, depth, s.wide[c]);
        rows[c] = s.wide[c];
      }
      prefetch(row_of(i + kColumns + c < all ? i + kColumns + c : i), depth * int64_t(sizeof(Bits)));
    }
    sample<kVectors>(s.parts.panels[0], depth, rows, s.sums(i), k0 > 0);
  }
}

template <class T>
void sample_any(const SampledArgs& a, int64_t rows, const uint8_t* columns, int64_t groups, int64_t k0, int64_t k1,
                SampledScratch& s) {
  switch (ceil_div(rows, kWidth)) {
    case 1: return sample_groups<T, 1>(a, columns, groups, k0, k1, s);
    case 2: return sample_groups<T, 2>(a, columns, groups, k0, k1, s);
    case 3: return sample_groups<T, 3>(a, columns, groups, k0, k1, s);
    default: return sample_groups<T, 4>(a, columns, groups, k0, k1, s);
  }
}

// Rows [row0, row1) of one block of V, at most kPanel, and groups of its columns.
template <class T>
void sampled_typed(const SampledArgs& a, int64_t row0, int64_t row1, int64_t group0, int64_t group1, SampledScratch& s) {
  const int64_t groups = a.cols / a.m;
  const uint8_t* const columns = a.columns + (row0 / a.v * groups + group0) * 4;
  SampledArgs own = a;
  own.b = static_cast<const typename T::Bits*>(a.b) + group0 * a.m * a.depth;
  MatmulArgs panel{};
  panel.dense = a.a, panel.depth = a.depth, panel.dense_k_last = true;
  for (int64_t k0 = 0; k0 < a.depth; k0 += kBlock) {
    const int64_t k1 = a.depth - k0 < kBlock ? a.depth : k0 + kBlock;
    fill_panels<T>(panel, {0, 0, row0, row1}, k0, k1, s.parts);
    sample_any<T>(own, row1 - row0, columns, group1 - group0, k0, k1, s);
  }
  auto* values = static_cast<typename T::Bits*>(a.values) + 2 * (row0 * groups + group0);
  const uint8_t* metadata = a.metadata + row0 * ceil_div(groups, 2);
  for (int64_t r = 0; r < row1 - row0; ++r, values += 2 * groups, metadata += ceil_div(groups, 2)) {
    for (int64_t g = 0; g < group1 - group0; ++g) {
      const int nibble = metadata[(group0 + g) / 2] >> ((group0 + g) % 2 * 4);
      const auto at = [&](int column) { return a.depth == 0 ? 0.0f : s.sums(4 * g + column)[r]; };
      values[2 * g] = T::from_f32(bits_of(at(nibble & 3)));
      values[2 * g + 1] = T::from_f32(bits_of(at(nibble >> 2 & 3)));
    }
  }
}

}  // namespace

template <>
void run(const SampledArgs& a, const Block& m, void* scratch) {
  SampledScratch& s = *static_cast<SampledScratch*>(scratch);
  for (int64_t r = m.row0; r < m.row1; r += kPanel) {
    const int64_t end = m.row1 - r < kPanel ? m.row1 : r + kPanel;
    switch (a.dtype) {
      case Dtype::kF32: sampled_typed<F32>(a, r, end, m.col0, m.col1, s); break;
      case Dtype::kBF16: sampled_typed<BF16>(a, r, end, m.col0, m.col1, s); break;
      case Dtype::kF16: sampled_typed<F16>(a, r, end, m.col0, m.col1, s); break;
    }
  }
}

}  // namespace S24_ISA
}  // namespace s24
