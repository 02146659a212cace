// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
#pragma once
#include "base.h"

namespace s24 {

S24_HD void philox4x32(uint32_t k0, uint32_t k1, const uint32_t counter[4], uint32_t out[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  S24_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0;
    const uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// 23 random bits as a float in [0, 1).
S24_HD float uniform(uint32_t word) { return float(int32_t(word >> 9)) * 0x1p-23f; }

// The random words of one group: the counter is the group's index.
S24_HD void group_words(uint32_t k0, uint32_t k1, uint64_t group, uint32_t words[4]) {
  const uint32_t counter[4] = {uint32_t(group), uint32_t(group >> 32), 0u, 0u};
  philox4x32(k0, k1, counter, words);
}

}  // namespace s24
