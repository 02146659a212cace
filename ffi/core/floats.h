// The floating types as bit patterns, and their exact conversions from and to float32 (round to nearest even).
//
// All conversions are integer arithmetic, or float arithmetic that neither takes nor gives a subnormal, so they do not
// depend on the flush-to-zero mode of the thread. A NaN survives the way to float32 and back with its bits unchanged.
#pragma once
#include "base.h"

namespace s24 {

constexpr uint32_t kF32Magnitude = 0x7fffffffu;
constexpr uint32_t kF32Inf = 0x7f800000u;
constexpr uint32_t kF32MinNormal = 0x00800000u;

struct F32 {
  using Bits = uint32_t;
  static constexpr Bits kMagnitude = 0x7fffffffu;
  static constexpr Bits kInf = 0x7f800000u;
  static S24_HD uint32_t to_f32(Bits b) { return b; }
  static S24_HD Bits from_f32(uint32_t u) { return u; }
  static S24_HD Bits from_f32_number(uint32_t u) { return u; }
  static S24_HD Bits sign_of(uint32_t u) { return u & ~kF32Magnitude; }
};

struct BF16 {
  using Bits = uint16_t;
  static constexpr Bits kMagnitude = 0x7fffu;
  static constexpr Bits kInf = 0x7f80u;
  static S24_HD uint32_t to_f32(Bits b) { return uint32_t(b) << 16; }
  static S24_HD Bits sign_of(uint32_t u) { return Bits((u >> 16) & 0x8000u); }
  static S24_HD Bits from_f32_number(uint32_t u) { return Bits((u + 0x7fffu + ((u >> 16) & 1u)) >> 16); }
  static S24_HD Bits from_f32(uint32_t u) {
    // A NaN is truncated; the quiet bit is set only if nothing of its payload is left.
    const uint32_t nan = (u >> 16) | (mask_if<uint32_t>((u & 0x007f0000u) == 0) & 0x40u);
    return Bits(blend(mask_if<uint32_t>((u & kF32Magnitude) > kF32Inf), nan, from_f32_number(u)));
  }
};

struct F16 {
  using Bits = uint16_t;
  static constexpr Bits kMagnitude = 0x7fffu;
  static constexpr Bits kInf = 0x7c00u;
  static S24_HD uint32_t to_f32(Bits b) {
    const uint32_t a = uint32_t(b) & 0x7fffu;
    const uint32_t sign = (uint32_t(b) & 0x8000u) << 16;
    const uint32_t subnormal = bits_of(float(int32_t(a)) * 0x1p-24f);
    const uint32_t normal = (a << 13) + (112u << 23);
    const uint32_t special = (a << 13) | kF32Inf;
    const uint32_t finite = blend(mask_if<uint32_t>(a < 0x0400u), subnormal, normal);
    return sign | blend(mask_if<uint32_t>(a >= 0x7c00u), special, finite);
  }
  static S24_HD Bits sign_of(uint32_t u) { return Bits((u >> 16) & 0x8000u); }
  static S24_HD Bits from_f32_number(uint32_t u) {
    const uint32_t a = u & kF32Magnitude;
    const uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    // 0.5 has the ulp of the smallest half: the addition does the rounding.
    const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
    const uint32_t finite = blend(mask_if<uint32_t>(a < 0x38800000u), subnormal, normal);
    return Bits(sign_of(u) | blend(mask_if<uint32_t>(a >= 0x477ff000u), uint32_t(0x7c00u), finite));
  }
  static S24_HD Bits from_f32(uint32_t u) {
    const uint32_t a = u & kF32Magnitude;
    const uint32_t nan = 0x7c00u | ((a >> 13) & 0x3ffu) | (mask_if<uint32_t>((a & 0x007fe000u) == 0) & 0x200u);
    return Bits(blend(mask_if<uint32_t>(a > kF32Inf), sign_of(u) | nan, uint32_t(from_f32_number(u))));
  }
};

// first_of, second_of: the float32 bits of two bfloat16 in a word, of which the first is in the low half. round_two goes back,
// for numbers that are not NaN. No element crosses lanes, which makes them cheap in vector code.
S24_HD uint32_t first_of(uint32_t word) { return word << 16; }
S24_HD uint32_t second_of(uint32_t word) { return word & 0xffff0000u; }

S24_HD uint32_t round_two(uint32_t first, uint32_t second) {
  const uint32_t up = second + 0x7fffu + ((second >> 16) & 1u);
  return ((first + 0x7fffu + ((first >> 16) & 1u)) >> 16) | (up & 0xffff0000u);
}

// The float32 bits of |x|, with subnormals as zero. As integers they are ordered like |x|.
S24_HD uint32_t flushed_magnitude(uint32_t u) {
  const uint32_t a = u & kF32Magnitude;
  return a & mask_if<uint32_t>(a >= kF32MinNormal);
}

// A finite |x|, given as bits, times a power of two that depends on `top`, the largest of the magnitudes that are compared. It
// is ordered like |x|, and its sums can neither overflow nor vanish.
S24_HD float scaled_magnitude(uint32_t a, uint32_t top) {
  const uint32_t field = a >> 23;
  const uint32_t significand = (a & 0x007fffffu) | (mask_if<uint32_t>(field != 0) & kF32MinNormal);
  const int32_t p = int32_t(max_u32(field, 1u)) - int32_t(max_u32(top >> 23, 1u));
  const uint32_t power = uint32_t(p + 127) & mask_if<uint32_t>(p >= -126);
  return float(int32_t(significand)) * float_of(power << 23);
}

// T::from_f32 for a number that is not NaN, which is one instruction on a GPU. The result for a NaN must not be used.
template <class T>
S24_HD typename T::Bits round_number(uint32_t u) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(typename T::Bits) == 2) {
    uint16_t out;
    if constexpr (T::kInf == 0x7f80u)
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(float_of(u)));
    else
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(float_of(u)));
    return out;
  }
#endif
  return T::from_f32(u);
}

// Operations on numbers that are one instruction on a GPU.

S24_HD float lesser(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return a < b ? a : b;
#endif
}

S24_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

S24_HD float magnitude(float v) {
#if defined(__CUDA_ARCH__)
  return fabsf(v);
#else
  return float_of(bits_of(v) & kF32Magnitude);
#endif
}

// A subnormal number as zero.
S24_HD float without_subnormals(float v) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("mul.rn.ftz.f32 %0, %1, 0f3f800000;" : "=f"(y) : "f"(v));
  return y;
#else
  return float_of(flushed_magnitude(bits_of(v)) | (bits_of(v) & ~kF32Magnitude));
#endif
}

#if defined(__CUDA_ARCH__)
// Two numbers rounded to T in one word, `low` in its low half; a NaN becomes 0x7fff.
template <class T>
S24_HD uint32_t converted_pair(float low, float high) {
  uint32_t y;
  if constexpr (T::kInf == BF16::kInf)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
#endif

// The same, where a NaN becomes some NaN.
template <class T>
S24_HD uint32_t rounded_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  return converted_pair<T>(low, high);
#else
  return uint32_t(T::from_f32(bits_of(low))) | uint32_t(T::from_f32(bits_of(high))) << 16;
#endif
}

// The larger of |a| and |b|, NaN if one is NaN; subnormals are zero.
S24_HD float larger_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{.reg .f32 s, t; abs.f32 s, %1; abs.f32 t, %2; max.ftz.NaN.f32 %0, s, t;}" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return float_of(max_u32(flushed_magnitude(bits_of(a)), flushed_magnitude(bits_of(b))));
#endif
}

// The element in the low half of a word, as float32.
template <class T>
S24_HD float low_number(uint32_t word) {
  if constexpr (T::kInf == BF16::kInf) return float_of(first_of(word));
#if defined(__CUDA_ARCH__)
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(word));
  return y;
#else
  return float_of(T::to_f32(uint16_t(word)));
#endif
}

// The element in the high half of a word, as float32. If the low half is not finite, the result must not be used. A zero loses
// its sign.
template <class T>
S24_HD float high_number(uint32_t word) {
#if defined(__CUDA_ARCH__)
  if constexpr (T::kInf == BF16::kInf) {
    uint32_t y;  // multiplied by 1 and 0, because a GPU does bit operations at half the rate
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(word), "r"(0x3f800000u), "r"(0u));
    return float_of(y);
  }
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(word));
  return y;
#else
  return float_of(T::to_f32(uint16_t(word >> 16)));
#endif
}

}  // namespace s24
