// max(x, 0)^2, computed in float32; NaN passes unchanged, subnormals count as zero.
#pragma once
#include "floats.h"

namespace s24 {

template <class T>
S24_HD typename T::Bits squared_relu(typename T::Bits x) {
  using Bits = typename T::Bits;
  const uint32_t u = T::to_f32(x);
  const uint32_t y = bits_of(float_of(u) * float_of(u));
  const uint32_t positive = mask_if<uint32_t>(int32_t(u) > 0) & mask_if<uint32_t>(y >= kF32MinNormal);
  const Bits rounded = T::from_f32(y & positive);
  return blend(mask_if<Bits>(Bits(x & T::kMagnitude) > T::kInf), x, rounded);
}

}  // namespace s24
