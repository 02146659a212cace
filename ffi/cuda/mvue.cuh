// Random words of the groups of an estimate.
#pragma once
#include "simt/mvue.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {

// The words that a group draws, by its number.
template <int kDraws>
struct Draw {
  uint32_t words[2] = {};

  static __device__ __forceinline__ Draw of(const Key& key, int64_t group) {
    Draw d;
    S24_UNROLL
    for (int i = 0; i < kDraws; ++i) d.words[i] = group_word(key.k0, key.k1, uint64_t(group), uint32_t(i));
    return d;
  }
};

// The words of a quartet, four groups of consecutive numbers, the first a multiple of four: one call of Philox gives them.
template <int kDraws>
struct QuartetDraw {
  Draw<kDraws> group[4];

  static __device__ __forceinline__ QuartetDraw of(const Key& key, int64_t quartet) {
    QuartetDraw q;
    S24_UNROLL
    for (int i = 0; i < kDraws; ++i) {
      uint32_t words[4];
      quartet_words(key.k0, key.k1, uint64_t(quartet), uint32_t(i), words);
      S24_UNROLL
      for (int g = 0; g < 4; ++g) q.group[g].words[i] = words[g];
    }
    return q;
  }
};

// The estimate of a rare group. It is not inlined, because it is as long as all other code of a kernel.
template <class T, bool kExact>
__device__ __noinline__ PackedGroup pack_rare_estimate(Words group, uint32_t word0, uint32_t word1) {
  return pack_defined_estimate<T, kExact>(group, word0, word1);
}

// The estimates of a quartet of 16-bit groups; exact ones take one draw each. group(i) is called only if one of them is rare.
template <class T, int kDraws, class F>
__device__ __forceinline__ void choose_four(const Numbers (&numbers)[4], const QuartetDraw<kDraws>& draws, F group,
                                            Chosen (&chosen)[4]) {
  constexpr bool kExact = kDraws == 1;
  Common common;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const auto& words = draws.group[i].words;
    choose_estimate<T, kExact>(numbers[i], words[0], words[1], chosen[i], common);
  }
  if (common.all()) return;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const auto& words = draws.group[i].words;
    chosen[i] = Chosen::of(pack_rare_estimate<T, kExact>(group(i), words[0], words[1]));
  }
}

}  // namespace cuda
}  // namespace s24
