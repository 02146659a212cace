// Which four columns of each tile stay. Compiled once per instruction set, as a part of vnm.cc.
#pragma once
#include "../core/vnm.h"
#include "lanes.h"
#include "vectors.h"

// A loop over lanes stays one, to become vector code: unrolled before, it would become scalar code.
#if defined(__clang__)
#define S24_LANES
#else
#define S24_LANES _Pragma("GCC unroll 1")
#endif

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kStrip = 128;
constexpr int kMaxBlocks = int(kVnmLeast) / kVnmLanes;  // blocks of V rows in a unit

using Columns = uint8_t[kMaxBlocks][kVnmGroups][4];

// Rows [row0, row0 + rows) and groups [group0, group0 + groups) of one matrix.
struct Unit {
  int64_t outer, row0, rows, group0, groups;
};

Unit unit_at(const VnmArgs& a, int64_t index) {
  const int64_t height = vnm_unit_rows(a), row_units = ceil_div(a.rows, height);
  const int64_t all = a.depth / a.m, group_units = ceil_div(all, kVnmGroups), within = index % (row_units * group_units);
  // Neighbours in memory come first.
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
S24_HD int64_t dense_at(const VnmArgs& a, const Unit& u) {
  const int64_t k = u.group0 * a.m;
  return u.outer * a.rows * a.depth + (a.depth_last ? u.row0 * a.depth + k : k * a.rows + u.row0);
}

// add_lanes of neighbouring columns at once; the sums are left in row 0.
S24_HD void add_all_lanes(float* s, int64_t step, int64_t columns) {
  for (int half = kVnmLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l)
      for (int64_t c = 0; c < columns; ++c) s[l * step + c] += s[(l + half) * step + c];
}

// Columns are contiguous: lanes are columns, a few groups at a time, whose sums stay in the first-level cache. kRows rows
// of one partial sum are added at a time.
template <class T, bool kMasked, int kRows>
void choose_along_rows(const VnmArgs& a, const Unit& u, Columns columns) {
  const int64_t most_groups = kStrip / a.m;
  alignas(64) float sums[kVnmLanes][kStrip];
  alignas(64) uint32_t largest[kStrip], keys[kStrip];
  for (int64_t g0 = 0; g0 < u.groups; g0 += most_groups) {
    const int64_t groups = u.groups - g0 < most_groups ? u.groups - g0 : most_groups;
    const int64_t width = groups * a.m, first = dense_at(a, u) + g0 * a.m;
    __builtin_memset(sums, 0, sizeof sums);
    __builtin_memset(largest, 0, sizeof largest);
    for (int64_t r = 0; r < a.v; r += r % kVnmLanes == kVnmLanes - 1 ? 1 + (kRows - 1) * kVnmLanes : 1) {
      const int64_t at = first + r * a.depth, step = kVnmLanes * a.depth;
      const auto* __restrict__ x = static_cast<const typename T::Bits*>(a.dense) + at;
      const uint8_t* __restrict__ allowed = kMasked ? a.mask + at : nullptr;
      float* __restrict__ s = sums[r % kVnmLanes];
      for (int64_t c = 0; c < width; ++c) {
        float sum = s[c];
        uint32_t most = largest[c];
        S24_UNROLL
        for (int i = 0; i < kRows; ++i) {
          float addend;
          uint32_t magnitude;
          count_element<T, kMasked>(x[i * step + c], allowed + (kMasked ? i * step + c : 0), addend, magnitude);
          sum += addend;
          most = max_u32(most, magnitude);
        }
        s[c] = sum;
        largest[c] = most;
      }
    }
    add_all_lanes(sums[0], kStrip, width);
    for (int64_t c = 0; c < width; ++c) keys[c] = allowed_first(sums[0][c], largest[c]);
    for (int64_t g = 0; g < groups; ++g) best_columns(keys + g * a.m, int(a.m), columns[0][g0 + g]);
  }
}

// Rows are contiguous: lanes are partial sums, turned so that they become columns. One group of columns.
template <class T, bool kMasked, int kRows>
void choose_along_columns(const VnmArgs& a, const Unit& u, int64_t g, Columns columns) {
  const int64_t first = dense_at(a, u) + g * a.m * a.rows;
  alignas(64) float sums[kVnmMaxM][kVnmLanes], sums_turned[kVnmLanes][kVnmMaxM];
  alignas(64) uint32_t largest[kVnmMaxM][kVnmLanes], largest_turned[kVnmLanes][kVnmMaxM];
  uint32_t keys[kVnmMaxM];
  const int64_t turned = ceil_div(a.m, kWidth) * kWidth;
  for (int64_t i = a.m; i < turned; ++i)
    for (int l = 0; l < kVnmLanes; ++l) sums[i][l] = float_of(largest[i][l] = 0);
  for (int64_t b = 0; b < u.rows / a.v; ++b) {
    for (int64_t i = 0; i < a.m; ++i) {
      const int64_t at = first + i * a.rows + b * a.v;
      const auto* x = static_cast<const typename T::Bits*>(a.dense) + at;
      const uint8_t* allowed = kMasked ? a.mask + at : nullptr;
      for (int64_t r = 0; r < a.v; r += kRows * kVnmLanes) {
        S24_LANES
        for (int l = 0; l < kVnmLanes; ++l) {
          float sum = r == 0 ? 0.0f : sums[i][l];
          uint32_t most = r == 0 ? 0u : largest[i][l];
          S24_UNROLL
          for (int j = 0; j < kRows; ++j) {
            const int64_t e = r + j * kVnmLanes + l;
            float addend;
            uint32_t magnitude;
            count_element<T, kMasked>(x[e], allowed + (kMasked ? e : 0), addend, magnitude);
            sum += addend;
            most = max_u32(most, magnitude);
          }
          sums[i][l] = sum;
          largest[i][l] = most;
        }
      }
    }
    for (int64_t i = 0; i < turned; i += kWidth) {
      for (int l = 0; l < kVnmLanes; l += kWidth) {
        transpose(&sums[i][l], kVnmLanes, &sums_turned[l][i], kVnmMaxM);
        transpose(&largest[i][l], kVnmLanes, &largest_turned[l][i], kVnmMaxM);
      }
    }
    add_all_lanes(sums_turned[0], kVnmMaxM, turned);
    for (int l = 1; l < kVnmLanes; ++l)
      for (int64_t i = 0; i < turned; ++i)
        largest_turned[0][i] = max_u32(largest_turned[0][i], largest_turned[l][i]);
    for (int64_t i = 0; i < turned; ++i) keys[i] = allowed_first(sums_turned[0][i], largest_turned[0][i]);
    best_columns(keys, int(a.m), columns[b][g]);
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
void choose_by_search(const VnmArgs& a, const Unit& u, Columns columns) {
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
      search(scores, int(a.m), a.v, columns[b][g]);
    }
  }
}

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
