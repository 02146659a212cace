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

// Two elements of dY1 of squared ReLU in bfloat16, of y2 and dY2. Roots of numbers of 8 bits are no nearer to the middle of two
// such numbers than 2^-18 of themselves, so that an approximation to a few units of float32 will do.
__device__ __forceinline__ uint32_t gradients_of_squares(uint32_t y2, uint32_t dy2) {
  const float a = float_of(first_of(y2)), b = float_of(second_of(y2));
  const uint32_t roots = converted_pair<BF16>(approximate_root(a), approximate_root(b));
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

// The slopes of squared ReLU in bfloat16 at two y2: twice their roots. Where y2 is not positive, nor is the slope.
S24_HD uint32_t slopes_of_squares(uint32_t y2) {
#if defined(__CUDA_ARCH__)
  uint32_t roots =
      converted_pair<BF16>(approximate_root(float_of(first_of(y2))), approximate_root(float_of(second_of(y2))));
  asm("add.rn.bf16x2 %0, %0, %0;" : "+r"(roots));
  return roots;
#else
  const auto one = [&](int shift) {
    const uint16_t y = uint16_t(y2 >> shift);
    return uint32_t(BF16::from_f32(bits_of(squared_slope<BF16>(y))) & is_positive<BF16>(y)) << shift;
  };
  return one(0) | one(16);
#endif
}

// Two elements of dY1, of such slopes and of dY2 with which no product is subnormal: it is rounded by itself as it is in float32.
S24_HD uint32_t normal_gradients(uint32_t slopes, uint32_t dy2) {
#if defined(__CUDA_ARCH__)
  uint32_t products, positive;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(slopes), "r"(dy2));
  asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(positive) : "r"(slopes), "r"(0x00800080u));
  return products & positive;
#else
  const auto one = [&](int shift) {
    const uint16_t slope = uint16_t(slopes >> shift);
    const uint16_t made = slope_times<BF16>(float_of(BF16::to_f32(slope)), uint16_t(dy2 >> shift));
    return uint32_t(made & is_positive<BF16>(slope)) << shift;
  };
  return one(0) | one(16);
#endif
}

// Of two bfloat16 each the smaller magnitude, with any sign, and a number rather than a NaN.
S24_HD uint32_t smaller_magnitudes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  asm("min.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
#else
  const auto smaller = [](uint32_t x, uint32_t y) { return x < y ? x : y; };
  a &= 0x7fff7fffu, b &= 0x7fff7fffu;
  return smaller(a & 0xffffu, b & 0xffffu) | smaller(a >> 16, b >> 16) << 16;
#endif
}

}  // namespace s24
