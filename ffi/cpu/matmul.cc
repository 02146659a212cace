// out = P D with P packed along the contraction axis; float32 accumulation. Compiled once per instruction set, with
// contraction allowed (FMA).
//
// The position of a kept element is one scalar per (row, kept k), so vectors of D need no permutation: a panel of D lies
// in cache as float32 [k][kPanel], P is decoded into (value, offset into the panel), and each kept element costs one
// broadcast and one FMA with a memory operand per vector of columns. That is half of the dense FMAs.
//
// Blocking: a task owns rows x cols of the output. For each block of kBlock along K it fills the panels, then for each
// chunk of kChunk rows decodes P once and goes over the panels, one of which fits into a first-level cache, over tiles of
// kTileRows rows (registers). Every output element sums in order of k with fixed block borders, whatever the tasks are.
#include "../core/floats.h"
#include "variant.h"
#include "vectors.h"

namespace s24 {
namespace S24_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 3, kTileVectors = 4;
#endif
constexpr int kPanel = kWidth * kTileVectors;
constexpr int kBlock = 128;
constexpr int kDepth = 256;  // of the scratch, which V:N:M panels fill
constexpr int kChunk = 48;
constexpr int kRows = kMatmulRows, kCols = kMatmulCols;
static_assert(kBlock % 16 == 0 && kDepth % kBlock == 0, "blocking");
static_assert(kChunk % kTileRows == 0 && kChunk % 16 == 0 && kRows % kChunk == 0, "blocking");
static_assert(kCols % kPanel == 0, "blocking");

struct Entry {
  float value;
  int32_t offset;  // bytes into the panel
};

struct Scratch {
  float sums[kCols / kPanel][kRows][kPanel];
  float panels[kCols / kPanel][kDepth][kPanel];
  float stripe[kWidth][kDepth];
  Entry entries[kChunk][kDepth / 2];
};

static_assert(sizeof(Scratch) <= kMatmulScratch, "scratch");

// ---- registers ----------------------------------------------------------------------------------------------------

S24_HD Vec splat(float f) {
#if defined(__AVX512F__)
  // Through a general register: the FMAs keep the vector load ports busy, and a broadcast from memory would use them.
  int32_t bits = int32_t(bits_of(f));
  asm("" : "+r"(bits));
  const IntVec v = IntVec{} + bits;
  return (Vec)v;
#else
  return f - Vec{};
#endif
}

// The value in all lanes, and the offset.
S24_HD Vec read(const Entry& e, int64_t& offset) {
#if defined(__AVX512F__)
  // Both by one load.
  uint64_t bits;
  __builtin_memcpy(&bits, &e, sizeof bits);
  asm("" : "+r"(bits));
  offset = int64_t(bits >> 32);
  const IntVec v = IntVec{} + int32_t(bits);
  return (Vec)v;
#else
  offset = e.offset;
  return e.value - Vec{};
#endif
}

// kTileRows x (kVectors * kWidth) sums over `kept` entries per row.
template <int kVectors>
void multiply(const Entry (*__restrict__ e)[kDepth / 2], int64_t kept, const float* __restrict__ panel, float* __restrict__ sums,
              bool accumulate) {
  Vec acc[kTileRows][kVectors];
  S24_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = accumulate ? *reinterpret_cast<const Vec*>(sums + r * kPanel + v * kWidth) : Vec{};
  }
  for (int64_t j = 0; j < kept; ++j) {
    S24_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      int64_t offset;
      const Vec a = read(e[r][j], offset);
      const Vec* d = reinterpret_cast<const Vec*>(reinterpret_cast<const char*>(panel) + offset);
      S24_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[r][v] += a * d[v];
    }
  }
  S24_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(sums + r * kPanel + v * kWidth) = acc[r][v];
  }
}

// ---- packing of operands ------------------------------------------------------------------------------------------

template <class T>
S24_HD void widen(const typename T::Bits* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_of(T::to_f32(from[i]));
}

// D[k0:k1, col0:col1] -> panels, zeros in the columns that fill up the last vector.
template <class T>
void fill_panels(const MatmulArgs& a, const MatmulBlock& m, int64_t k0, int64_t k1, Scratch& s) {
  const auto* dense = static_cast<const typename T::Bits*>(a.dense);
  const int64_t cols = m.col1 - m.col0, depth = k1 - k0;
  if (!a.dense_k_last) {
    for (int64_t k = 0; k < depth; ++k) {
      const auto* row = dense + (k0 + k) * a.cols + m.col0;
      for (int64_t c = 0; c < cols; c += kPanel) {
        const int64_t n = cols - c < kPanel ? cols - c : kPanel;
        float* to = s.panels[c / kPanel][k];
        const auto* from = row + c;
        if (n == kPanel) {
          widen<T>(from, kPanel, to);
        } else {
          for (int i = 0; i < kPanel; ++i) to[i] = 0.0f;
          widen<T>(from, n, to);
        }
      }
    }
    return;
  }
  for (int64_t c = 0; c < cols; c += kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      if (c + i < cols) {
        widen<T>(dense + (m.col0 + c + i) * a.depth + k0, depth, s.stripe[i]);
      } else {
        for (int64_t k = 0; k < depth; ++k) s.stripe[i][k] = 0.0f;
      }
    }
    float* to = &s.panels[c / kPanel][0][c % kPanel];
    for (int64_t k = 0; k < depth; k += kWidth) transpose(s.stripe[0] + k, kDepth, to + k * kPanel, kPanel);
  }
}

// Rows [row0, row1) of P at k0..k1 -> entries; rows that fill up the last tile get zeros.
template <class T>
void decode(const MatmulArgs& a, int64_t row0, int64_t row1, int64_t k0, int64_t k1, Scratch& s) {
  const int64_t kept = (k1 - k0) / 2, value_step = a.depth / 2, byte_step = ceil_div(a.depth, 8);
  constexpr int32_t kStep = kPanel * sizeof(float);
  IntVec shift, base;
  for (int j = 0; j < kWidth; ++j) {
    shift[j] = 2 * j;
    base[j] = j / 2 * 4 * kStep;
  }
  for (int64_t i = 0; i < ceil_div(row1 - row0, kTileRows) * kTileRows; ++i) {
    Entry* e = s.entries[i];
    if (row0 + i >= row1) {
      for (int64_t j = 0; j < kept; ++j) e[j] = Entry{0.0f, 0};
      continue;
    }
    const auto* v = static_cast<const typename T::Bits*>(a.values) + (row0 + i) * value_step + k0 / 2;
    const uint8_t* m = a.metadata + (row0 + i) * byte_step + k0 / 8;
    int64_t j = 0;
    // The positions of consecutive kept elements are consecutive fields of two bits.
    for (; j + kWidth <= kept; j += kWidth) {
      uint32_t fields = 0;
      __builtin_memcpy(&fields, m + j / 4, kWidth / 4);
      const IntVec index = ((IntVec{} + int32_t(fields)) >> shift) & 3;
      const IntVec offset = index * kStep + base + int32_t(j * 2 * kStep);
      float wide[kWidth];
      widen<T>(v + j, kWidth, wide);
      Vec value;
      __builtin_memcpy(&value, wide, sizeof value);
      const Vec offset_bits = (Vec)offset;
      const Vec low = interleave_low(value, offset_bits);
      const Vec high = interleave_high(value, offset_bits);
      __builtin_memcpy(e + j, &low, sizeof low);
      __builtin_memcpy(e + j + kWidth / 2, &high, sizeof high);
    }
    for (; j < kept; ++j) {
      const int32_t k = int32_t(j / 2 * 4 + ((m[j / 4] >> (2 * (j % 4))) & 3));
      e[j] = Entry{float_of(T::to_f32(v[j])), k * kStep};
    }
  }
}

// ---- results ------------------------------------------------------------------------------------------------------

template <class T>
S24_HD void narrow(const float* from, int64_t n, typename T::Bits* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = T::from_f32(bits_of(from[i]));
}

// Sums of one panel and one chunk of rows -> out[row.., col..], or its transpose.
template <class T>
void write(const MatmulArgs& a, const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t col, int64_t cols) {
  auto* out = static_cast<typename T::Bits*>(a.out);
  if (!a.out_packed_last) {
    for (int64_t r = 0; r < rows; ++r) narrow<T>(sums[r], cols, out + (row + r) * a.cols + col);
    return;
  }
  float turned[kPanel][kChunk];
  for (int64_t r = 0; r < rows; r += kWidth)
    for (int64_t c = 0; c < cols; c += kWidth) transpose(sums[r] + c, kPanel, turned[c] + r, kChunk);
  for (int64_t c = 0; c < cols; ++c) narrow<T>(turned[c], rows, out + (col + c) * a.rows + row);
}

void write_any(const MatmulArgs& a, const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t col, int64_t cols) {
  switch (a.out_dtype) {
    case Dtype::kF32: return write<F32>(a, sums, row, rows, col, cols);
    case Dtype::kBF16: return write<BF16>(a, sums, row, rows, col, cols);
    case Dtype::kF16: return write<F16>(a, sums, row, rows, col, cols);
  }
}

// ---- a task -------------------------------------------------------------------------------------------------------

void multiply_tile(const Entry (*e)[kDepth / 2], int64_t kept, const float* panel, float* sums, int64_t cols, bool accumulate) {
  switch (ceil_div(cols < kPanel ? cols : kPanel, kWidth)) {
    case 1: return multiply<1>(e, kept, panel, sums, accumulate);
    case 2: return multiply<2>(e, kept, panel, sums, accumulate);
    case 3: return multiply<3>(e, kept, panel, sums, accumulate);
    default: return multiply<4>(e, kept, panel, sums, accumulate);
  }
}

template <class T>
void matmul_typed(const MatmulArgs& a, const MatmulBlock& m, Scratch& s) {
  const int64_t rows = m.row1 - m.row0, cols = m.col1 - m.col0;
  for (int64_t k0 = 0; k0 < a.depth; k0 += kBlock) {
    const int64_t k1 = a.depth - k0 < kBlock ? a.depth : k0 + kBlock;
    fill_panels<T>(a, m, k0, k1, s);
    for (int64_t r0 = 0; r0 < rows; r0 += kChunk) {
      const int64_t r1 = rows - r0 < kChunk ? rows : r0 + kChunk;
      decode<T>(a, m.row0 + r0, m.row0 + r1, k0, k1, s);
      for (int64_t c = 0; c < cols; c += kPanel) {
        float(*sums)[kPanel] = s.sums[c / kPanel] + r0;
        for (int64_t r = 0; r < r1 - r0; r += kTileRows)
          multiply_tile(s.entries + r, (k1 - k0) / 2, s.panels[c / kPanel][0], sums[r], cols - c, k0 > 0);
        if (k1 == a.depth)
          write_any(a, sums, m.row0 + r0, r1 - r0, m.col0 + c, cols - c < kPanel ? cols - c : kPanel);
      }
    }
  }
}

}  // namespace

void matmul(const MatmulArgs& a, const MatmulBlock& m, void* scratch) {
  Scratch& s = *static_cast<Scratch*>(scratch);
  switch (a.in) {
    case Dtype::kF32: return matmul_typed<F32>(a, m, s);
    case Dtype::kBF16: return matmul_typed<BF16>(a, m, s);
    case Dtype::kF16: return matmul_typed<F16>(a, m, s);
  }
}

}  // namespace S24_ISA
}  // namespace s24

#include "vnm_matmul.h"
#include "vnm_sampled.h"
