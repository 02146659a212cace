// max(x, 0)^2, computed in float32; NaN passes unchanged, subnormals count as zero.
#pragma once
#include "floats.h"

namespace s24 {

template <class T>
S24_HD typename T::Bits squared_relu(typename T::Bits x) {
  using Bits = typename T::Bits;
  const uint32_t u = T::to_f32(x);
  const float positive = float_of(u & mask_if<uint32_t>(int32_t(u) > 0));
  const uint32_t y = bits_of(positive * positive);
  const Bits rounded = T::from_f32_number(y & mask_if<uint32_t>(y >= kF32MinNormal));
  return blend(mask_if<Bits>(Bits(x & T::kMagnitude) > T::kInf), x, rounded);
}

}  // namespace s24
