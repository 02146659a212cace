// Two of four by magnitude: ties go to the lower index, NaN outranks everything, exactly two are kept.
#pragma once
#include "arguments.h"
#include "floats.h"

namespace s24 {

// An unsigned integer that orders like |x|, all NaN equal and above infinity. The top bit is always free.
template <class T>
S24_HD typename T::Bits magnitude_key(typename T::Bits x) {
  using Bits = typename T::Bits;
  const Signed<Bits> a = Signed<Bits>(x & T::kMagnitude), nan = Signed<Bits>(T::kInf + 1);
  return Bits(a < nan ? a : nan);
}

// keep[i]: a mask, all ones for the two largest keys, which are ordered as signed numbers: not every instruction set has
// the unsigned order.
template <class K>
S24_HD void keep_two(const K key[4], K keep[4]) {
  using S = Signed<K>;
  const S k[4] = {S(key[0]), S(key[1]), S(key[2]), S(key[3])};
  const K a = mask_if<K>(k[0] >= k[1]), b = mask_if<K>(k[2] >= k[3]);
  const S high_a = k[0] > k[1] ? k[0] : k[1], low_a = k[0] > k[1] ? k[1] : k[0];
  const S high_b = k[2] > k[3] ? k[2] : k[3], low_b = k[2] > k[3] ? k[3] : k[2];
  // Both of one half, or the first in rank of each.
  const K both_a = mask_if<K>(low_a >= high_b), both_b = mask_if<K>(low_b > high_a);
  keep[0] = K(both_a | (a & ~both_b));
  keep[1] = K(both_a | ~(a | both_b));
  keep[2] = K(both_b | (b & ~both_a));
  keep[3] = K(both_b | ~(b | both_a));
}

template <class T>
S24_HD void keep24(const typename T::Bits x[4], typename T::Bits keep[4]) {
  typename T::Bits key[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) key[i] = magnitude_key<T>(x[i]);
  keep_two(key, keep);
}

// Kept elements with their bits, +0 elsewhere.
template <class T>
S24_HD void prune24(const typename T::Bits x[4], typename T::Bits y[4]) {
  typename T::Bits keep[4];
  keep24<T>(x, keep);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) y[i] = typename T::Bits(x[i] & keep[i]);
}

// Two of four where masked entries (mask[i] != 0) outrank all others; a kept unmasked entry becomes +0 in x.
template <class T>
S24_HD void keep24_masked(typename T::Bits x[4], const typename T::Bits mask[4], typename T::Bits keep[4]) {
  using Bits = typename T::Bits;
  Bits key[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Bits allowed = mask_if<Bits>(mask[i] != 0);
    key[i] = Bits(magnitude_key<T>(x[i]) | (~allowed & Bits(T::kMagnitude + 1)));
    x[i] = Bits(x[i] & allowed);
  }
  keep_two(key, keep);
}

// kMask, kPrune.
struct SelectArgs : GroupwiseArgs {};

}  // namespace s24
