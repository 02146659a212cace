// The gradient of squared ReLU in bfloat16 in fewer instructions than simt/slope.h has, with those of Hopper: the same bits where
// no product with a slope is subnormal.
#pragma once
#include "../simt/select.h"
#include "../simt/slope.h"

namespace s24 {

// f of the first element of each word, and of the second one of each.
template <class F, class... W>
S24_HD uint32_t of_halves(F f, W... words) {
  return uint32_t(f(uint16_t(words)...)) | uint32_t(f(uint16_t(words >> 16)...)) << 16;
}

// The slopes at two y2: twice their roots. Where y2 is not positive, nor is the slope.
S24_HD uint32_t slopes_of_squares(uint32_t y2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t slopes = roots_of(y2);
  asm("add.rn.bf16x2 %0, %0, %0;" : "+r"(slopes));
  return slopes;
#else
  return of_halves(
      [](uint16_t y) { return uint16_t(BF16::from_f32(bits_of(squared_slope<BF16>(y))) & is_positive<BF16>(y)); }, y2);
#endif
}

// Two elements of dY1, of such slopes and of dY2 with which no product is subnormal: it is rounded by itself as it is in float32.
S24_HD uint32_t normal_gradients(uint32_t slopes, uint32_t dy2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t products;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(slopes), "r"(dy2));
  return products & at_least<BF16>(slopes, 0x00800080u);  // set.ge, which is false of NaN
#else
  return of_halves(
      [](uint16_t slope, uint16_t dy2) {
        const float product = float_of(BF16::to_f32(slope)) * float_of(BF16::to_f32(dy2));  // with subnormals, as there
        const bool is_nan = (bits_of(product) & kF32Magnitude) > kF32Inf;
        return uint16_t((is_nan ? BF16::kMagnitude : BF16::from_f32(bits_of(product))) & is_positive<BF16>(slope));
      },
      slopes, dy2);
#endif
}

// Of two bfloat16 each the smaller magnitude, with any sign, and a number rather than a NaN.
S24_HD uint32_t smaller_magnitudes(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("min.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
#else
  return of_halves([](uint16_t x, uint16_t y) { return x < y ? x : y; }, a & 0x7fff7fffu, b & 0x7fff7fffu);
#endif
}

// A y2 below 2^-126 counts as zero, so that a slope is 2^-62 or more, and with dY2 from 2^-63 on no product is subnormal; nor is
// one with a zero.
constexpr uint32_t kSmall = 0x2000u;  // 2^-63 in bfloat16

// Bits that are set for each of two elements of dY2 that is smaller than that and not zero.
S24_HD uint32_t small_numbers(uint32_t dy2) {
  const uint32_t magnitudes = dy2 & 0x7fff7fffu, smallest = (0x8000u - kSmall) * 0x10001u;
  return (magnitudes + 0x7fff7fffu) & ~(magnitudes + smallest) & 0x80008000u;
}

// Whether one of two elements is smaller, or zero.
S24_HD bool small_or_zero(uint32_t dy2) { return (dy2 & 0x7fffu) < kSmall || (dy2 >> 16 & 0x7fffu) < kSmall; }

}  // namespace s24
