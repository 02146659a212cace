// Minimum-variance unbiased 2:4 estimate of a group (Chmiel et al. 2023, arXiv:2203.10991), exact or in the cheaper
// sequential form (Hu et al. 2024, arXiv:2404.01847). At most two of four are non-zero and the mean over the random
// words is the group.
//
// Magnitudes are first scaled by a power of two, so that the largest lies in [1, 4): sums neither overflow nor vanish.
// Sums have a fixed order. The code must be compiled without contraction of products and sums.
#pragma once
#include "philox.h"
#include "select.h"
#include "soft.h"

namespace s24 {

// A group's scaled magnitudes and what leads back.
struct ScaledGroup {
  uint32_t sign[4];
  float b[4];
  uint32_t exponent;  // of the largest magnitude, 1..254; 0: all are zero
  float unscale;
  bool finite;
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
  s.finite = largest < kF32Inf;
  s.exponent = largest >> 23;
  const float scale = float_of(s.exponent < 253u ? (254u - s.exponent) << 23 : kF32MinNormal);
  s.unscale = float_of(min_u32(s.exponent, 253u) << 23);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float b = float_of(a[i]) * scale;
    s.b[i] = b < 0x1p-126f ? 0.0f : b;
  }
  return s;
}

// v * unscale would be subnormal (then it counts as zero). 2^(1-E) is normal for E <= 127.
S24_HD bool vanishes(float v, uint32_t exponent) {
  const uint32_t e = exponent <= 127u ? 128u - exponent : 0u;
  return (exponent <= 127u) & (v < float_of(e << 23));
}

S24_HD void running_sums(const float v[4], float c[4]) {
  c[0] = v[0];
  c[1] = c[0] + v[1];
  c[2] = c[1] + v[2];
  c[3] = c[2] + v[3];
}

S24_HD int32_t first_above(const float c[4], float level) {
  const int32_t n = int32_t(c[0] <= level) + int32_t(c[1] <= level) + int32_t(c[2] <= level) + int32_t(c[3] <= level);
  return n > 3 ? 3 : n;
}

S24_HD int32_t other_than(int32_t second, int32_t first) {
  return second != first ? second : (first < 3 ? first + 1 : 2);
}

// Magnitudes (float32) of the result and, for the exact form, the entry that keeps its own bits (-1: none).
S24_HD int32_t mvue_exact_magnitudes(const ScaledGroup& s, float u0, float y[4]) {
  const float* b = s.b;
  int32_t top = 0;
  float largest = b[0];
  S24_UNROLL
  for (int i = 1; i < 4; ++i) {
    top = b[i] > largest ? i : top;
    largest = b[i] > largest ? b[i] : largest;
  }
  float o[4], d[4], c[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = i == top ? 0.0f : b[i];
  const float rest = (o[0] + o[1]) + (o[2] + o[3]);
  const bool capped = largest > rest;

  // Capped: the largest is kept as it is, one of the others stands for their sum.
  running_sums(o, d);
  const int32_t drawn = first_above(d, u0 * d[3]);
  const float z = vanishes(rest, s.exponent) ? 0.0f : rest * s.unscale;

  // Otherwise systematic sampling of two: both stand for half of the sum.
  running_sums(b, c);
  const float half = c[3] * 0.5f;
  const float p = u0 * half;
  const float shifted[4] = {c[0] - half, c[1] - half, c[2] - half, c[3] - half};
  const int32_t i1 = first_above(c, p);
  const int32_t i2 = other_than(first_above(shifted, p), i1);
  const float h = half * s.unscale;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float one = i == drawn ? z : 0.0f;
    const float two = ((i == i1) | (i == i2)) & (b[i] != 0.0f) ? h : 0.0f;
    y[i] = capped ? one : two;
  }
  return capped ? top : -1;
}

S24_HD float sum_without(const float v[4], int j) {
  return ((j == 0 ? 0.0f : v[0]) + (j == 1 ? 0.0f : v[1])) + ((j == 2 ? 0.0f : v[2]) + (j == 3 ? 0.0f : v[3]));
}

S24_HD void mvue_sequential_magnitudes(const ScaledGroup& s, float u0, float u1, float y[4]) {
  float b[4], c[4], o[4], d[4], k[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) b[i] = s.b[i] + 0x1p-23f;
  running_sums(b, c);
  const int32_t i1 = first_above(c, u0 * c[3]);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = i == i1 ? 0.0f : b[i];
  running_sums(o, d);
  const int32_t i2 = other_than(first_above(d, u1 * d[3]), i1);
  S24_UNROLL
  for (int j = 0; j < 4; ++j) k[j] = b[j] / (c[3] * sum_without(b, j));  // one division: XLA merges two
  const float r = 1.0f / c[3];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float inclusion = b[i] * (r + sum_without(k, i));
    const float v = s.b[i] / inclusion;
    const bool nonzero = ((i == i1) | (i == i2)) & (s.b[i] != 0.0f) & !vanishes(v, s.exponent);
    y[i] = nonzero ? v * s.unscale : 0.0f;
  }
}

// A group with a non-finite entry is pruned instead (its NaN or infinity must reach the result).
template <class T, bool kExact>
S24_HD void mvue24(const typename T::Bits x[4], uint32_t w0, uint32_t w1, typename T::Bits out[4]) {
  const ScaledGroup s = scale_group<T>(x);
  float y[4];
  int32_t unchanged = -1;
  if (kExact) {
    unchanged = mvue_exact_magnitudes(s, uniform(w0), y);
  } else {
    mvue_sequential_magnitudes(s, uniform(w0), uniform(w1), y);
  }
  typename T::Bits pruned[4];
  prune24<T>(x, pruned);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const typename T::Bits rounded = round_positive_zero<T>(bits_of(y[i]) | s.sign[i]);
    const typename T::Bits usual = i == unchanged ? x[i] : rounded;
    out[i] = s.finite ? (s.exponent == 0u ? typename T::Bits(0) : usual) : pruned[i];
  }
}

}  // namespace s24
