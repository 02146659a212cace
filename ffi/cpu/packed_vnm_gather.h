// The chosen columns of rows: four lanes' worth of each group, by permutations where the instruction set has them. Compiled
// once per instruction set, as a part of packed_vnm.simd.cc.
#pragma once
#include "packed_vnm_columns.h"

namespace s24 {
namespace S24_ISA {
namespace {

// Where the chosen columns of a unit lie in a row of it.
template <class B>
struct Gather {
  static constexpr int kGroups = int(kVnmGroups);
  int32_t at[4][kGroups];
#if defined(__AVX512F__)
  // A register holds the chosen elements of kRun groups: all the first ones, all the second ones, and so on. A permutation
  // takes them from windows of two registers each, which hold a whole number of groups.
  static constexpr int kCount = kLanes<B>, kRun = kCount / 4, kRuns = kGroups / kRun;
  alignas(64) B index[kRuns][kCount];
  int windows;  // how many a run of groups needs; 0 if groups do not fit into windows
#endif

  S24_HD void set(int64_t m, int64_t groups, const uint8_t (*columns)[4]) {
    for (int g = 0; g < kGroups; ++g)
      for (int k = 0; k < 4; ++k) at[k][g] = g < groups ? int32_t(g * m + columns[g][k]) : 0;
#if defined(__AVX512F__)
    windows = groups == kGroups && (m == 8 || m == 16 || m == 32) ? int(m / 8) : 0;
    for (int p = 0; p < kRuns; ++p)
      for (int k = 0; k < 4; ++k)
        for (int q = 0; q < kRun; ++q) index[p][k * kRun + q] = B(at[k][p * kRun + q] % (2 * kCount));
#endif
  }

  // Members k of the groups of kRows rows, `step` apart -> four[k], row after row. W: those of the array, or bytes of a mask.
  template <class W, int kRows, int kTileRows>
  S24_HD void take(const W* x, int64_t step, B (&four)[4][kTileRows]) const {
#if defined(__AVX512F__)
    switch (windows) {
      case 1: return permute<1, W, kRows>(x, step, four);
      case 2: return permute<2, W, kRows>(x, step, four);
      case 4: return permute<4, W, kRows>(x, step, four);
    }
#endif
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < 4; ++k)
        for (int g = 0; g < kGroups; ++g) four[k][r * kGroups + g] = x[r * step + at[k][g]];
  }

#if defined(__AVX512F__)
 private:
  static S24_HD __m512i load(const uint32_t* x) { return _mm512_loadu_si512(x); }
  static S24_HD __m512i load(const uint16_t* x) { return _mm512_loadu_si512(x); }
  static S24_HD __m512i load(const uint8_t* x) {
    alignas(64) B wide[kCount];
    load_bytes(x, wide);
    return _mm512_load_si512(wide);
  }
  static S24_HD __m512i pick(__m512i low, __m512i index, __m512i high) {
    return sizeof(B) == 4 ? _mm512_permutex2var_epi32(low, index, high) : _mm512_permutex2var_epi16(low, index, high);
  }
  static S24_HD __m512i merge_lanes(__m512i a, uint32_t lanes, __m512i b) {
    return sizeof(B) == 4 ? _mm512_mask_mov_epi32(a, __mmask16(lanes), b) : _mm512_mask_mov_epi16(a, lanes, b);
  }
  // Two blocks of 128 bits of each. (Without a mask, g++ 12 warns of its own headers.)
  template <int kWhich>
  static S24_HD __m512i blocks(__m512i a, __m512i b) {
    return _mm512_maskz_shuffle_i32x4(__mmask16(-1), a, b, kWhich);
  }
  // Of groups [first, first + n) of a run.
  static constexpr uint32_t lanes_of(int first, int n) {
    uint32_t lanes = 0;
    for (int k = 0; k < 4; ++k)
      for (int q = first; q < first + n; ++q) lanes |= 1u << (k * kRun + q);
    return lanes;
  }

  template <int kWindows, class W, int kRows, int kTileRows>
  S24_HD void permute(const W* x, int64_t step, B (&four)[4][kTileRows]) const {
    constexpr int kRowsAtOnce = 4 / kRuns, kGroupsOfWindow = kRun / kWindows;
    static_assert(kRows % kRowsAtOnce == 0, "whole registers");
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
      __m512i runs[4];
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int p = i % kRuns;
        const W* from = x + (r + i / kRuns) * step + p * kWindows * 2 * kCount;
        const __m512i where = _mm512_load_si512(index[p]);
        runs[i] = pick(load(from), where, load(from + kCount));
        S24_UNROLL
        for (int w = 1; w < kWindows; ++w) {
          const W* window = from + w * 2 * kCount;
          const __m512i found = pick(load(window), where, load(window + kCount));
          runs[i] = merge_lanes(runs[i], lanes_of(w * kGroupsOfWindow, kGroupsOfWindow), found);
        }
      }
      const __m512i first01 = blocks<0x44>(runs[0], runs[1]), last01 = blocks<0xee>(runs[0], runs[1]);
      const __m512i first23 = blocks<0x44>(runs[2], runs[3]), last23 = blocks<0xee>(runs[2], runs[3]);
      B* to = four[0] + r * kGroups;
      _mm512_storeu_si512(to, blocks<0x88>(first01, first23));
      _mm512_storeu_si512(to + kTileRows, blocks<0xdd>(first01, first23));
      _mm512_storeu_si512(to + 2 * kTileRows, blocks<0x88>(last01, last23));
      _mm512_storeu_si512(to + 3 * kTileRows, blocks<0xdd>(last01, last23));
    }
  }
#endif
};

}  // namespace
}  // namespace S24_ISA
}  // namespace s24
