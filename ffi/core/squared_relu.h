// max(x, 0)^2, computed in float32; NaN passes unchanged, subnormals count as zero.
#pragma once
#include "floats.h"

namespace s24 {

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
