// The unbiased estimate of kLanes groups. The random words come first: their 64-bit products would keep the rest from
// becoming vector code.
#pragma once
#include "../core/mvue.h"
#include "lanes.h"

namespace s24 {
namespace S24_ISA {

// first is the group index of lane 0.
template <class T, bool kExact>
S24_HD void mvue_lanes(Key key, int64_t first, const Quad<typename T::Bits>& in, Quad<typename T::Bits>& out) {
  uint32_t w0[kLanes], w1[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    uint32_t words[4];
    group_words(key.k0, key.k1, uint64_t(first) + uint64_t(l), words);
    w0[l] = words[0];
    w1[l] = words[1];
  }
  for (int l = 0; l < kLanes; ++l) {
    const typename T::Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
    typename T::Bits y[4];
    mvue24<T, kExact>(x, w0[l], w1[l], y);
    for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
  }
}

}  // namespace S24_ISA
}  // namespace s24
