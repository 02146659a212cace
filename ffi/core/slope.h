// The gradient dY1 of the input of ReLU and squared ReLU, as their derivative in a dense block has it: dY2 where the input is
// positive, for squared ReLU times twice the input, and +0 elsewhere.
//
// What the forward pass saves is the result y2 of ReLU; the result of squared ReLU in bfloat16, from which its input follows; and
// otherwise the input y1. The product is computed in float32 and rounded once. Subnormals of float32 count as zero, and so do
// products below 2^-125, whose halves are subnormal: they become zeros with the sign of dY2. A NaN result of a product has all
// bits set but the sign.
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

// The input of squared ReLU where it is positive.
template <class T>
S24_HD float squared_input(typename T::Bits saved) {
  const float y = float_of(T::to_f32(saved));
  if constexpr (kSavesResult<T>) return float_of(T::to_f32(T::from_f32(bits_of(__builtin_sqrtf(y)))));
  return y;
}

// dY1 of what was saved and dY2.
template <class T, Slope slope>
S24_HD typename T::Bits activation_gradient(typename T::Bits saved, typename T::Bits dy) {
  using Bits = typename T::Bits;
  const Bits positive = is_positive<T>(saved);
  if constexpr (slope == Slope::kRelu) return Bits(dy & positive);
  const float half = squared_input<T>(saved) * without_subnormals(float_of(T::to_f32(dy)));
  const uint32_t made = bits_of(half + half);
  const Bits product = (made & kF32Magnitude) > kF32Inf   ? T::kMagnitude
                       : magnitude(half) < 0x1p-126f ? Bits(dy & Bits(~T::kMagnitude))
                                                     : T::from_f32_number(made);
  return Bits(product & positive);
}

}  // namespace s24
