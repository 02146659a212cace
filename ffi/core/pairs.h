// The two kept elements of a group of four 16-bit floats, as positions and bits.
//
// The decisions of select.h, squared_relu.h and mvue.h, which work on masks for vector units, written for processors that
// run each group by itself: fewer operations per group, and branches for what is rare. A group is two words, elements 0
// and 1 in the first, the lower one in the low half; a pair is one word.
#pragma once
#include "metadata.h"
#include "mvue.h"
#include "squared_relu.h"

namespace s24 {

struct Words {
  uint32_t low, high;
};

struct KeptPair {
  uint32_t nibble, bits;
};

// Bytes of (high, low), numbered from the lowest, that a selector's nibbles name.
S24_HD uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, selector);
#else
  const uint64_t all = uint64_t(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(all >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
#endif
}

// Elements `first` (low half) and `second` of a group.
S24_HD uint32_t take_two(Words x, uint32_t first, uint32_t second) {
  return select_bytes(x.low, x.high, first * 0x22u + second * 0x2200u + 0x1010u);
}

S24_HD uint32_t element(Words x, uint32_t i) { return select_bytes(x.low, x.high, i * 0x22u + 0x10u) & 0xffffu; }

S24_HD Words words_of(const uint16_t x[4]) {
  return {uint32_t(x[0]) | uint32_t(x[1]) << 16, uint32_t(x[2]) | uint32_t(x[3]) << 16};
}

// A nibble and what it takes.
S24_HD KeptPair take_nibble(Words x, uint32_t nibble) { return {nibble, take_two(x, nibble & 3u, nibble >> 2)}; }

// Keys that differ: the magnitude (all NaN equal), then the lower index.
template <class T>
S24_HD uint32_t distinct_key(uint32_t x, uint32_t i) {
  return min_u32(x & T::kMagnitude, uint32_t(T::kInf) + 1u) * 4u + (3u - i);
}

struct TopTwo {
  uint32_t largest, second;  // keys
  // Larger keys of the low bits are lower indices.
  S24_HD uint32_t nibble() const {
    const uint32_t a = largest & 3u, b = second & 3u;
    return 15u ^ (max_u32(a, b) | min_u32(a, b) << 2);
  }
};

S24_HD TopTwo top_two(const uint32_t k[4]) {
  const uint32_t high01 = max_u32(k[0], k[1]), low01 = min_u32(k[0], k[1]);
  const uint32_t high23 = max_u32(k[2], k[3]), low23 = min_u32(k[2], k[3]);
  return {max_u32(high01, high23), max_u32(min_u32(high01, high23), max_u32(low01, low23))};
}

template <class T>
S24_HD TopTwo top_two_of(Words x) {
  const uint32_t k[4] = {distinct_key<T>(x.low, 0), distinct_key<T>(x.low >> 16, 1), distinct_key<T>(x.high, 2),
                         distinct_key<T>(x.high >> 16, 3)};
  return top_two(k);
}

template <class T>
S24_HD KeptPair keep_largest(Words x) {
  return take_nibble(x, top_two_of<T>(x).nibble());
}

// mask: four bytes, 0 or 1. As keep24_masked.
template <class T>
S24_HD KeptPair keep_masked(Words x, uint32_t mask) {
  constexpr uint32_t kAllowed = 1u << 17;
  uint32_t k[4] = {distinct_key<T>(x.low, 0), distinct_key<T>(x.low >> 16, 1), distinct_key<T>(x.high, 2),
                   distinct_key<T>(x.high >> 16, 3)};
  S24_UNROLL
  for (int i = 0; i < 4; ++i) k[i] += (mask >> (8 * i) & 1u) * kAllowed;
  const TopTwo top = top_two(k);
  KeptPair kept = take_nibble(x, top.nibble());
  if (top.second < kAllowed) {  // fewer than two are allowed
    const uint32_t first = mask >> (8 * (kept.nibble & 3u)) & 1u, second = mask >> (8 * (kept.nibble >> 2)) & 1u;
    kept.bits &= first * 0xffffu | second * 0xffff0000u;
  }
  return kept;
}

// Two squares, rounded; NaN only says that there was one.
template <class T>
S24_HD uint32_t squared_relu_pair(uint32_t x) {
#if defined(__CUDA_ARCH__)
  float a, b;
  uint32_t out;
  if constexpr (T::kInf == BF16::kInf) {
    a = float_of(x << 16);
    b = float_of(x & 0xffff0000u);
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
  }
  // The square of a 16-bit float is exact in float32 unless it is subnormal, which counts as zero.
  asm("max.NaN.f32 %0, %0, 0f00000000; mul.rn.ftz.f32 %0, %0, %0;" : "+f"(a));
  asm("max.NaN.f32 %0, %0, 0f00000000; mul.rn.ftz.f32 %0, %0, %0;" : "+f"(b));
  if constexpr (T::kInf == BF16::kInf)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(b), "f"(a));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(b), "f"(a));
  return out;
#else
  return uint32_t(squared_relu<T>(uint16_t(x))) | uint32_t(squared_relu<T>(uint16_t(x >> 16))) << 16;
#endif
}

template <class T>
S24_HD KeptPair keep_squared_relu(Words x) {
  const Words y = {squared_relu_pair<T>(x.low), squared_relu_pair<T>(x.high)};
  const TopTwo top = top_two_of<T>(y);
  if (top.largest >> 2 <= T::kInf) return take_nibble(y, top.nibble());
  // A NaN keeps its bits.
  Words exact = {0, 0};
  S24_UNROLL
  for (uint32_t i = 0; i < 2; ++i) {
    exact.low |= uint32_t(squared_relu<T>(uint16_t(x.low >> (16 * i)))) << (16 * i);
    exact.high |= uint32_t(squared_relu<T>(uint16_t(x.high >> (16 * i)))) << (16 * i);
  }
  return keep_largest<T>(exact);
}

// The exact estimator: both drawn entries, in any order; what is not drawn is +0. A drawn entry may be zero.
struct Drawn {
  uint32_t index[2], bits[2];
};

// As mvue24<T, true> of a finite group that is not all zero: of the sums and the draw only what the case needs.
template <class T>
S24_HD Drawn draw_exact(Words x, const uint32_t a[4], uint32_t largest, float u0) {
  const uint32_t exponent = largest >> 23, bounded = min_u32(exponent, 253u);
  const float scale = float_of((254u - bounded) << 23), unscale = float_of(bounded << 23);
  const uint32_t least = (max_u32(bounded, 127u) - 126u) << 23;  // below, the scaled entry would be subnormal
  float b[4], c[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) b[i] = a[i] >= least ? float_of(a[i]) * scale : 0.0f;
  const float most = float_of(largest) * scale;
  const uint32_t top = b[0] == most ? 0u : b[1] == most ? 1u : b[2] == most ? 2u : 3u;
  float o[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = top == uint32_t(i) ? 0.0f : b[i];
  const float rest = (o[0] + o[1]) + (o[2] + o[3]);
  const bool capped = most > rest;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) b[i] = capped ? o[i] : b[i];
  running_sums(b, c);
  const float half = c[3] * 0.5f, level = u0 * (capped ? c[3] : half);
  const uint32_t one = c[0] > level ? 0u : c[1] > level ? 1u : c[2] > level ? 2u : 3u;
  uint32_t two = c[0] - half > level ? 0u : c[1] - half > level ? 1u : c[2] - half > level ? 2u : 3u;
  two = capped ? top : two == one ? (one == 3u ? 2u : one + 1u) : two;
  const float m = capped ? rest : half;
  const bool vanishes = (bits_of(m) >> 23) + exponent <= 127u;
  const uint32_t size = vanishes ? 0u : round_number<T>(bits_of(m * unscale));
  Drawn d;
  d.index[0] = one;
  d.index[1] = two;
  S24_UNROLL
  for (int i = 0; i < 2; ++i) {
    const uint32_t own = element(x, d.index[i]);
    const bool drawn = (T::to_f32(uint16_t(own)) & kF32Magnitude) >= least && size != 0;
    d.bits[i] = drawn ? size | (own & 0x8000u) : 0u;
    if (i == 1 && capped) d.bits[i] = own;
  }
  return d;
}

// Both as they come, in the order of a packed group. Of fewer than two that are not zero, the lowest zeros are kept.
S24_HD KeptPair pack_drawn(Drawn d) {
  if (d.bits[0] == 0 || d.bits[1] == 0) {
    // Not by an index, for which the arrays would need memory.
    const bool last = d.bits[1] != 0;
    const uint32_t bits = last ? d.bits[1] : d.bits[0];
    const uint32_t position = bits == 0 ? 0u : last ? d.index[1] : d.index[0];
    return position == 0 ? KeptPair{4u, bits} : KeptPair{position << 2, bits << 16};
  }
  const bool swapped = d.index[0] > d.index[1];
  const uint32_t first = swapped ? d.index[1] : d.index[0], second = swapped ? d.index[0] : d.index[1];
  const uint32_t low = swapped ? d.bits[1] : d.bits[0], high = swapped ? d.bits[0] : d.bits[1];
  return {first | second << 2, low | high << 16};
}

// The packed exact estimate of a group.
template <class T>
S24_HD KeptPair keep_drawn(Words x, uint32_t word) {
  uint32_t a[4];
  S24_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    a[i] = T::to_f32(uint16_t((i < 2 ? x.low : x.high) >> (i % 2 * 16))) & kF32Magnitude;
  const uint32_t largest = max_u32(max_u32(a[0], a[1]), max_u32(a[2], a[3]));
  if (largest >= kF32Inf) return keep_largest<T>(x);
  if (largest < kF32MinNormal) return {4u, 0u};
  return pack_drawn(draw_exact<T>(x, a, largest, uniform(word)));
}

// A group from its packed form.
S24_HD Words put_nibble(KeptPair kept) {
  const uint32_t first = kept.nibble & 3u, second = kept.nibble >> 2;
  const uint64_t all = uint64_t(kept.bits & 0xffffu) << (16 * first) | uint64_t(kept.bits >> 16) << (16 * second);
  return {uint32_t(all), uint32_t(all >> 32)};
}

}  // namespace s24
