// Two of four by magnitude: ties go to the lower index, NaN outranks everything, exactly two are kept.
#pragma once
#include "floats.h"

namespace s24 {

// An unsigned integer that orders like |x|, all NaN equal and above infinity. The top bit is always free.
template <class T>
S24_HD typename T::Bits magnitude_key(typename T::Bits x) {
  const typename T::Bits a = x & T::kMagnitude;
  return a > T::kInf ? T::kMagnitude : a;
}

// keep[i] is 1 for the two largest keys and 0 for the others.
template <class K>
S24_HD void keep_two(const K k[4], K keep[4]) {
  const K b01 = k[0] >= k[1], b02 = k[0] >= k[2], b03 = k[0] >= k[3];
  const K b12 = k[1] >= k[2], b13 = k[1] >= k[3], b23 = k[2] >= k[3];
  keep[0] = K(b01 + b02 + b03) >= K(2);
  keep[1] = K(b12 + b13) > b01;
  keep[2] = K(b02 + b12) <= b23;
  keep[3] = K(b03 + b13 + b23) <= K(1);
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
  for (int i = 0; i < 4; ++i) y[i] = keep[i] ? x[i] : typename T::Bits(0);
}

// Two of four where masked entries (mask[i] != 0) outrank all others; a kept unmasked entry becomes +0 in x.
template <class T>
S24_HD void keep24_masked(typename T::Bits x[4], const uint8_t mask[4], typename T::Bits keep[4]) {
  typename T::Bits key[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const typename T::Bits first = mask[i] ? typename T::Bits(T::kMagnitude + 1) : typename T::Bits(0);
    key[i] = magnitude_key<T>(x[i]) | first;
    x[i] = mask[i] ? x[i] : typename T::Bits(0);
  }
  keep_two(key, keep);
}

}  // namespace s24
