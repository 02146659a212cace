// GPU version of the gradient of an activation (the same bits as core/slope.h), of two elements in a word.
#pragma once
#include "../../core/slope.h"

namespace s24 {

#if defined(__CUDA_ARCH__)
// The element in the high half of a word, whatever the low half is.
template <class T>
__device__ __forceinline__ float second_number(uint32_t word) {
  return T::kInf == BF16::kInf ? float_of(second_of(word)) : high_number<T>(word);
}

// Roots of two bfloat16, rounded to bfloat16. Roots of 8 bits are no nearer to the middle of two numbers of 8 bits than 2^-18 of
// themselves, so that an approximation to a few units of float32 will do.
template <class T>
__device__ __forceinline__ uint32_t rounded_roots(float low, float high) {
  float a, b;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(low));
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(high));
  return converted_pair<T>(a, b);
}

__device__ __forceinline__ float flushed_product(float a, float b) {
  float y;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
#endif

template <class T, Slope slope>
S24_HD uint32_t activation_gradients(uint32_t saved, uint32_t dy) {
#if defined(__CUDA_ARCH__)
  const float a = low_number<T>(saved), b = second_number<T>(saved);
  const bool first = a >= 0x1p-126f, second = b >= 0x1p-126f;
  if constexpr (slope == Slope::kRelu) return (first ? dy & 0xffffu : 0u) | (second ? dy & 0xffff0000u : 0u);
  float x = a, z = b;
  if constexpr (kSavesResult<T>) {
    const uint32_t roots = rounded_roots<T>(a, b);
    x = float_of(first_of(roots)), z = float_of(second_of(roots));
  }
  const float p = flushed_product(x, low_number<T>(dy)), q = flushed_product(z, second_number<T>(dy));
  return converted_pair<T>(first ? p + p : 0.0f, second ? q + q : 0.0f);
#else
  const auto one = [&](int shift) {
    return uint32_t(activation_gradient<T, slope>(uint16_t(saved >> shift), uint16_t(dy >> shift))) << shift;
  };
  return one(0) | one(16);
#endif
}

}  // namespace s24
