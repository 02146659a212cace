// The gradient dY1 of the input of ReLU and squared ReLU, as their derivative in a dense block has it: dY2 where the input is
// positive, for squared ReLU times twice the input, and +0 elsewhere.
//
// What the forward pass saves is the result y2 of ReLU; the result of squared ReLU in bfloat16, from which its input follows; and
// otherwise the input y1. Twice the input is a number of the type, infinite where that overflows. The product is computed in
// float32, in which subnormals count as zero, with the sign of dY2, and rounded once. A NaN result of a product has all bits set
// but the sign.
#pragma once
#include "saved.h"

namespace s24 {

// Whether squared ReLU saves its result, and not its input.
template <class T>
constexpr bool kSavesResult = T::kMagnitude == BF16::kMagnitude && T::kInf == BF16::kInf;

// Mask: the input of the activation is positive. A NaN is not.
template <class T>
S24_HD typename T::Bits is_positive(typename T::Bits saved) {
  return mask_if<typename T::Bits>(float_of(T::to_f32(saved)) >= 0x1p-126f);
}

// Twice the input of squared ReLU where that is positive.
template <class T>
S24_HD float squared_slope(typename T::Bits saved) {
  float x = float_of(T::to_f32(saved));
  if constexpr (kSavesResult<T>) x = float_of(T::to_f32(T::from_f32(bits_of(__builtin_sqrtf(x)))));
  return float_of(T::to_f32(T::from_f32(bits_of(x + x))));
}

// dY1 of what was saved and dY2.
template <class T, Slope slope>
S24_HD typename T::Bits activation_gradient(typename T::Bits saved, typename T::Bits dy2) {
  using Bits = typename T::Bits;
  const Bits positive = is_positive<T>(saved);
  if constexpr (slope == Slope::kRelu) return Bits(dy2 & positive);
  const float made = squared_slope<T>(saved) * without_subnormals(float_of(T::to_f32(dy2)));
  const uint32_t size = bits_of(made) & kF32Magnitude;
  const Bits product = size > kF32Inf         ? T::kMagnitude
                       : size < kF32MinNormal ? Bits(dy2 & Bits(~T::kMagnitude))
                                              : T::from_f32_number(bits_of(made));
  return Bits(product & positive);
}

}  // namespace s24
