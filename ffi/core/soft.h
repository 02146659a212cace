// S-STE's soft threshold (Hu et al. 2024, arXiv:2409.09099): |x| minus the second smallest magnitude of the group.
#pragma once
#include "floats.h"

namespace s24 {

// At most two results differ from zero. In a group with NaN the first two NaN pass with their bits and nothing else;
// if the threshold itself is infinite, the first two infinities pass.
template <class T>
S24_HD void soft24(const typename T::Bits x[4], typename T::Bits y[4]) {
  uint32_t sign[4], a[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t u = T::to_f32(x[i]);
    sign[i] = u & ~kF32Magnitude;
    a[i] = flushed_magnitude(u);
  }
  const uint32_t t = min_u32(max_u32(min_u32(a[0], a[1]), min_u32(a[2], a[3])),
                             min_u32(max_u32(a[0], a[1]), max_u32(a[2], a[3])));
  const uint32_t largest = max_u32(max_u32(a[0], a[1]), max_u32(a[2], a[3]));
  const bool has_nan = largest > kF32Inf;
  const bool special = has_nan | (t >= kF32Inf);
  const uint32_t floor = has_nan ? kF32Inf + 1 : kF32Inf;  // in a special group: what passes
  uint32_t passed = 0;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t qualifies = a[i] >= floor ? 1u : 0u;
    const uint32_t passes = qualifies & (passed < 2u ? 1u : 0u);
    passed += passes;
    const float r = float_of(a[i]) - float_of(t);
    const uint32_t magnitude = (a[i] > t) & (r >= 0x1p-126f) ? bits_of(r) : 0u;
    const typename T::Bits usual = round_positive_zero<T>(magnitude == 0 ? 0u : (sign[i] | magnitude));
    y[i] = special ? (passes ? x[i] : typename T::Bits(0)) : usual;
  }
}

}  // namespace s24
