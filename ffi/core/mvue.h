// Minimum-variance unbiased 2:4 estimate of a group (Chmiel et al. 2023, arXiv:2203.10991), exact or in the cheaper
// sequential form (Hu et al. 2024, arXiv:2404.01847). At most two of four are non-zero and the mean over the random
// words is the group.
//
// Magnitudes are first scaled by a power of two, so that the largest lies in [1, 4): sums neither overflow nor vanish.
// Sums have a fixed order. The code must be compiled without contraction of products and sums.
#pragma once
#include "philox.h"
#include "select.h"

namespace s24 {

// A group's scaled magnitudes and what leads back.
struct ScaledGroup {
  uint32_t sign[4];
  float b[4];
  uint32_t exponent;  // of the largest magnitude, 1..254; 0: all are zero
  float unscale;
  uint32_t finite;  // mask
};

template <class T>
S24_HD ScaledGroup scale_group(const typename T::Bits x[4]) {
  ScaledGroup s;
  uint32_t a[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t u = T::to_f32(x[i]);
    s.sign[i] = u & ~kF32Magnitude;
    a[i] = flushed_magnitude(u);
  }
  const uint32_t largest = max_u32(max_u32(a[0], a[1]), max_u32(a[2], a[3]));
  s.finite = mask_if<uint32_t>(largest < kF32Inf);
  s.exponent = largest >> 23;
  const float scale = float_of((254u - min_u32(s.exponent, 253u)) << 23);
  s.unscale = float_of(min_u32(s.exponent, 253u) << 23);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    // By exponents: a product that rounds up to the least normal number depends on how the hardware treats subnormals.
    const uint32_t normal = mask_if<uint32_t>((a[i] >> 23) + 126u >= min_u32(s.exponent, 253u));
    s.b[i] = float_of(a[i] & normal) * scale;
  }
  return s;
}

// Mask: v * unscale would be subnormal (then it counts as zero). 2^(1-E) is normal for E <= 127.
S24_HD uint32_t vanishes(float v, uint32_t exponent) {
  const uint32_t small = mask_if<uint32_t>(exponent <= 127u);
  return small & mask_if<uint32_t>(v < float_of(((128u - exponent) & small) << 23));
}

S24_HD void running_sums(const float v[4], float c[4]) {
  c[0] = v[0];
  c[1] = c[0] + v[1];
  c[2] = c[1] + v[2];
  c[3] = c[2] + v[3];
}

// Index of the first sum above level; the last one if there is none.
S24_HD uint32_t first_above(const float c[4], float level) {
  uint32_t n = 0;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) n -= mask_if<uint32_t>(c[i] <= level);
  return min_u32(n, 3u);
}

S24_HD uint32_t other_than(uint32_t second, uint32_t first) {
  const uint32_t next = blend(mask_if<uint32_t>(first == 3u), uint32_t(2), uint32_t(first + 1u));
  return blend(mask_if<uint32_t>(second == first), next, second);
}

S24_HD uint32_t is_index(uint32_t index, int i) { return mask_if<uint32_t>(index == uint32_t(i)); }

// Magnitudes (float32) of the result. Returns the index of the entry that keeps its own bits, 4 if none does.
S24_HD uint32_t mvue_exact_magnitudes(const ScaledGroup& s, float u0, float y[4]) {
  const float* b = s.b;
  uint32_t top = 0;
  float largest = b[0];
  S24_UNROLL
  for (int i = 1; i < 4; ++i) {
    const uint32_t above = mask_if<uint32_t>(b[i] > largest);
    top = blend(above, uint32_t(i), top);
    largest = blend(above, b[i], largest);
  }
  float o[4], d[4], c[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = keep_if(~is_index(top, i), b[i]);
  const float rest = (o[0] + o[1]) + (o[2] + o[3]);
  const uint32_t capped = mask_if<uint32_t>(largest > rest);

  // Capped: the largest is kept as it is, one of the others stands for their sum.
  running_sums(o, d);
  const uint32_t drawn = first_above(d, u0 * d[3]);
  const float z = keep_if(~vanishes(rest, s.exponent), rest * s.unscale);

  // Otherwise systematic sampling of two: both stand for half of the sum.
  running_sums(b, c);
  const float half = c[3] * 0.5f;
  const float p = u0 * half;
  const float shifted[4] = {c[0] - half, c[1] - half, c[2] - half, c[3] - half};
  const uint32_t i1 = first_above(c, p);
  const uint32_t i2 = other_than(first_above(shifted, p), i1);
  const float h = half * s.unscale;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float one = keep_if(is_index(drawn, i), z);
    const float two = keep_if((is_index(i1, i) | is_index(i2, i)) & mask_if<uint32_t>(b[i] != 0.0f), h);
    y[i] = blend(capped, one, two);
  }
  return blend(capped, top, uint32_t(4));
}

// The sum of the others than j, as a fixed tree.
S24_HD float sum_without(const float v[4], int j) {
  return ((j == 0 ? 0.0f : v[0]) + (j == 1 ? 0.0f : v[1])) + ((j == 2 ? 0.0f : v[2]) + (j == 3 ? 0.0f : v[3]));
}

S24_HD void mvue_sequential_magnitudes(const ScaledGroup& s, float u0, float u1, float y[4]) {
  float b[4], c[4], o[4], d[4], k[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) b[i] = s.b[i] + 0x1p-23f;
  running_sums(b, c);
  const uint32_t i1 = first_above(c, u0 * c[3]);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = keep_if(~is_index(i1, i), b[i]);
  running_sums(o, d);
  const uint32_t i2 = other_than(first_above(d, u1 * d[3]), i1);
  S24_UNROLL
  for (int j = 0; j < 4; ++j) k[j] = b[j] / (c[3] * sum_without(b, j));  // one division: XLA merges two
  const float r = 1.0f / c[3];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float v = s.b[i] / (b[i] * (r + sum_without(k, i)));
    const uint32_t drawn = (is_index(i1, i) | is_index(i2, i)) & mask_if<uint32_t>(s.b[i] != 0.0f);
    y[i] = keep_if(drawn & ~vanishes(v, s.exponent), v * s.unscale);
  }
}

// A group with a non-finite entry is pruned instead (its NaN or infinity must reach the result).
template <class T, bool kExact>
S24_HD void mvue24(const typename T::Bits x[4], uint32_t w0, uint32_t w1, typename T::Bits out[4]) {
  using Bits = typename T::Bits;
  const ScaledGroup s = scale_group<T>(x);
  float y[4];
  uint32_t unchanged = 4;
  if (kExact) {
    unchanged = mvue_exact_magnitudes(s, uniform(w0), y);
  } else {
    mvue_sequential_magnitudes(s, uniform(w0), uniform(w1), y);
  }
  const uint32_t nonzero = mask_if<uint32_t>(s.exponent != 0u);
  Bits pruned[4];
  prune24<T>(x, pruned);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Bits rounded = round_positive_zero<T>(bits_of(y[i]) | s.sign[i]);
    const Bits usual = Bits(blend(Bits(is_index(unchanged, i)), x[i], rounded) & Bits(nonzero));
    out[i] = blend(Bits(s.finite), usual, pruned[i]);
  }
}

}  // namespace s24
