// GPU version of soft24 (the same bits as core/soft.h) for two groups of 16-bit floats at once, one in each half of four
// words: a GPU takes the least, the largest or the difference of both halves in one instruction.
//
// It reports the rare groups for which it may differ from the definition. These are groups with an element that is not finite
// and, in bfloat16, groups with a threshold below 2^-118: their elements or differences may be subnormal, which count as zero,
// while above that threshold different numbers differ by at least 2^-125. Differences are rounded once here; the definition
// rounds them to float32 first. Where that is not exact, the threshold is below 2^-13 of the element, and both forms give the
// element.
#pragma once
#include "../../core/soft.h"
#include "select.h"

namespace s24 {

// max(a - t, 0) in each half of a word, with the signs of x; zeros are +0.
template <class T>
S24_HD uint32_t above_threshold(uint32_t a, uint32_t t, uint32_t x) {
#if defined(__CUDA_ARCH__)
  uint32_t y;
  if constexpr (T::kInf == BF16::kInf) {
    constexpr uint32_t kOnes = 0x3f803f80u;
    asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(t), "r"(kOnes | kSignsOfTwo), "r"(a));
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(y) : "r"((x & kSignsOfTwo) | kOnes), "r"(0u));
  } else {
    constexpr uint32_t kOnes = 0x3c003c00u;
    asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(t), "r"(kOnes | kSignsOfTwo), "r"(a));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(y) : "r"((x & kSignsOfTwo) | kOnes), "r"(0u));
  }
  return y;
#else
  uint32_t y = 0;
  for (int i = 0; i < 32; i += 16) {
    const float d = float_of(T::to_f32(uint16_t(a >> i))) - float_of(T::to_f32(uint16_t(t >> i)));
    if (d > 0) y |= (T::from_f32_number(bits_of(d)) | (x >> i & 0x8000u)) << i;
  }
  return y;
#endif
}

// x[i] holds element i of both groups. Returns false for rare groups, whose y must not be used.
template <class T>
S24_HD bool soft24_two(const uint32_t x[4], uint32_t y[4]) {
  uint32_t a[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = x[i] & ~kSignsOfTwo;
  const uint32_t high = max_halves(a[0], a[1]), other_high = max_halves(a[2], a[3]);
  const uint32_t low = max_halves(min_halves(a[0], a[1]), min_halves(a[2], a[3]));
  const uint32_t t = min_halves(low, min_halves(high, other_high));
  S24_UNROLL
  for (int i = 0; i < 4; ++i) y[i] = above_threshold<T>(a[i], t, x[i]);
  // A sign stays set where no half borrows from it.
  constexpr uint32_t kTwo = 0x00010001u;
  const uint32_t finite = ((T::kInf - 1u) * kTwo | kSignsOfTwo) - max_halves(high, other_high);
  const uint32_t normal = T::kInf == BF16::kInf ? (t | kSignsOfTwo) - 0x0480u * kTwo : kSignsOfTwo;
  return (finite & normal & kSignsOfTwo) == kSignsOfTwo;
}

// Two results in a word, none of which is NaN, times a scale. The product of two 16-bit floats is exact in float32 unless it is
// subnormal, which counts as zero.
template <class T>
S24_HD uint32_t scaled_two(uint32_t y, float scale) {
#if defined(__CUDA_ARCH__)
  float a = low_number<T>(y), b;
  if constexpr (T::kInf == BF16::kInf)
    b = float_of(second_of(y));
  else
    b = high_number<T>(y);
  asm("mul.rn.ftz.f32 %0, %0, %1;" : "+f"(a) : "f"(scale));
  asm("mul.rn.ftz.f32 %0, %0, %1;" : "+f"(b) : "f"(scale));
  return converted_pair<T>(a, b);
#else
  return uint32_t(scaled<T>(uint16_t(y), scale)) | uint32_t(scaled<T>(uint16_t(y >> 16), scale)) << 16;
#endif
}

// Packs a group of 16-bit floats after the threshold, times a scale.
template <class T>
S24_RARE PackedGroup pack_soft_by_definition(Words x, float scale) {
  uint16_t group[4], y[4];
  for (uint32_t i = 0; i < 4; ++i) group[i] = uint16_t(element(x, i));
  soft24<T>(group, y);
  PackedGroup kept = pack_largest<T>(words_of(y));
  kept.bits = uint32_t(scaled<T>(uint16_t(kept.bits), scale)) | uint32_t(scaled<T>(uint16_t(kept.bits >> 16), scale)) << 16;
  return kept;
}

template <class T>
S24_HD PackedGroup pack_soft(Words x, float scale) {
  // Both halves of a word hold the same element.
  const uint32_t both[4] = {select_bytes(x.low, 0, 0x1010u), select_bytes(x.low, 0, 0x3232u), select_bytes(x.high, 0, 0x1010u),
                            select_bytes(x.high, 0, 0x3232u)};
  uint32_t y[4];
  if (!soft24_two<T>(both, y)) return pack_soft_by_definition<T>(x, scale);
  const Words made = {select_bytes(y[0], y[1], 0x5410u), select_bytes(y[2], y[3], 0x5410u)};
  PackedGroup kept = two_largest(made).of(made);
  kept.bits = scaled_two<T>(kept.bits, scale);
  return kept;
}

}  // namespace s24
