// max(x, 0)^2, computed in float32; NaN passes unchanged, subnormals count as zero.
#pragma once
#include "floats.h"

namespace s24 {

// The squared ReLU in two steps, for T = F32 and BF16 and groups without NaN. squarable gives x if it is positive and its
// square is normal, else +0; then that is squared.
template <class T>
S24_HD typename T::Bits squarable(typename T::Bits x) {
  using Bits = typename T::Bits;
  constexpr Bits kLeast = T::kInf / 255 * (127 - 63);  // 2^-63
  return Bits(x & mask_if<Bits>(Signed<Bits>(x) >= Signed<Bits>(kLeast)));
}

// Below this number, squares are finite, and squares of different numbers differ after rounding: from one x to the next, x^2
// changes by more than the distance of two neighbouring floats.
template <class T>
constexpr typename T::Bits kSquareOverflows = T::kInf / 255 * (127 + 64);  // 2^64

S24_HD uint32_t square(uint32_t x) { return bits_of(float_of(x) * float_of(x)); }

template <class T>
S24_HD typename T::Bits squared_relu(typename T::Bits x) {
  using Bits = typename T::Bits;
  constexpr int32_t kLeast = (127 - 63) << 23;  // 2^-63: the square of a smaller number is subnormal
  const uint32_t u = T::to_f32(x);
  const float large = float_of(u & mask_if<uint32_t>(int32_t(u) >= kLeast));
  const Bits rounded = T::from_f32_number(bits_of(large * large));
  return blend(mask_if<Bits>(Bits(x & T::kMagnitude) > T::kInf), x, rounded);
}

}  // namespace s24
