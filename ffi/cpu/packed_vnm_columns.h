// Which four columns of each tile stay. Compiled once per instruction set, as a part of packed_vnm.simd.cc.
#pragma once
#include "../core/packed_vnm.h"
#include "lanes.h"
#include "vectors.h"
#include "work.h"

// A loop over lanes stays one, to become vector code: unrolled before, it would become scalar code.
#if defined(__clang__)
#define S24_LANES
#else
#define S24_LANES _Pragma("GCC unroll 1")
#endif

namespace s24 {
namespace S24_ISA {
namespace {

// Units that follow each other in memory are worked on as strips. A strip has at most kStrip elements in a row, and at most
// kStripElements in all, so that they stay in the second-level cache from the choice of columns to the packing.
constexpr int kStrip = 1024, kStripElements = 1 << 16;
constexpr int kMaxBlocks = kStrip / kVnmLanes;

// The chosen columns: of each block of a strip if rows are contiguous, of each unit if columns are.
using Columns = uint8_t[kMaxBlocks][kVnmGroups][4];

// Rows [row0, row0 + rows) and groups [group0, group0 + groups) of one matrix.
struct Unit {
  int64_t outer, row0, rows, group0, groups;
};

Unit unit_at(const PackVnmArgs& a, int64_t index) {
  const int64_t height = vnm_unit_rows(a), row_units = ceil_div(a.rows, height);
  const int64_t all = a.depth / a.m, group_units = ceil_div(all, kVnmGroups), within = index % (row_units * group_units);
  // Consecutive units are neighbours in memory.
  const int64_t r = a.depth_last ? within / group_units : within % row_units;
  const int64_t g = a.depth_last ? within % group_units : within / row_units;
  Unit u;
  u.outer = index / (row_units * group_units);
  u.row0 = r * height;
  u.rows = a.rows - u.row0 < height ? a.rows - u.row0 : height;
  u.group0 = g * kVnmGroups;
  u.groups = all - u.group0 < kVnmGroups ? all - u.group0 : kVnmGroups;
  return u;
}

// Index of the unit's first element in an array of the shape of dense.
S24_HD int64_t dense_at(const PackVnmArgs& a, const Unit& u) {
  const int64_t k = u.group0 * a.m;
  return u.outer * a.rows * a.depth + (a.depth_last ? u.row0 * a.depth + k : k * a.rows + u.row0);
}

// Prefetches `lines` runs of n elements, `step` apart, from element `at` of dense on: hardware prefetchers do not follow from
// one run to the next. Few runs are asked for at a time, between sums over earlier ones: more would wait for each other.
template <class T>
S24_HD void prefetch(const PackVnmArgs& a, int64_t at, int64_t n, int64_t lines, int64_t step) {
  constexpr int64_t kSize = sizeof(typename T::Bits);
  const char* line = static_cast<const char*>(a.dense) + at * kSize;
  for (int64_t i = 0; i < lines; ++i, line += step * kSize)
    for (int64_t b = 0; b < n * kSize; b += 64) __builtin_prefetch(line + b, 0, 2);
}

// As best_columns, where kPadded keys can be read. If no two keys are equal, exactly four columns have fewer than four larger
// ones.
template <int kPadded>
S24_HD void best_of(const uint32_t* key, int m, uint8_t columns[4]) {
  constexpr int kVectors = kPadded / kWidth;
  constexpr uint32_t kTop = 0x80000000u;  // turns the unsigned order into the signed one
  IntVec own[kVectors], larger[kVectors];
  S24_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    __builtin_memcpy(&own[v], key + v * kWidth, sizeof own[v]);
    own[v] ^= int32_t(kTop);
    larger[v] = IntVec{};
  }
  for (int j = 0; j < m; ++j) {
    const IntVec other = IntVec{} + int32_t(key[j] ^ kTop);
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v) larger[v] -= other > own[v];
  }
  uint32_t best = 0;
  S24_UNROLL
  for (int v = 0; v < kVectors; ++v) best |= sign_bits(larger[v] < 4) << (v * kWidth);
  if (m < 32) best &= (1u << m) - 1u;
  if (__builtin_popcount(best) != 4) return best_columns(key, m, columns);
  S24_UNROLL
  for (int k = 0; k < 4; ++k, best &= best - 1u) columns[k] = uint8_t(__builtin_ctz(best));
}

S24_HD void best_of_padded(const uint32_t* key, int m, uint8_t columns[4]) {
  m <= 16 ? best_of<16>(key, m, columns) : best_of<kVnmMaxM>(key, m, columns);
}

// Adds kRows rows of one partial sum. Magnitudes matter only to columns without a normal element and to masks.
template <class T, bool kMasked, bool kLargest, int kRows, bool kFirst>
S24_HD void add_rows(const PackVnmArgs& a, int64_t at, int64_t width, float* __restrict__ s, uint32_t* __restrict__ largest) {
  const int64_t step = kVnmLanes * a.depth;
  const auto* __restrict__ x = static_cast<const typename T::Bits*>(a.dense) + at;
  const uint8_t* __restrict__ allowed = kMasked ? a.mask + at : nullptr;
  for (int64_t c = 0; c < width; ++c) {
    float sum = kFirst ? 0.0f : s[c];
    uint32_t most = kLargest ? largest[c] : 0u;
    S24_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float addend;
      uint32_t magnitude;
      count_element<T, kMasked>(x[i * step + c], allowed + (kMasked ? i * step + c : 0), addend, magnitude);
      sum += addend;
      if (kLargest) most = max_u32(most, magnitude);
    }
    s[c] = sum;
    if (kLargest) largest[c] = most;
  }
}

// Writes the sums over V rows of `width` neighbouring columns, and their largest magnitudes. Partial sums are added as early as
// the order of add_lanes allows, so that the few that are held fit into the first-level cache.
template <class T, bool kMasked, bool kLargest, int kRows>
void sum_rows(const PackVnmArgs& a, int64_t at, int64_t next, int64_t width, float (*sums)[kStrip], uint32_t* largest) {
  constexpr int64_t kPart = 128;
  if (kLargest) __builtin_memset(largest, 0, size_t(width) * sizeof *largest);
  int top = 0;
  for (int i = 0; i < kVnmLanes; ++i, ++top) {
    const int lane = (i & 1) << 3 | (i & 2) << 1 | (i & 4) >> 1 | i >> 3;
    for (int64_t r = lane; r < a.v; r += kRows * kVnmLanes) {
      for (int64_t c = 0; c < width; c += kPart) {
        const int64_t first = r * a.depth + c, n = width - c < kPart ? width - c : kPart;
        prefetch<T>(a, next + first, n, kRows, kVnmLanes * a.depth);
        r == lane ? add_rows<T, kMasked, kLargest, kRows, true>(a, at + first, n, sums[top] + c, largest + c)
                  : add_rows<T, kMasked, kLargest, kRows, false>(a, at + first, n, sums[top] + c, largest + c);
      }
    }
    for (int done = i; done & 1; done >>= 1, --top)
      for (int64_t c = 0; c < width; ++c) sums[top - 1][c] += sums[top][c];
  }
}

S24_HD bool any_zero(const float* sums, int64_t n) {
  uint32_t zero = 0;
  for (int64_t c = 0; c < n; ++c) zero |= mask_if<uint32_t>((bits_of(sums[c]) & kF32Magnitude) == 0);
  return zero != 0;
}

// Columns are contiguous: lanes are columns, those of all groups of a strip; the next strip begins at element `next`.
template <class T, bool kMasked, int kRows>
void choose_along_rows(const PackVnmArgs& a, const Unit& u, int64_t next, Columns columns) {
  alignas(64) float sums[5][kStrip];
  alignas(64) uint32_t largest[kStrip], keys[kStrip + kVnmMaxM];
  const int64_t width = u.groups * a.m, at = dense_at(a, u);
  sum_rows<T, kMasked, kMasked, kRows>(a, at, next, width, sums, largest);
  const bool magnitudes = kMasked || any_zero(sums[0], width);
  if (!kMasked && magnitudes) sum_rows<T, kMasked, true, kRows>(a, at, next, width, sums, largest);
  if (magnitudes) {
    for (int64_t c = 0; c < width; ++c) keys[c] = allowed_first(sums[0][c], largest[c]);
  } else {
    for (int64_t c = 0; c < width; ++c) keys[c] = allowed_first(sums[0][c], 0);
  }
  __builtin_memset(keys + width, 0, kVnmMaxM * sizeof *keys);
  for (int64_t g = 0; g < u.groups; ++g)
    best_of_padded(keys + g * a.m, int(a.m), columns[g / kVnmGroups][g % kVnmGroups]);
}

// The 16 partial sums of V neighbouring elements, and their largest magnitudes.
template <class T, bool kMasked, bool kLargest, int kRows>
S24_HD void sum_line(const PackVnmArgs& a, int64_t at, float (&__restrict__ sums)[kVnmLanes],
                     uint32_t (&__restrict__ largest)[kVnmLanes]) {
  const auto* __restrict__ x = static_cast<const typename T::Bits*>(a.dense) + at;
  const uint8_t* __restrict__ allowed = kMasked ? a.mask + at : nullptr;
  for (int64_t r = 0; r < a.v; r += kRows * kVnmLanes) {
    S24_LANES
    for (int l = 0; l < kVnmLanes; ++l) {
      float sum = r == 0 ? 0.0f : sums[l];
      uint32_t most = r == 0 || !kLargest ? 0u : largest[l];
      S24_UNROLL
      for (int j = 0; j < kRows; ++j) {
        const int64_t e = r + j * kVnmLanes + l;
        float addend;
        uint32_t magnitude;
        count_element<T, kMasked>(x[e], allowed + (kMasked ? e : 0), addend, magnitude);
        sum += addend;
        if (kLargest) most = max_u32(most, magnitude);
      }
      sums[l] = sum;
      if (kLargest) largest[l] = most;
    }
  }
}

struct LineSums {
  static constexpr int kLines = 512;
  alignas(64) float sums[kLines][kVnmLanes];
  alignas(64) uint32_t largest[kLines][kVnmLanes];
  alignas(64) float total[kLines];
  alignas(64) uint32_t most[kLines], keys[kLines + kVnmMaxM];

  // Turned, lanes become lines.
  S24_HD void add_up(int64_t lines, bool magnitudes) {
    alignas(64) float s[kVnmLanes][kVnmLanes];
    alignas(64) uint32_t m[kVnmLanes][kVnmLanes];
    for (int64_t i = 0; i < lines; i += kVnmLanes) {
      turn(sums + i, s);
      for (int half = kVnmLanes / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l)
          for (int c = 0; c < kVnmLanes; ++c) s[l][c] += s[l + half][c];
      __builtin_memcpy(total + i, s[0], sizeof s[0]);
      if (!magnitudes) continue;
      turn(largest + i, m);
      for (int l = 1; l < kVnmLanes; ++l)
        for (int c = 0; c < kVnmLanes; ++c) m[0][c] = max_u32(m[0][c], m[l][c]);
      __builtin_memcpy(most + i, m[0], sizeof m[0]);
    }
  }

 private:
  template <class W>
  static S24_HD void turn(const W (*from)[kVnmLanes], W (*to)[kVnmLanes]) {
    for (int i = 0; i < kVnmLanes; i += kWidth)
      for (int l = 0; l < kVnmLanes; l += kWidth) transpose(&from[i][l], kVnmLanes, &to[l][i], kVnmLanes);
  }
};

// Rows are contiguous: lanes are partial sums. One group of columns; the next one begins at element `next`.
template <class T, bool kMasked, int kRows>
void choose_along_columns(const PackVnmArgs& a, const Unit& u, int64_t g, LineSums& s, int64_t next, Columns columns) {
  const int64_t all = u.rows / a.v, most = LineSums::kLines / a.m;
  for (int64_t first = 0; first < all; first += most) {
    const int64_t at = dense_at(a, u) + g * a.m * a.rows + first * a.v;
    const int64_t blocks = all - first < most ? all - first : most, lines = blocks * a.m;
    for (int64_t i = 0; i < a.m; ++i)
      for (int64_t b = 0; b < blocks; ++b) {
        prefetch<T>(a, next + i * a.rows + (first + b) * a.v, a.v, 1, 0);
        sum_line<T, kMasked, kMasked, kRows>(a, at + i * a.rows + b * a.v, s.sums[b * a.m + i], s.largest[b * a.m + i]);
      }
    s.add_up(lines, kMasked);
    const bool magnitudes = kMasked || any_zero(s.total, lines);
    if (!kMasked && magnitudes) {
      for (int64_t i = 0; i < a.m; ++i)
        for (int64_t b = 0; b < blocks; ++b)
          sum_line<T, kMasked, true, kRows>(a, at + i * a.rows + b * a.v, s.sums[b * a.m + i], s.largest[b * a.m + i]);
      s.add_up(lines, true);
    }
    if (magnitudes) {
      for (int64_t c = 0; c < lines; ++c) s.keys[c] = allowed_first(s.total[c], s.most[c]);
    } else {
      for (int64_t c = 0; c < lines; ++c) s.keys[c] = allowed_first(s.total[c], 0);
    }
    for (int64_t b = 0; b < blocks; ++b) best_of_padded(s.keys + b * a.m, int(a.m), columns[first + b][g]);
  }
}

using Scores = float[kVnmMaxExactM][kVnmMaxV];

// All sets of four columns, in lexicographic order.
void search(const Scores scores, int m, int64_t v, uint8_t columns[4]) {
  alignas(64) float high[kVnmMaxV], low[kVnmMaxV], sums[kVnmLanes];
  float best = -1.0f;
  for (int c0 = 0; c0 < m; ++c0) {
    for (int c1 = c0 + 1; c1 < m; ++c1) {
      for (int64_t r = 0; r < v; ++r) {
        const bool first = scores[c0][r] > scores[c1][r];
        high[r] = first ? scores[c0][r] : scores[c1][r];
        low[r] = first ? scores[c1][r] : scores[c0][r];
      }
      for (int c2 = c1 + 1; c2 < m; ++c2) {
        for (int c3 = c2 + 1; c3 < m; ++c3) {
          for (int l = 0; l < kVnmLanes; ++l) sums[l] = 0.0f;
          for (int64_t r = 0; r < v; r += kVnmLanes) {
            for (int l = 0; l < kVnmLanes; ++l) {
              const float x = scores[c2][r + l], y = scores[c3][r + l];
              sums[l] += largest_two(high[r + l], low[r + l], x > y ? x : y, x > y ? y : x);
            }
          }
          const float sum = add_lanes(sums, 1);
          if (sum > best) {
            best = sum;
            const int set[4] = {c0, c1, c2, c3};
            for (int k = 0; k < 4; ++k) columns[k] = uint8_t(set[k]);
          }
        }
      }
    }
  }
}

template <class T>
void choose_by_search(const PackVnmArgs& a, const Unit& u, Columns columns) {
  const int64_t row_step = a.depth_last ? a.depth : 1, column_step = a.depth_last ? 1 : a.rows;
  alignas(64) Scores scores;
  for (int64_t b = 0; b < u.rows / a.v; ++b) {
    for (int64_t g = 0; g < u.groups; ++g) {
      const auto* x = static_cast<const typename T::Bits*>(a.dense) + dense_at(a, u) + b * a.v * row_step + g * a.m * column_step;
      uint32_t top = 0;
      for (int64_t i = 0; i < a.m; ++i)
        for (int64_t r = 0; r < a.v; ++r)
          top = max_u32(top, T::to_f32(x[r * row_step + i * column_step]) & kF32Magnitude);
      for (int64_t i = 0; i < a.m; ++i)
        for (int64_t r = 0; r < a.v; ++r) scores[i][r] = search_score(T::to_f32(x[r * row_step + i * column_step]), top);
      search(scores, int(a.m), a.v, columns[b + g / kVnmGroups][g % kVnmGroups]);
    }
  }
}

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
