// Minimum-variance unbiased 2:4 estimate of a group (Chmiel et al. 2023, arXiv:2203.10991), exact or in the cheaper
// sequential form (Hu et al. 2024, arXiv:2404.01847). At most two of four are non-zero and the mean over the random
// words is the group.
//
// Magnitudes are first scaled by a power of two, so that the largest lies in [1, 4): sums neither overflow nor vanish.
// Sums have a fixed order. The code must be compiled without contraction of products and sums.
//
// Positions are masks, one per entry, of which exactly one is set: comparing indices would cost more.
#pragma once
#include "philox.h"
#include "select.h"

namespace s24 {

// The magnitudes b of a group, scaled by a power of two; b * unscale with the signs is the group again.
struct ScaledGroup {
  uint32_t sign[4];
  float b[4];
  uint32_t exponent;  // of the largest magnitude, 1..254; 0: all are zero
  float unscale;
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
  s.exponent = max_u32(max_u32(a[0], a[1]), max_u32(a[2], a[3])) >> 23;
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

// The first sum above level; the last one if there is none. Sums do not decrease.
S24_HD void first_above(const float c[4], float level, uint32_t at[4]) {
  uint32_t below[3];
  S24_UNROLL
  for (int i = 0; i < 3; ++i) below[i] = mask_if<uint32_t>(c[i] <= level);
  at[0] = ~below[0];
  at[1] = below[0] & ~below[1];
  at[2] = below[1] & ~below[2];
  at[3] = below[2];
}

// A mask of two positions: first and second or, if these are the same, first and the position after it (before it, if it is
// the last one).
S24_HD void both_of(const uint32_t first[4], const uint32_t second[4], uint32_t at[4]) {
  const uint32_t same =
      (first[0] & second[0]) | (first[1] & second[1]) | (first[2] & second[2]) | (first[3] & second[3]);
  const uint32_t next[4] = {0u, first[0], first[1] | first[3], first[2]};
  S24_UNROLL
  for (int i = 0; i < 4; ++i) at[i] = first[i] | second[i] | (same & next[i]);
}

// A mask of the position of `largest` in v; of equal ones the first.
S24_HD void position_of(float largest, const float v[4], uint32_t at[4]) {
  uint32_t seen = 0;
  S24_UNROLL
  for (int i = 0; i < 3; ++i) {
    const uint32_t equal = mask_if<uint32_t>(v[i] == largest);
    at[i] = equal & ~seen;
    seen |= equal;
  }
  at[3] = ~seen;
}

// out: at most two entries differ from zero.
template <class T>
S24_HD void mvue24_exact(const ScaledGroup& s, const typename T::Bits x[4], float u0, typename T::Bits out[4]) {
  using Bits = typename T::Bits;
  const float* b = s.b;
  const float largest = float_of(
      max_u32(max_u32(bits_of(b[0]), bits_of(b[1])), max_u32(bits_of(b[2]), bits_of(b[3]))));
  uint32_t top[4], drawn[4], i1[4], i2[4], two[4];
  position_of(largest, b, top);
  float o[4], d[4], c[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = keep_if(~top[i], b[i]);
  const float rest = (o[0] + o[1]) + (o[2] + o[3]);
  const uint32_t capped = mask_if<uint32_t>(largest > rest);

  // Capped: the largest is kept as it is, one of the others stands for their sum.
  running_sums(o, d);
  first_above(d, u0 * d[3], drawn);
  const float z = keep_if(~vanishes(rest, s.exponent), rest * s.unscale);

  // Otherwise systematic sampling of two: both stand for half of the sum.
  running_sums(b, c);
  const float half = c[3] * 0.5f;
  const float p = u0 * half;
  const float shifted[4] = {c[0] - half, c[1] - half, c[2] - half, c[3] - half};
  first_above(c, p, i1);
  first_above(shifted, p, i2);
  both_of(i1, i2, two);

  const Bits value = T::from_f32_number(bits_of(blend(capped, z, half * s.unscale)));
  const uint32_t nonzero = mask_if<uint32_t>(value != 0);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t sampled = two[i] & mask_if<uint32_t>(b[i] != 0.0f);
    const Bits stands = Bits(blend(capped, drawn[i], sampled) & nonzero);
    const Bits y = Bits((value | T::sign_of(s.sign[i])) & stands);
    out[i] = blend(Bits(capped & top[i]), x[i], y);
  }
}

// The sum of the three elements other than j, added in a fixed order.
S24_HD float sum_without(const float v[4], int j) {
  return j < 2 ? v[1 - j] + (v[2] + v[3]) : (v[0] + v[1]) + v[5 - j];
}

template <class T>
S24_HD void mvue24_sequential(const ScaledGroup& s, float u0, float u1, typename T::Bits out[4]) {
  using Bits = typename T::Bits;
  float b[4], c[4], o[4], d[4], k[4];
  uint32_t i1[4], i2[4], two[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) b[i] = s.b[i] + 0x1p-23f;
  running_sums(b, c);
  first_above(c, u0 * c[3], i1);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = keep_if(~i1[i], b[i]);
  running_sums(o, d);
  first_above(d, u1 * d[3], i2);
  both_of(i1, i2, two);
  S24_UNROLL
  for (int j = 0; j < 4; ++j) k[j] = b[j] / (c[3] * sum_without(b, j));  // one division: XLA merges two
  const float r = 1.0f / c[3];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float v = s.b[i] / (b[i] * (r + sum_without(k, i)));
    const uint32_t kept = two[i] & mask_if<uint32_t>(s.b[i] != 0.0f) & ~vanishes(v, s.exponent);
    const Bits y = T::from_f32_number(bits_of(v * s.unscale) & kept);
    out[i] = Bits((y | T::sign_of(s.sign[i])) & mask_if<Bits>(y != 0));
  }
}

// Mask: every entry is finite.
template <class T>
S24_HD typename T::Bits all_finite(const typename T::Bits x[4]) {
  using Bits = typename T::Bits;
  Bits finite = Bits(~Bits(0));
  S24_UNROLL
  for (int i = 0; i < 4; ++i) finite = Bits(finite & mask_if<Bits>(Bits(x[i] & T::kMagnitude) < T::kInf));
  return finite;
}

// The estimate of a group of finite entries; the result for other groups must not be used.
template <class T, bool kExact>
S24_HD void mvue24_finite(const typename T::Bits x[4], uint32_t w0, uint32_t w1, typename T::Bits out[4]) {
  const ScaledGroup s = scale_group<T>(x);
  if (kExact) {
    mvue24_exact<T>(s, x, uniform(w0), out);
  } else {
    mvue24_sequential<T>(s, uniform(w0), uniform(w1), out);
  }
}

// A group with a non-finite entry is pruned instead (its NaN or infinity must reach the result).
template <class T>
S24_HD void mvue24_repair(const typename T::Bits x[4], typename T::Bits out[4]) {
  const typename T::Bits finite = all_finite<T>(x);
  typename T::Bits pruned[4];
  prune24<T>(x, pruned);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) out[i] = blend(finite, out[i], pruned[i]);
}

// The estimate of any group. w0, w1: random words, of which kExact reads only the first.
template <class T, bool kExact>
S24_HD void mvue24(const typename T::Bits x[4], uint32_t w0, uint32_t w1, typename T::Bits out[4]) {
  mvue24_finite<T, kExact>(x, w0, w1, out);
  mvue24_repair<T>(x, out);
}

// kMvueExact, kMvueSequential.
struct MvueArgs : GroupwiseArgs {};

}  // namespace s24
