// What products of bfloat16 need where a processor multiplies pairs (AVX512-BF16).
//
// A group of four keeps one of six pairs of rows of D. A panel holds all six, each as words of two neighbours along K, and
// a kept pair of P is one word, as it is stored. So a group costs one broadcast, and one dot product with a memory operand
// for each vector of columns: a fourth of the dense FMAs. Subnormal numbers count as zeros.
#pragma once
#include "panels.h"

#if defined(__AVX512F__)

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kPairs = 6;
constexpr int kPairBlock = 64;  // along K: six rows of a panel for each four, in a first-level cache
static_assert(kPairBlock / 4 * kPairs <= kDepth && kPairBlock <= kBlock, "scratch");
static_assert(kPairBlock == 16 * sizeof(uint32_t), "sixteen groups, whose nibbles are one word");

typedef uint32_t WordVec __attribute__((vector_size(4 * kWidth)));

// Which of the six pairs a nibble of metadata names; one that names no pair stands for the first.
struct PairNumbers {
  uint8_t at[16];
};

constexpr PairNumbers make_pair_numbers() {
  PairNumbers t{};
  uint8_t number = 0;
  for (int i = 0; i < 4; ++i)
    for (int j = i + 1; j < 4; ++j) t.at[i | j << 2] = number++;
  return t;
}

constexpr PairNumbers kPairNumbers = make_pair_numbers();

S24_HD void store_pairs(WordVec first, WordVec last, float* to) {
  const WordVec low = WordVec{} + 0xffffu;
  const WordVec pairs[kPairs] = {first,
                                 (first & low) | (last << 16),
                                 (first & low) | (last & ~low),
                                 (first >> 16) | (last << 16),
                                 (first >> 16) | (last & ~low),
                                 last};
  S24_UNROLL
  for (int p = 0; p < kPairs; ++p) __builtin_memcpy(to + p * kPanel, &pairs[p], sizeof(Vec));
}

// D[k0:k1, col0:col1] -> panels, zeros in the columns that fill up the last vector.
inline void fill_pairs(const MatmulArgs& a, const Block& m, int64_t k0, int64_t k1, Scratch& s) {
  const auto* dense = static_cast<const uint16_t*>(a.dense);
  const int64_t cols = m.col1 - m.col0, groups = (k1 - k0) / 4;
  const auto place = [&](int64_t c, int64_t g) { return &s.panels[c / kPanel * kDepth + g * kPairs][c % kPanel]; };
  if (!a.dense_k_last) {
    for (int64_t g = 0; g < groups; ++g) {
      const uint16_t* rows = dense + (k0 + 4 * g) * a.cols + m.col0;
      for (int64_t c = 0; c < cols; c += kWidth) {
        WordVec row[4];
        S24_UNROLL
        for (int i = 0; i < 4; ++i) {
          uint16_t halves[kWidth] = {};
          __builtin_memcpy(halves, rows + i * a.cols + c, sizeof halves < size_t(2 * (cols - c)) ? sizeof halves : 2 * (cols - c));
          for (int l = 0; l < kWidth; ++l) row[i][l] = halves[l];
        }
        store_pairs(row[0] | row[1] << 16, row[2] | row[3] << 16, place(c, g));
      }
    }
    return;
  }
  alignas(64) uint32_t turned[kWidth][kWidth];
  for (int64_t c = 0; c < cols; c += kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      if (c + i < cols) {
        __builtin_memcpy(s.stripe[i], dense + (m.col0 + c + i) * a.depth + k0, size_t(8 * groups));
      } else {
        __builtin_memset(s.stripe[i], 0, size_t(8 * groups));
      }
    }
    for (int64_t g = 0; g < groups; g += kWidth / 2) {
      transpose(reinterpret_cast<const uint32_t*>(s.stripe[0]) + 2 * g, kDepth, turned[0], kWidth);
      for (int64_t i = 0; i < kWidth / 2 && g + i < groups; ++i) {
        WordVec first, last;
        __builtin_memcpy(&first, turned[2 * i], sizeof first);
        __builtin_memcpy(&last, turned[2 * i + 1], sizeof last);
        store_pairs(first, last, place(c, g + i));
      }
    }
  }
}

// Rows [row0, row1) of P at k0..k1 -> entries, one for each group; rows that fill up the last tile get zeros.
inline void decode_pairs(const MatmulArgs& a, int64_t row0, int64_t row1, int64_t k0, int64_t k1, Scratch& s) {
  constexpr int kLogStep = 8;
  static_assert(1 << kLogStep == kPanel * sizeof(float), "offsets");
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kPairNumbers.at));
  alignas(32) uint16_t first_rows[16];
  for (int g = 0; g < 16; ++g) first_rows[g] = uint16_t(g * kPairs);
  const __m256i first_row = _mm256_load_si256(reinterpret_cast<const __m256i*>(first_rows));
  const int64_t groups = (k1 - k0) / 4, value_step = a.depth / 2, byte_step = ceil_div(a.depth, 8);
  for (int64_t i = 0; i < ceil_div(row1 - row0, kTileRows) * kTileRows; ++i) {
    uint16_t* const offsets = s.entries.offsets[i];
    if (row0 + i >= row1) {
      __builtin_memset(s.entries.values[i], 0, size_t(4 * groups));
      __builtin_memset(offsets, 0, size_t(2 * groups));
      continue;
    }
    const auto* values = static_cast<const uint16_t*>(a.values) + (row0 + i) * value_step + k0 / 2;
    const uint8_t* m = a.metadata + (row0 + i) * byte_step + k0 / 8;
    uint64_t nibbles = 0;
    if (groups == kPairBlock / 4) {  // of sizes that are known copies are moves
      __builtin_memcpy(s.entries.values[i], values, kPairBlock);
      __builtin_memcpy(&nibbles, m, sizeof nibbles);
    } else {
      __builtin_memcpy(s.entries.values[i], values, size_t(4 * groups));
      __builtin_memcpy(&nibbles, m, size_t(ceil_div(groups, 2)));
    }
    // Bytes of the table are chosen by nibbles, and widened.
    const __m128i bytes = _mm_cvtsi64_si128(int64_t(nibbles)), mask = _mm_set1_epi8(15);
    const __m128i fields = _mm_and_si128(_mm_unpacklo_epi8(bytes, _mm_srli_epi64(bytes, 4)), mask);
    const __m256i rows = _mm256_add_epi16(first_row, _mm256_cvtepu8_epi16(_mm_shuffle_epi8(numbers, fields)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets), _mm256_slli_epi16(rows, kLogStep));
  }
}

// An entry is a pair of kept elements. The instruction is written as such: for an intrinsic, compilers need a flag, by which
// they would use it anywhere.
struct Pairs {
  static constexpr int kBlock = kPairBlock, kPerEntry = 4;
  static constexpr bool kOdd = true;
  S24_HD static void add(Vec& sum, Vec a, const Vec& d) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "m"(d)); }
  static constexpr auto fill = fill_pairs;
  static constexpr auto decode = decode_pairs;
  static bool here() {
    // Intel processors begin one in two cycles (measured), and four multiply-adds of float32 in the same time.
    static const bool found = __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
    return found;
  }
};

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
#endif
