// V:2:M: of every M columns of a block of V rows four stay, and of these every row keeps two (2310.02065).
//
// A sum over the V rows of a tile is the sum of 16 partial ones: partial sum l adds rows l, l + 16, l + 32, ... in
// order, and add_lanes adds the 16. Everything is float32, so that each implementation finds the same columns.
#pragma once
#include "packed24.h"
#include "select.h"

namespace s24 {

constexpr int kVnmLanes = 16;
constexpr int kVnmMinV = 16, kVnmMaxV = 256, kVnmMinM = 4, kVnmMaxM = 32, kVnmMaxExactM = 16;

// Kernels add a block's rows 16, 32 or 64 at a time, so that V is a power of two.
S24_HD bool is_vnm_height(int64_t v) { return v >= kVnmMinV && v <= kVnmMaxV && (v & (v - 1)) == 0; }

// The sum of 16 partial sums that lie `step` apart.
S24_HD float add_lanes(const float* s, int64_t step) {
  float t[kVnmLanes];
  S24_UNROLL
  for (int l = 0; l < kVnmLanes; ++l) t[l] = s[l * step];
  S24_UNROLL
  for (int step = 1; step <= 4; ++step) {  // constant bounds: compilers unroll the inner loop first
    S24_UNROLL
    for (int l = 0; l < kVnmLanes / 2; ++l)
      if (l < kVnmLanes >> step) t[l] += t[l + (kVnmLanes >> step)];
  }
  return t[0];
}

// What an element adds to the sum of its column: |x|, or 0 for a subnormal.
S24_HD float column_addend(uint32_t u) { return float_of(flushed_magnitude(u)); }

// sum + column_addend(u)
S24_HD float add_magnitude(float sum, uint32_t u) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .f32 magnitude; abs.f32 magnitude, %1; add.rn.ftz.f32 %0, %0, magnitude;}" : "+f"(sum) : "f"(float_of(u)));
  return sum;
#else
  return sum + column_addend(u);
#endif
}

// Where the M columns of a group lie among all K: side by side or, if strided, K / M apart.
struct Grouping {
  int64_t m, group_step, column_step;

  S24_HD static Grouping of(int64_t m, int64_t groups, bool strided) {
    return strided ? Grouping{m, 1, groups} : Grouping{m, m, 1};
  }
  S24_HD bool strided() const { return group_step == 1; }
  // The column, of K, that has a number within a group; a number out of range counts as the last one.
  template <class Int>
  S24_HD Int column(Int group, uint32_t number) const {
    return group * Int(group_step) + Int(min_u32(number, uint32_t(m) - 1u)) * Int(column_step);
  }
};

// An integer that orders columns by their sums of magnitudes, with all NaN equal and above infinity. Columns without a normal
// element are ordered by their largest magnitude. The top bit is free.
S24_HD uint32_t column_key(float sum, uint32_t largest) {
  const uint32_t u = bits_of(sum) & kF32Magnitude;
  return blend(mask_if<uint32_t>(u > kF32Inf), kF32Magnitude, blend(mask_if<uint32_t>(u == 0), largest, u));
}

constexpr uint32_t kAllowed = 0x80000000u;  // in a magnitude or key: the mask allows it

// The addend and the magnitude of one element; an element that the mask forbids counts as absent.
template <class T, bool kMasked>
S24_HD void count_element(typename T::Bits x, const uint8_t* allowed, float& addend, uint32_t& magnitude) {
  uint32_t u = T::to_f32(x);
  uint32_t flag = 0;
  if (kMasked) {
    flag = mask_if<uint32_t>(*allowed != 0);
    u &= flag;
  }
  addend = column_addend(u);
  magnitude = (u & kF32Magnitude) | (flag & kAllowed);
}

// Columns with an allowed element come first.
S24_HD uint32_t allowed_first(float sum, uint32_t largest) {
  return column_key(sum, largest & kF32Magnitude) | (largest & kAllowed);
}

// The four columns of largest key, ascending; of equal ones the lower.
S24_HD void best_columns(const uint32_t* key, int m, uint8_t columns[4]) {
  uint64_t best[4] = {0, 0, 0, 0};
  for (int i = 0; i < m; ++i) {
    uint64_t k = uint64_t(key[i]) << 8 | uint64_t(m - i);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint64_t larger = best[j] > k ? best[j] : k;
      k = best[j] > k ? k : best[j];
      best[j] = larger;
    }
  }
  uint32_t c[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) c[j] = uint32_t(m) - uint32_t(best[j] & 0xff);
  const uint32_t low0 = min_u32(c[0], c[1]), high0 = max_u32(c[0], c[1]);
  const uint32_t low1 = min_u32(c[2], c[3]), high1 = max_u32(c[2], c[3]);
  const uint32_t inner0 = max_u32(low0, low1), inner1 = min_u32(high0, high1);
  columns[0] = uint8_t(min_u32(low0, low1));
  columns[1] = uint8_t(min_u32(inner0, inner1));
  columns[2] = uint8_t(max_u32(inner0, inner1));
  columns[3] = uint8_t(max_u32(high0, high1));
}

// ---- exhaustive search: the set of four columns that keeps most, of equal ones the first in lexicographic order

// An element's score, `top` being the largest magnitude of its tile: as in transposable tiles, but one NaN outranks
// all infinities that a tile can keep.
S24_HD float search_score(uint32_t u, uint32_t top) {
  const uint32_t a = u & kF32Magnitude;
  const float special = blend(mask_if<uint32_t>(a > kF32Inf), 1024.0f, 1.0f);
  return blend(mask_if<uint32_t>(top < kF32Inf), scaled_magnitude(a, top),
               keep_if(mask_if<uint32_t>(a >= kF32Inf), special));
}

// Sets of k of n, k up to 4.
S24_HD int sets_of(int n, int k) {
  int sets = 1;
  for (int i = 0; i < k; ++i) sets = sets * (n - i) / (i + 1);
  return n < k ? 0 : sets;
}

// The set of four of m columns with this number in lexicographic order.
S24_HD void set_of_four(int number, int m, int set[4]) {
  int column = 0;
  S24_UNROLL
  for (int k = 0; k < 4; ++k, ++column) {
    for (int sets; number >= (sets = sets_of(m - 1 - column, 3 - k)); ++column) number -= sets;
    set[k] = column;
  }
}

// The sum of the two largest of two ordered pairs.
S24_HD float largest_two(float high0, float low0, float high1, float low1) {
  const float top = high0 > high1 ? high0 : high1, low = low0 > low1 ? low0 : low1;
  const float under = high0 > high1 ? high1 : high0;
  return top + (under > low ? under : low);
}

enum class PackVnmOp : int32_t { kMask, kPack, kPackMasked, kGather, kUnpack };

// dense (outer, R, K), or (outer, K, R) if not depth_last <-> values (outer, R, 2K/M), metadata (outer, R, ceil(K/2M)),
// columns (outer, R/V, K/M, 4). kMask writes mask, of the shape of dense, and nothing else; kUnpack writes dense; kGather
// reads metadata and columns.
struct PackVnmArgs {
  PackVnmOp op;
  Dtype dtype;
  bool exact, depth_last;
  void* dense;
  uint8_t* mask;
  void* values;
  uint8_t* metadata;
  uint8_t* columns;
  int64_t outer, rows, depth, v, m;
};

}  // namespace s24
