// max(x, 0)^2, computed in float32; NaN passes unchanged, subnormals count as zero.
#pragma once
#include "floats.h"

namespace s24 {

template <class T>
S24_HD typename T::Bits squared_relu(typename T::Bits x) {
  const uint32_t u = T::to_f32(x);
  const float y = float_of(u) * float_of(u);
  const bool positive = (u >= kF32MinNormal) & (u <= kF32Inf) & (y >= 0x1p-126f);
  const typename T::Bits rounded = T::from_f32(positive ? bits_of(y) : 0u);
  return typename T::Bits(x & T::kMagnitude) > T::kInf ? x : rounded;
}

}  // namespace s24
