// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
#pragma once
#include "base.h"

namespace s24 {

// 64 bits, or a vector of them; what stands above the low 32 bits of a factor does not count.
template <class W>
struct Wide {
  static S24_HD W product(W a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    W out;  // of the product in C++ nvcc makes one more addition, of zero
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(out) : "r"(uint32_t(a)), "r"(b));
    return out;
#else
    return W(uint32_t(a)) * b;
#endif
  }
};

// The ten rounds, in place; the results are the low 32 bits.
template <class W>
S24_HD void philox_rounds(uint32_t k0, uint32_t k1, W c[4]) {
  S24_UNROLL
  for (int round = 0; round < 10; ++round) {
    const W p0 = Wide<W>::product(c[0], 0xD2511F53u), p1 = Wide<W>::product(c[2], 0xCD9E8D57u);
    c[0] = (p1 >> 32) ^ c[1] ^ k0;
    c[1] = p1;
    c[2] = (p0 >> 32) ^ c[3] ^ k1;
    c[3] = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

S24_HD void philox4x32(uint32_t k0, uint32_t k1, const uint32_t counter[4], uint32_t out[4]) {
  uint64_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
  philox_rounds(k0, k1, c);
  for (int i = 0; i < 4; ++i) out[i] = uint32_t(c[i]);
}

// 23 random bits as a float in [0, 1).
S24_HD float uniform(uint32_t word) { return float(int32_t(word >> 9)) * 0x1p-23f; }

// The counter of the groups 4 * quartet to 4 * quartet + 3, which take one word each, when they draw their first (0) or
// second (1) number. W: 64 bits, or a vector of them.
template <class W>
S24_HD void quartet_counter(W quartet, uint32_t draw, W c[4]) {
  c[0] = quartet;
  c[1] = quartet >> 32;
  c[2] = (quartet ^ quartet) + draw;
  c[3] = quartet ^ quartet;
}

// The words of a quartet.
S24_HD void quartet_words(uint32_t k0, uint32_t k1, uint64_t quartet, uint32_t draw, uint32_t words[4]) {
  uint64_t c[4];
  quartet_counter(quartet, draw, c);
  philox_rounds(k0, k1, c);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = uint32_t(c[i]);
}

// The word of one group.
S24_HD uint32_t group_word(uint32_t k0, uint32_t k1, uint64_t group, uint32_t draw) {
  uint32_t c[4];
  quartet_words(k0, k1, group / 4, draw, c);
  const uint32_t low = group % 2 == 0 ? c[0] : c[1], high = group % 2 == 0 ? c[2] : c[3];
  return group % 4 < 2 ? low : high;
}

}  // namespace s24
