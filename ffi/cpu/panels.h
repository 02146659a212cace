// Panels of a dense operand and sums of a result, which the products share. Compiled once per instruction set.
//
// Panels hold float32 as [k][kPanel], so that a vector of the result's columns is one access.
#pragma once
#include "../core/floats.h"
#include "vectors.h"
#include "work.h"

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
constexpr int kDepth = 512;  // of the scratch, which V:N:M panels fill
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

static_assert(sizeof(Scratch) <= kScratch, "scratch");
static_assert(kBlock * kPanel * sizeof(float) <= 1 << 16, "offsets");

// ---- registers ----------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// Four words, and one of them in all lanes. By one load: those of D keep the load ports busy.
struct Four {
  __m512 four;  // in each block of 128 bits
  S24_HD explicit Four(const float (&words)[4]) {
    four = _mm512_maskz_broadcast_f32x4(__mmask16(-1), _mm_loadu_ps(words));
  }
  S24_HD Vec splat(int j) const {
    constexpr __mmask16 kAll = __mmask16(-1);  // without a mask, g++ 12 warns of its own headers
    return (Vec)(j == 0   ? _mm512_maskz_permute_ps(kAll, four, 0x00)
                 : j == 1 ? _mm512_maskz_permute_ps(kAll, four, 0x55)
                 : j == 2 ? _mm512_maskz_permute_ps(kAll, four, 0xaa)
                          : _mm512_maskz_permute_ps(kAll, four, 0xff));
  }
};
#endif

// Neighbouring values, four or two, and one of them in all lanes.
template <class T>
struct Values {
#if defined(__AVX512F__)
  Four wide;
  S24_HD Values(const typename T::Bits* from, int n) : wide(widened(from, n).at) {}
  S24_HD Vec splat(int j) const { return wide.splat(j); }

 private:
  struct Wide {
    alignas(16) float at[4];
  };
  S24_HD static Wide widened(const typename T::Bits* from, int n) {
    Wide wide{};
    for (int j = 0; j < n; ++j) wide.at[j] = float_of(T::to_f32(from[j]));
    return wide;
  }
#else
  const typename T::Bits* from;
  S24_HD Values(const typename T::Bits* p, int) : from(p) {}
  S24_HD Vec splat(int j) const { return float_of(T::to_f32(from[j])) - Vec{}; }
#endif
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
struct Values<F32> {
  Vec four;  // in each block of 128 bits
  S24_HD Values(const uint32_t* from, int n) {
    double two;
    __builtin_memcpy(&two, from, sizeof two);
    four = n == 4 ? (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)) : (Vec)_mm256_set1_pd(two);
  }
  S24_HD Vec splat(int j) const {
    return (Vec)(j == 0   ? _mm256_permute_ps((__m256)four, 0x00)
                 : j == 1 ? _mm256_permute_ps((__m256)four, 0x55)
                 : j == 2 ? _mm256_permute_ps((__m256)four, 0xaa)
                          : _mm256_permute_ps((__m256)four, 0xff));
  }
};
#endif

// Four offsets by one load, for the same reason.
struct Offsets {
  uint64_t four;
  S24_HD explicit Offsets(const uint16_t* from) {
    __builtin_memcpy(&four, from, sizeof four);
    asm("" : "+r"(four));
  }
  S24_HD explicit Offsets(uint64_t together) : four(together) {}
  S24_HD int64_t operator[](int j) const { return int64_t(four >> (16 * j) & 0xffff); }
};

// ---- packing of operands ------------------------------------------------------------------------------------------

// Asks for a part of a row that is many lines away from the last one, where hardware prefetchers do not follow.
S24_HD void prefetch(const void* from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(from) + b, 0, 3);
}

template <class T>
S24_HD void widen(const typename T::Bits* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = float_of(T::to_f32(from[i]));
}

// D[k0:k1, col0:col1] -> panels, zeros in the columns that fill up the last vector.
template <class T>
void fill_panels(const MatmulArgs& a, const Block& m, int64_t k0, int64_t k1, Scratch& s) {
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

// ---- results ------------------------------------------------------------------------------------------------------

template <class T>
S24_HD void narrow(const float* from, int64_t n, typename T::Bits* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = T::from_f32(bits_of(from[i]));
}

// Sums of one panel and one chunk of rows -> out[row.., col..], or its transpose.
template <class T>
void write(const MatmulArgs& a, const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t col, int64_t cols,
           const Collected& collected) {
  auto* out = static_cast<typename T::Bits*>(a.out);
  if (!a.out_packed_last) {
    for (int64_t r = 0; r < rows; ++r) narrow<T>(sums[r], cols, out + collected.row(row + r) * a.cols + col);
    return;
  }
  float turned[kPanel][kChunk];
  for (int64_t r = 0; r < rows; r += kWidth)
    for (int64_t c = 0; c < cols; c += kWidth) transpose(sums[r] + c, kPanel, turned[c] + r, kChunk);
  for (int64_t c = 0; c < cols; ++c) narrow<T>(turned[c], rows, out + (col + c) * a.rows + row);
}

inline void write_any(const MatmulArgs& a, const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t col, int64_t cols,
                      const Collected& collected = {}) {
  switch (a.out_dtype) {
    case Dtype::kF32: return write<F32>(a, sums, row, rows, col, cols, collected);
    case Dtype::kBF16: return write<BF16>(a, sums, row, rows, col, cols, collected);
    case Dtype::kF16: return write<F16>(a, sums, row, rows, col, cols, collected);
  }
}

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
