// GPU version of the gradient of an activation (the same bits as core/slope.h), of two elements in a word.
#pragma once
#include "../../core/slope.h"

namespace s24 {

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float approximate_root(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

__device__ __forceinline__ float flushed_product(float a, float b) {
  float y;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Roots of two bfloat16. Those of numbers of 8 bits are no nearer to the middle of two such numbers than 2^-18 of themselves, so
// that an approximation to a few units of float32 will do.
__device__ __forceinline__ uint32_t roots_of(uint32_t y2) {
  return converted_pair<BF16>(approximate_root(float_of(first_of(y2))), approximate_root(float_of(second_of(y2))));
}

// Two elements of dY1 of squared ReLU in bfloat16, of y2 and dY2.
__device__ __forceinline__ uint32_t gradients_of_squares(uint32_t y2, uint32_t dy2) {
  const float a = float_of(first_of(y2)), b = float_of(second_of(y2));
  const uint32_t roots = roots_of(y2);
  const float x = float_of(first_of(roots)), z = float_of(second_of(roots));
  const float p = flushed_product(x + x, float_of(first_of(dy2))), q = flushed_product(z + z, float_of(second_of(dy2)));
  return converted_pair<BF16>(a >= 0x1p-126f ? p : 0.0f, b >= 0x1p-126f ? q : 0.0f);
}

// Two float16, each times twice the other: the product is rounded by itself as it is in float32.
__device__ __forceinline__ uint32_t doubled_products(uint32_t x, uint32_t y) {
  uint32_t out;
  asm("{.reg .b32 t; add.rn.f16x2 t, %1, %1; mul.rn.f16x2 %0, t, %2;}" : "=r"(out) : "r"(x), "r"(y));
  return out;
}
#endif

// Two elements of dY1, of what was saved and dY2.
template <class T, Slope slope>
S24_HD uint32_t activation_gradients(uint32_t saved, uint32_t dy2) {
#if defined(__CUDA_ARCH__)
  constexpr bool kSquared = slope == Slope::kSquaredRelu;
  if constexpr (kSquared && kSavesResult<T>) return gradients_of_squares(saved, dy2);
  const uint32_t all = kSquared ? doubled_products(saved, dy2) : dy2;
  const float a = low_number<T>(saved), b = kSavesResult<T> ? float_of(second_of(saved)) : high_number<T>(saved);
  return (a >= 0x1p-126f ? all & 0xffffu : 0u) | (b >= 0x1p-126f ? all & 0xffff0000u : 0u);
#else
  const auto one = [&](int shift) {
    return uint32_t(activation_gradient<T, slope>(uint16_t(saved >> shift), uint16_t(dy2 >> shift))) << shift;
  };
  return one(0) | one(16);
#endif
}

}  // namespace s24
