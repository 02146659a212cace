// S-STE's soft threshold (Hu et al. 2024, arXiv:2409.09099): |x| minus the second smallest magnitude of the group.
#pragma once
#include "arguments.h"
#include "floats.h"

namespace s24 {

// At most two results differ from zero. Returns a mask that says whether every entry is finite; else y must not be used.
template <class T>
S24_HD uint32_t soft24_finite(const typename T::Bits x[4], typename T::Bits y[4]) {
  using Bits = typename T::Bits;
  uint32_t sign[4], a[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t u = T::to_f32(x[i]);
    sign[i] = u & ~kF32Magnitude;
    a[i] = flushed_magnitude(u);
  }
  const uint32_t high = max_u32(a[0], a[1]), other_high = max_u32(a[2], a[3]);
  const uint32_t t = min_u32(max_u32(min_u32(a[0], a[1]), min_u32(a[2], a[3])), min_u32(high, other_high));
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t r = bits_of(float_of(a[i]) - float_of(t));
    const Bits rounded = T::from_f32_number(r & mask_if<uint32_t>(int32_t(r) >= int32_t(kF32MinNormal)));
    y[i] = Bits((rounded | T::sign_of(sign[i])) & mask_if<Bits>(rounded != 0));
  }
  return mask_if<uint32_t>(max_u32(high, other_high) < kF32Inf);
}

// The next functions do the same for bfloat16 in three steps: magnitudes, their threshold and their largest; the differences
// of two elements in a word; and the result.
S24_HD int16_t soft24_threshold(const uint16_t x[4], uint16_t a[4], uint16_t& t) {
  int16_t m[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    m[i] = int16_t(x[i] & BF16::kMagnitude);
    m[i] = int16_t(m[i] & mask_if<uint16_t>(m[i] >= int16_t(kF32MinNormal >> 16)));
    a[i] = uint16_t(m[i]);
  }
  const int16_t low = m[0] < m[1] ? m[0] : m[1], high = m[0] < m[1] ? m[1] : m[0];
  const int16_t other_low = m[2] < m[3] ? m[2] : m[3], other_high = m[2] < m[3] ? m[3] : m[2];
  const int16_t least_high = high < other_high ? high : other_high, most_low = low < other_low ? other_low : low;
  t = uint16_t(most_low < least_high ? most_low : least_high);
  return high < other_high ? other_high : high;
}

S24_HD uint32_t subtract_two(uint32_t a, uint32_t t) {
  return round_two(bits_of(float_of(first_of(a)) - float_of(first_of(t))),
                   bits_of(float_of(second_of(a)) - float_of(second_of(t))));
}

S24_HD uint16_t soft24_result(uint16_t x, uint16_t difference) {
  const uint16_t normal = mask_if<uint16_t>(int16_t(difference) >= int16_t(kF32MinNormal >> 16));
  return uint16_t((difference | (x & uint16_t(~BF16::kMagnitude))) & normal);
}

// The soft threshold of any group. In a group with NaN only the first two NaN pass, with their bits; if the threshold is
// infinite, the first two infinities pass.
template <class T>
S24_HD void soft24(const typename T::Bits x[4], typename T::Bits y[4]) {
  using Bits = typename T::Bits;
  uint32_t a[4], passes[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = T::to_f32(x[i]) & kF32Magnitude;
  const uint32_t high = max_u32(a[0], a[1]), other_high = max_u32(a[2], a[3]);
  const uint32_t t = min_u32(max_u32(min_u32(a[0], a[1]), min_u32(a[2], a[3])), min_u32(high, other_high));
  const uint32_t has_nan = mask_if<uint32_t>(max_u32(high, other_high) > kF32Inf);
  const uint32_t special = has_nan | mask_if<uint32_t>(t >= kF32Inf);
  const uint32_t floor = kF32Inf - has_nan;  // what passes in a special group: NaN alone if there is one
  S24_UNROLL
  for (int i = 0; i < 4; ++i) passes[i] = mask_if<uint32_t>(a[i] >= floor);
  passes[3] &= ~majority(passes[0], passes[1], passes[2]);
  passes[2] &= ~(passes[0] & passes[1]);
  soft24_finite<T>(x, y);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) y[i] = blend(Bits(special), Bits(x[i] & Bits(passes[i])), y[i]);
}

// A result times a scale, as float32. Subnormals count as zero, with their sign. A NaN is some NaN.
S24_HD uint32_t scaled_number(uint32_t y, float scale) {
  const uint32_t made = bits_of(float_of(y) * scale);
  return made & (~kF32Magnitude | mask_if<uint32_t>((made & kF32Magnitude) >= kF32MinNormal));
}

template <class T>
S24_HD float scale_of(const void* scale) {
  return without_subnormals(float_of(T::to_f32(*static_cast<const typename T::Bits*>(scale))));
}

// A result times what scale_of gives, rounded once. A NaN passes with its bits; another NaN has all bits set but the sign.
template <class T>
S24_HD typename T::Bits scaled(typename T::Bits y, float scale) {
  using Bits = typename T::Bits;
  const uint32_t made = scaled_number(T::to_f32(y), scale);
  const Bits nan = blend(mask_if<Bits>(Bits(y & T::kMagnitude) > T::kInf), y, T::kMagnitude);
  return blend(mask_if<Bits>((made & kF32Magnitude) > kF32Inf), nan, T::from_f32_number(made));
}

// kSoft.
struct SoftArgs : GroupwiseArgs {};

}  // namespace s24
