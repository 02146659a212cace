// GPU version of best_tile_mask (the same result as core/transposable.h): the search in integers, a tile in each thread.
//
// A score is a sum of an upper half, of rows 0 and 1, and a lower one. Halves that cover the columns equally often complete
// the same halves, so the largest score is the largest of 19 sums of two largest halves. Below its score a key holds the
// order of the patterns: the largest key is the first pattern with the largest score.
#pragma once
#include "../../core/transposable.h"
#include "select.h"

namespace s24 {

// Halves, 6 * p0 + p1 or 6 * p2 + p3, of which each upper and each lower one make a pattern.
struct TileCut {
  int count;  // of either
  int upper[6], lower[6];
};

constexpr int kTileCuts = 19;

struct TileCuts {
  int count;
  uint32_t columns[36];  // how often the upper halves cover each
  TileCut at[36];
};

constexpr TileCuts make_tile_cuts() {
  TileCuts t{};
  for (int half = 0; half < 36; ++half) {
    const uint32_t columns = spread_columns(pair_columns(half / 6)) + spread_columns(pair_columns(half % 6));
    int n = 0;
    while (n < t.count && t.columns[n] != columns) ++n;
    if (n == t.count) t.columns[t.count++] = columns;
    TileCut& cut = t.at[n];
    cut.upper[cut.count++] = half;
    int found = 0;
    for (int lower = 0; lower < 36; ++lower)
      if (columns + spread_columns(pair_columns(lower / 6)) + spread_columns(pair_columns(lower % 6)) == 0x2222u)
        cut.lower[found++] = lower;
  }
  return t;
}

static_assert(make_tile_cuts().count == kTileCuts, "two rows can cover the columns in 19 ways");

template <int kCut>
constexpr TileCut kTileCut = make_tile_cuts().at[kCut];

// What the entry of a row and column adds to the rank of a pattern that keeps it. Pairs of columns add 6 to 1 times the place
// of their row, in their order; all of it less 42, so that ranks are 216 - (36 p0 + 6 p1 + p2). Every column is kept twice:
// p3 follows.
S24_HD constexpr uint32_t rank_of(int row, int column) {
  const uint32_t pair = column == 0 ? 4u : column == 1 ? 2u : column == 2 ? 1u : 0u;
  return row == 0 ? 36u * pair - 21u : row == 1 ? 6u * pair : row == 2 ? pair : 0u;
}

// Returns its argument, but hides from the compiler how it was made: nvcc would otherwise clear the sign once more in every
// number that it makes of the word.
S24_HD uint32_t opaque(uint32_t word) {
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(word));
#endif
  return word;
}

// max(a + b, c).
S24_HD uint32_t larger_sum(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  return __viaddmax_u32(a, b, c);
#else
  return max_u32(a + b, c);
#endif
}

// The larger number in each 16-bit half of two words.
S24_HD uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  return max_u32(a & 0xffffu, b & 0xffffu) | max_u32(a >> 16, b >> 16) << 16;
#endif
}

// The smaller one of a - 1 and b in each 16-bit half; a zero in a becomes the largest number.
S24_HD uint32_t lesser_after_one(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __viaddmin_u16x2(a, 0xffffffffu, b);
#else
  return min_u32((a - 1u) & 0xffffu, b & 0xffffu) | min_u32(((a >> 16) - 1u) & 0xffffu, b >> 16) << 16;
#endif
}

// The largest half of one cut, from the keys of the pairs of two rows.
template <int kCut, bool kUpper, int kFrom = 0>
S24_HD uint32_t largest_half(const uint32_t a[6], const uint32_t b[6]) {
  constexpr TileCut cut = kTileCut<kCut>;
  constexpr int half = kUpper ? cut.upper[kFrom] : cut.lower[kFrom];
  if constexpr (kFrom + 1 == cut.count)
    return a[half / 6] + b[half % 6];
  else
    return larger_sum(a[half / 6], b[half % 6], largest_half<kCut, kUpper, kFrom + 1>(a, b));
}

template <int kFirst, int kCount>
S24_HD uint32_t largest_pattern(const uint32_t pairs[4][6]) {
  if constexpr (kCount > 6) {
    return max_u32(largest_pattern<kFirst, kCount / 2>(pairs),
                   largest_pattern<kFirst + kCount / 2, kCount - kCount / 2>(pairs));
  } else {
    const uint32_t upper = largest_half<kFirst, true>(pairs[0], pairs[1]);
    const uint32_t lower = largest_half<kFirst, false>(pairs[2], pairs[3]);
    if constexpr (kCount == 1)
      return upper + lower;
    else
      return larger_sum(upper, lower, largest_pattern<kFirst + 1, kCount - 1>(pairs));
  }
}

// The mask of the pattern with 215 - (36 p0 + 6 p1 + p2) = rank.
S24_HD uint32_t tile_of_rank(uint32_t rank) {
  const uint32_t upper = rank * 171u >> 10, first = upper * 43u >> 8;  // rank / 6, upper / 6
  const uint32_t pairs = first | (upper - 6u * first) << 4 | (rank - 6u * upper) << 8;
  const uint32_t rows = select_bytes(0x09060a0cu, 0x0305u, pairs);  // pair_columns of five minus each
  const uint32_t three = (rows & 15u) | (rows >> 4 & 0xf0u) | (rows >> 8 & 0xf00u);
  return three | ((three ^ three >> 4 ^ three >> 8) & 15u) << 12;
}

// Whether the scores of a tile of 16-bit floats are exact as integers; if so, `mask` becomes best_tile_mask. Words: two
// elements each, two words a row.
template <class T>
S24_HD bool search_tile(const uint32_t words[8], uint32_t& mask) {
  constexpr bool kHalf = T::kInf == F16::kInf;
  constexpr int kSignificand = kHalf ? 10 : 7, kBias = kHalf ? 15 : 127;
  constexpr int kBits = 21, kSpread = kBits - 1 - kSignificand;  // eight entries and a rank of eight bits make 32
  uint32_t a[8], largest = 0, least = ~0u;
  S24_UNROLL
  for (int i = 0; i < 8; ++i) {
    a[i] = opaque(words[i] & 0x7fff7fffu);
    largest = larger_halves(largest, a[i]);
    least = lesser_after_one(a[i], least);
  }
  const int exponent = int(max_u32(largest & 0xffffu, largest >> 16)) >> kSignificand;
  const int smallest = int(min_u32(least & 0xffffu, least >> 16)) + 1;
  const float scale = float_of(uint32_t(127 + kBits - 1 + kBias - exponent) << 23);
  uint32_t pairs[4][6];
  S24_UNROLL
  for (int r = 0; r < 4; ++r) {
    uint32_t key[4];
    S24_UNROLL
    for (int c = 0; c < 4; ++c) {
      const uint32_t word = a[2 * r + c / 2];
      const float number = c % 2 == 0 ? low_number<T>(word) : high_number<T>(word);
      key[c] = (bits_of(fused(number, scale, 0x1p23f)) << 8) + rank_of(r, c);
    }
    pairs[r][0] = key[0] + key[1];
    pairs[r][1] = key[0] + key[2];
    pairs[r][2] = key[0] + key[3];
    pairs[r][3] = key[1] + key[2];
    pairs[r][4] = key[1] + key[3];
    pairs[r][5] = key[2] + key[3];
  }
  mask = tile_of_rank((largest_pattern<0, kTileCuts>(pairs) & 255u) - 1u);
  return smallest >= (exponent - kSpread) * (1 << kSignificand) && exponent < (T::kInf >> kSignificand) &&
         exponent >= kBits - 1 + kBias - 127;
}

// best_tile_mask of 16-bit floats given as numbers; `largest`: of their magnitudes, below 2^127. Scores are those of
// tile_scores times a power of two, which changes no comparison.
S24_HD uint32_t best_tile_mask_of_numbers(const float w[16], float largest) {
  const uint32_t exponent = bits_of(largest) & 0x7f800000u;
  const float scale = float_of((254u << 23) - exponent);
  float b[16], top[36], bottom[36], best;
  uint32_t mask;
  S24_UNROLL
  for (int i = 0; i < 16; ++i) {
    b[i] = magnitude(w[i]) * scale;  // exact
    if (exponent > 127u << 23) b[i] = without_subnormals(b[i]);
  }
  tile_halves(b, top, bottom);
  TileSearch<0, kTilePatterns>::run(top, bottom, best, mask);
  return mask;
}

}  // namespace s24
