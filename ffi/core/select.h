// Two of four by magnitude: ties go to the lower index, NaN outranks everything, exactly two are kept.
#pragma once
#include "floats.h"

namespace s24 {

// An unsigned integer that orders like |x|, all NaN equal and above infinity. The top bit is always free.
template <class T>
S24_HD typename T::Bits magnitude_key(typename T::Bits x) {
  using Bits = typename T::Bits;
  const Bits a = Bits(x & T::kMagnitude);
  return blend(mask_if<Bits>(a > T::kInf), Bits(T::kMagnitude), a);
}

// keep[i]: a mask, all ones for the two largest keys.
template <class K>
S24_HD void keep_two(const K k[4], K keep[4]) {
  // bIJ: I comes before J.
  const K b01 = mask_if<K>(k[0] >= k[1]), b02 = mask_if<K>(k[0] >= k[2]), b03 = mask_if<K>(k[0] >= k[3]);
  const K b12 = mask_if<K>(k[1] >= k[2]), b13 = mask_if<K>(k[1] >= k[3]), b23 = mask_if<K>(k[2] >= k[3]);
  keep[0] = majority(b01, b02, b03);
  keep[1] = majority(K(~b01), b12, b13);
  keep[2] = majority(K(~b02), K(~b12), b23);
  keep[3] = K(~majority(b03, b13, b23));
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
    key[i] = Bits(magnitude_key<T>(x[i]) | (allowed & Bits(T::kMagnitude + 1)));
    x[i] = Bits(x[i] & allowed);
  }
  keep_two(key, keep);
}

}  // namespace s24
