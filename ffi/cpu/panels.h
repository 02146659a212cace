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

// Kept elements of rows of P: their values, and how many bytes into the panel their rows of D lie.
struct Entries {
  float values[kChunk][kBlock / 2];
  uint16_t offsets[kChunk][kBlock / 2];
};

// Panels follow each other: the sums of number p begin at row p * kRows, its part of D at row p * kDepth.
struct Scratch {
  float sums[kCols / kPanel * kRows][kPanel];
  float panels[kCols / kPanel * kDepth][kPanel];
  float stripe[kWidth][kDepth];
  Entries entries;
};

static_assert(sizeof(Scratch) <= kMatmulScratch, "scratch");
static_assert(kBlock * kPanel * sizeof(float) <= 1 << 16, "offsets");

// ---- registers ----------------------------------------------------------------------------------------------------

// Neighbouring values, four or two, and one of them in all lanes. By one load: those of D keep the load ports busy.
template <class T>
struct Values {
#if defined(__AVX512F__)
  __m512 four;  // in each block of 128 bits
  S24_HD Values(const typename T::Bits* from, int n) {
    alignas(16) float wide[4] = {};
    for (int j = 0; j < n; ++j) wide[j] = float_of(T::to_f32(from[j]));
    four = _mm512_maskz_broadcast_f32x4(__mmask16(-1), _mm_load_ps(wide));
  }
  S24_HD Vec splat(int j) const {
    constexpr __mmask16 kAll = __mmask16(-1);  // without a mask, g++ 12 warns of its own headers
    return (Vec)(j == 0   ? _mm512_maskz_permute_ps(kAll, four, 0x00)
                 : j == 1 ? _mm512_maskz_permute_ps(kAll, four, 0x55)
                 : j == 2 ? _mm512_maskz_permute_ps(kAll, four, 0xaa)
                          : _mm512_maskz_permute_ps(kAll, four, 0xff));
  }
#else
  const typename T::Bits* from;
  S24_HD Values(const typename T::Bits* p, int) : from(p) {}
  S24_HD Vec splat(int j) const { return float_of(T::to_f32(from[j])) - Vec{}; }
#endif
};

// Four offsets by one load, for the same reason.
struct Offsets {
  uint64_t four;
  S24_HD explicit Offsets(const uint16_t* from) {
    __builtin_memcpy(&four, from, sizeof four);
    asm("" : "+r"(four));
  }
  S24_HD int64_t operator[](int j) const { return int64_t(four >> (16 * j) & 0xffff); }
};

// kTileRows x (kVectors * kWidth) sums over `kept` entries per row.
template <int kVectors>
void multiply(const Entries& e, int64_t row, int64_t kept, const float* __restrict__ panel, float* __restrict__ sums,
              bool accumulate) {
  Vec acc[kTileRows][kVectors];
  S24_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = accumulate ? *reinterpret_cast<const Vec*>(sums + r * kPanel + v * kWidth) : Vec{};
  }
  const auto add = [&](int64_t j, int entries) __attribute__((always_inline)) {
    S24_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      const Offsets offsets(e.offsets[row + r] + j);
      const Values<F32> values(reinterpret_cast<const uint32_t*>(e.values[row + r] + j), entries);
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i >= entries) break;
        const Vec a = values.splat(i);
        const Vec* d = reinterpret_cast<const Vec*>(reinterpret_cast<const char*>(panel) + offsets[i]);
        S24_UNROLL
        for (int v = 0; v < kVectors; ++v) acc[r][v] += a * d[v];
      }
    }
  };
  for (int64_t j = 0; j + 4 <= kept; j += 4) add(j, 4);
  if (kept % 4) add(kept - 2, 2);
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
        float* to = s.panels[c / kPanel * kDepth + k];
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
    float* to = &s.panels[c / kPanel * kDepth][c % kPanel];
    for (int64_t k = 0; k < depth; k += kWidth) transpose(s.stripe[0] + k, kDepth, to + k * kPanel, kPanel);
  }
}

// Rows [row0, row1) of P at k0..k1 -> entries; rows that fill up the last tile get zeros.
template <class T>
void decode(const MatmulArgs& a, int64_t row0, int64_t row1, int64_t k0, int64_t k1, Scratch& s) {
  const int64_t kept = (k1 - k0) / 2, value_step = a.depth / 2, byte_step = ceil_div(a.depth, 8);
  constexpr int32_t kStep = kPanel * sizeof(float);
  typedef uint16_t OffsetVec __attribute__((vector_size(2 * kWidth)));
  IntVec shift, base;
  for (int j = 0; j < kWidth; ++j) {
    shift[j] = 2 * j;
    base[j] = j / 2 * 4 * kStep;
  }
  for (int64_t i = 0; i < ceil_div(row1 - row0, kTileRows) * kTileRows; ++i) {
    float* const values = s.entries.values[i];
    uint16_t* const offsets = s.entries.offsets[i];
    if (row0 + i >= row1) {
      for (int64_t j = 0; j < kept; ++j) values[j] = 0.0f, offsets[j] = 0;
      continue;
    }
    widen<T>(static_cast<const typename T::Bits*>(a.values) + (row0 + i) * value_step + k0 / 2, kept, values);
    const uint8_t* m = a.metadata + (row0 + i) * byte_step + k0 / 8;
    int64_t j = 0;
    // The positions of consecutive kept elements are consecutive fields of two bits.
    for (; j + kWidth <= kept; j += kWidth) {
      uint32_t fields = 0;
      __builtin_memcpy(&fields, m + j / 4, kWidth / 4);
      const IntVec index = ((IntVec{} + int32_t(fields)) >> shift) & 3;
      const auto narrow = __builtin_convertvector(index * kStep + base + int32_t(j * 2 * kStep), OffsetVec);
      __builtin_memcpy(offsets + j, &narrow, sizeof narrow);
    }
    for (; j < kept; ++j) offsets[j] = uint16_t((j / 2 * 4 + ((m[j / 4] >> (2 * (j % 4))) & 3)) * kStep);
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

void multiply_tile(const Entries& e, int64_t row, int64_t kept, const float* panel, float* sums, int64_t cols,
                   bool accumulate) {
  switch (ceil_div(cols < kPanel ? cols : kPanel, kWidth)) {
    case 1: return multiply<1>(e, row, kept, panel, sums, accumulate);
    case 2: return multiply<2>(e, row, kept, panel, sums, accumulate);
    case 3: return multiply<3>(e, row, kept, panel, sums, accumulate);
    default: return multiply<4>(e, row, kept, panel, sums, accumulate);
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
        float(*sums)[kPanel] = s.sums + c / kPanel * kRows + r0;
        for (int64_t r = 0; r < r1 - r0; r += kTileRows)
          multiply_tile(s.entries, r, (k1 - k0) / 2, s.panels[c / kPanel * kDepth], sums[r], cols - c, k0 > 0);
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
