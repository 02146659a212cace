// The unbiased estimate of a block of groups.
#pragma once
#include "../core/mvue.h"
#include "lanes.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace s24 {

template <>
struct Wide<S24_ISA::WideVec> {
  static S24_HD S24_ISA::WideVec product(S24_ISA::WideVec a, uint32_t b) {
    const S24_ISA::WideVec factor = S24_ISA::WideVec{} + b;
#if defined(__AVX512F__)
    return (S24_ISA::WideVec)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)factor);
#elif defined(__AVX2__)
    return (S24_ISA::WideVec)_mm256_mul_epu32((__m256i)a, (__m256i)factor);
#elif defined(__SSE2__)
    return (S24_ISA::WideVec)_mm_mul_epu32((__m128i)a, (__m128i)factor);
#else
    return (a & 0xffffffffu) * factor;
#endif
  }
};

namespace S24_ISA {

// The random words of n groups, at most kCount, from group `first` of an array on, when they draw their first (0) or second (1)
// number.
template <int kCount>
struct DrawnWords {
  static constexpr int kCalls = kWidth / 2;  // of Philox at a time
  static constexpr int kMost = kCount + 4 * kCalls;  // the first group may be within a quartet
  alignas(64) uint32_t at[kMost];

  S24_HD const uint32_t* draw(const Key& key, uint64_t first, int64_t n, uint32_t number) {
    if (key.others == 0) return fill(at, key, key.number(first), n, number);
    // Of a shard, numbers follow each other within a row.
    const uint64_t row = first / key.width, left = key.width * (row + 1) - first;
    if (uint64_t(n) <= left) return fill(at, key, key.number(first, row), n, number);
    for (int64_t done = 0; done < n;) {
      const uint64_t group = first + uint64_t(done), rest = key.width - group % key.width;
      const int64_t some = uint64_t(n - done) < rest ? n - done : int64_t(rest);
      alignas(64) uint32_t words[kMost];
      __builtin_memcpy(at + done, fill(words, key, key.number(group), some, number), size_t(some) * sizeof *at);
      done += some;
    }
    return at;
  }

 private:
  // The words of the groups that have the numbers from `first` on.
  static S24_HD const uint32_t* fill(uint32_t* at, const Key& key, uint64_t first, int64_t n, uint32_t number) {
    static constexpr uint64_t kSteps[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int64_t quartets = (int64_t(first % 4) + n + 3) / 4;
    for (int64_t l = 0; l < quartets; l += kCalls) {
      WideVec quartet, c[4];
      __builtin_memcpy(&quartet, kSteps, sizeof quartet);
      quartet_counter(quartet + (first / 4 + uint64_t(l)), number, c);
      philox_rounds(key.k0, key.k1, c);
      const WideVec pairs[2] = {(c[0] & 0xffffffffu) | c[1] << 32, (c[2] & 0xffffffffu) | c[3] << 32};
      uint64_t from[2][kCalls], to[2 * kCalls];
      __builtin_memcpy(from, pairs, sizeof from);
      for (int i = 0; i < kCalls; ++i)
        for (int j = 0; j < 2; ++j) to[2 * i + j] = from[j][i];
      __builtin_memcpy(at + 4 * l, to, sizeof to);
    }
    return at + first % 4;
  }
};

template <class T, bool kExact>
S24_HD void mvue_block(const uint32_t* w0, const uint32_t* w1, const Quad<typename T::Bits>& in,
                       Quad<typename T::Bits>& out) {
  using Bits = typename T::Bits;
  Bits finite = Bits(~Bits(0));
  for (int l = 0; l < kLanes<Bits>; ++l) {
    const Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
    Bits y[4];
    mvue24_finite<T, kExact>(x, w0[l], w1[l], y);
    finite = Bits(finite & all_finite<T>(x));
    for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
  }
  if (finite != 0) return;
  for (int l = 0; l < kLanes<Bits>; ++l) {
    const Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
    Bits y[4] = {out.at[0][l], out.at[1][l], out.at[2][l], out.at[3][l]};
    mvue24_repair<T>(x, y);
    for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
  }
}

}  // namespace S24_ISA
}  // namespace s24
