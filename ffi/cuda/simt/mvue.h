// GPU version of mvue24 (the same bits as core/mvue.h): returns the two kept entries of a group of four 16-bit floats.
//
// A GPU compares, selects and works on bits at half the rate of float32 sums and products. So each decision is a number, 0 or
// 1, positions are sums of decisions, and there are no branches. Rare groups are left to the definition: those with numbers
// that are not finite or not below 2^127, and those whose two draws become one by rounding.
#pragma once
#include "select.h"

namespace s24 {

S24_HD float at_most(float a, float b) {
#if defined(__CUDA_ARCH__)
  float one;
  asm("set.le.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(a), "f"(b));
  return one;
#else
  return a <= b ? 1.0f : 0.0f;
#endif
}

// a * b + c, at least 0 and at most 1.
S24_HD float saturated(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
#else
  const float y = __builtin_fmaf(a, b, c);
  return y > 1.0f ? 1.0f : y > 0.0f ? y : 0.0f;
#endif
}

// `otherwise` if `known`, else a * b.
S24_HD float product_unless(bool known, float otherwise, float a, float b) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .pred p; setp.ne.u32 p, %3, 0; @!p mul.rn.f32 %0, %1, %2;}" : "+f"(otherwise) : "f"(a), "f"(b), "r"(uint32_t(known)));
  return otherwise;
#else
  return known ? otherwise : a * b;
#endif
}

// |x| times a power of two; a subnormal factor or result is zero. x: 11 bits of significand at most.
S24_HD float scaled_down(float x, float power) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{.reg .f32 a; abs.f32 a, %1; mul.rn.ftz.f32 %0, a, %2;}" : "=f"(y) : "f"(x), "f"(power));
  return y;
#else
  const float y = float_of(flushed_magnitude(bits_of(x))) * power;
  return float_of(flushed_magnitude(bits_of(y)));
#endif
}

// Two numbers that are not negative, rounded.
template <class T>
S24_HD uint32_t round_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
  return converted_pair<T>(low, high);
#else
  return T::from_f32_number(bits_of(low)) | uint32_t(T::from_f32_number(bits_of(high))) << 16;
#endif
}

// Two 16-bit numbers, exchanged if `swap`.
S24_HD uint32_t swapped_if(bool swap, uint32_t y) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .pred p; setp.ne.u32 p, %1, 0; @p prmt.b32 %0, %0, %0, 0x1032;}" : "+r"(y) : "r"(uint32_t(swap)));
  return y;
#else
  return swap ? y << 16 | y >> 16 : y;
#endif
}

// Two 16-bit numbers y with the signs of the elements in `signs`; zeros are +0.
template <class T>
S24_HD uint32_t signed_pair(uint32_t y, uint32_t signs) {
#if defined(__CUDA_ARCH__)
  y |= signs & 0x80008000u;
  // -0 + 0 is +0.
  if constexpr (T::kInf == BF16::kInf)
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(0x3f803f80u), "r"(0u));
  else
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(0x3c003c00u), "r"(0u));
  return y;
#else
  const uint32_t low = mask_if<uint32_t>((y & 0xffffu) != 0) & 0x8000u, high = mask_if<uint32_t>(y >> 16 != 0) & 0x80000000u;
  return y | (signs & (low | high));
#endif
}

// A group as float32 numbers. signs: one byte for each element, whose top bit is its sign.
struct Numbers {
  float x[4];
  uint32_t signs;
};

template <class T>
S24_HD Numbers numbers_of(Words x) {
  return {{low_number<T>(x.low), high_number<T>(x.low), low_number<T>(x.high), high_number<T>(x.high)},
          select_bytes(x.low, x.high, 0x7531u)};
}

// Two groups that lie across four rows: one in the low halves of the words, one in the high halves.
template <class T>
S24_HD void numbers_of(const uint32_t rows[4], Numbers& low, Numbers& high) {
  S24_UNROLL
  for (int j = 0; j < 4; ++j) {
    low.x[j] = low_number<T>(rows[j]);
    high.x[j] = high_number<T>(rows[j]);
  }
  const uint32_t signs01 = select_bytes(rows[0], rows[1], 0x7351u), signs23 = select_bytes(rows[2], rows[3], 0x7351u);
  low.signs = select_bytes(signs01, signs23, 0x5410u);
  high.signs = select_bytes(signs01, signs23, 0x7632u);
}

// The two kept entries. Their positions are bits 4 to 5 and 12 to 13 of `selector`, whose higher bits are not read; `bits`
// holds both entries.
struct Chosen {
  uint32_t selector, bits;
  S24_HD PackedGroup pair() const { return {(selector >> 4 & 3u) | (selector >> 10 & 12u), bits}; }
  // The group with zeros elsewhere: each element is two bytes of `bits`, or of a zero.
  S24_HD Words spread() const {
    const uint32_t bytes = 0x44444444u - shift_left(0x44u - 0x10u, selector >> 1) - shift_left(0x44u - 0x32u, selector >> 9);
    return {select_bytes(bits, 0u, bytes), select_bytes(bits, 0u, bytes >> 16)};
  }
  static S24_HD Chosen of(PackedGroup kept) { return {(kept.nibble & 3u) << 4 | (kept.nibble & 12u) << 10, kept.bits}; }
};

// The nibbles of four groups, each in the low half of a byte.
S24_HD uint32_t nibbles_of(const Chosen c[4]) {
  const uint32_t low = select_bytes(c[0].selector, c[1].selector, 0x5140u);  // first, first, second, second
  const uint32_t high = select_bytes(c[2].selector, c[3].selector, 0x5140u);
  return (select_bytes(low, high, 0x5410u) + select_bytes(low, high, 0x7632u) * 4u) >> 4;
}

// The selector of two positions, given by their sum `both` and their difference `apart`: the first position is
// (both - |apart|) / 2, the second (both + |apart|) / 2.
S24_HD uint32_t selector_of(float both, float apart) {
  return bits_of(fused(magnitude(apart), float((0x1000 - 0x10) / 2), fused(both, float((0x1000 + 0x10) / 2), 0x1p23f)));
}

// 1 + uniform(word), exact.
S24_HD float one_to_two(uint32_t word) { return float_of(word >> 9 | 0x3f800000u); }

// What tells whether one of some groups is rare. Then all that was chosen for them must not be used: the caller takes
// pack_defined_estimate.
struct Common {
  float apart = 1.0f;    // a product, 0 if two draws became one
  float sum = 0x1p127f;  // of magnitudes, infinite or NaN if one of them is not below 2^127
  S24_HD bool all() const { return magnitude(fused(sum, 0.0f, apart)) > 0.0f; }
};

template <class T>
S24_HD void choose_exact(const Numbers& group, uint32_t word, Chosen& out, Common& common) {
  const float* x = group.x;
  const float high01 = larger_magnitude(x[0], x[1]), high23 = larger_magnitude(x[2], x[3]);
  const float largest = larger_magnitude(high01, high23);
  const uint32_t exponent = bits_of(largest) & kF32Inf;
  const float scale = float_of((254u << 23) - exponent), unscale = float_of(exponent);
  float b[4], d[4], small[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) b[i] = scaled_down(x[i], scale);
  float rest01 = b[0] + b[1], rest23 = b[2] + b[3];
  const bool early = high01 >= high23;  // the largest is one of the first two
  if (early)
    rest01 = lesser(b[0], b[1]);
  else
    rest23 = lesser(b[2], b[3]);
  const float rest = rest01 + rest23;
  // 2^-100 is lost in every number but 0, so that a group of zeros is capped, too.
  const bool capped = !(fused(largest, scale, 0x1p-100f) <= rest);

  // No entry but a capped one is above the sum of the others: the running sums leave it out. `bound` is the number after
  // `rest`, times 2^100 like the entries, or so much more than a tiny `rest` that 1 is left.
  float bound = fused(rest, 0x1p100f, 1.0f);
  bound = fused(bound, 0x1.004p-24f, bound);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) small[i] = saturated(b[i], -0x1p100f, bound);
  d[0] = b[0] * small[0];
  S24_UNROLL
  for (int i = 1; i < 4; ++i) d[i] = fused(b[i], small[i], d[i - 1]);

  const float sum = product_unless(capped, d[3], d[3], 0.5f);
  const float level = fused(one_to_two(word), sum, -sum);  // uniform(word) * sum, rounded once
  const bool right = d[1] <= level, far = d[1] - sum <= level;
  float one = at_most(right ? d[2] : d[0], level), two = at_most((far ? d[2] : d[0]) - sum, level);
  if (right) one += 2.0f;
  if (far) two += 2.0f;
  float top = 1.0f - small[1];  // where the capped entry is, which is the second one as it is
  if (!early) top = 3.0f - small[3];
  if (capped) two = top;

  const float value = product_unless(capped, rest * unscale, sum, unscale);
  if (!(value > 0.0f)) one = at_most(two, 0.0f);  // the lowest zero
  const float apart = one - two;
  out.selector = selector_of(one + two, apart);
  const uint32_t rounded = swapped_if(apart > 0.0f, round_pair<T>(value, capped ? largest : value));
  out.bits = signed_pair<T>(rounded, select_bytes(group.signs, 0u, out.selector));
  common.apart *= apart;
  common.sum += largest;
}

// a / b, correctly rounded, if the quotient and its remainder are far from overflow and underflow. CUDA's division does the
// same after it has checked that.
S24_HD float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
  float q = a * r;
  q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
#else
  return a / b;
#endif
}

// 1 where the position is `below` (how many of the first three are below), else 0; below[i] >= below[i + 1].
S24_HD void one_hot(const float below[3], float at[4]) {
  at[0] = 1.0f - below[0];
  at[1] = below[0] - below[1];
  at[2] = below[1] - below[2];
  at[3] = below[2];
}

S24_HD float pick(const float v[4], const float at[4]) {
  return fused(v[3], at[3], fused(v[2], at[2], fused(v[1], at[1], v[0] * at[0])));
}

// The position of the first running sum of v that is above u times the last one. u is uniform in [0, 1), given as a random
// word; the last sum is returned in `sum`.
S24_HD float draw_position(const float v[4], uint32_t word, float at[4], float& sum) {
  float c[4], below[3];
  running_sums(v, c);
  sum = c[3];
  const float level = fused(one_to_two(word), c[3], -c[3]);
  S24_UNROLL
  for (int i = 0; i < 3; ++i) below[i] = at_most(c[i], level);
  one_hot(below, at);
  return below[0] + below[1] + below[2];
}

// 1 / b within 2^-23 of it, for numbers that are neither tiny nor huge.
S24_HD float reciprocal(float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  return r;
#else
  return 1.0f / b;
#endif
}

struct TwoNumbers {
  float one, two;
};

// a / chance of two positions, with every rounding of the definition.
S24_RARE TwoNumbers exact_values(float b0, float b1, float b2, float b3, float a1, float a2, float first, float second) {
  const float b[4] = {b0, b1, b2, b3}, sum = ((b0 + b1) + b2) + b3, r = quotient(1.0f, sum);
  float k[4], chance1 = 1.0f, chance2 = 1.0f;
  S24_UNROLL
  for (int j = 0; j < 4; ++j) k[j] = quotient(b[j], sum * sum_without(b, j));
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float chance = b[i] * (r + sum_without(k, i));
    if (first == float(i)) chance1 = chance;
    if (second == float(i)) chance2 = chance;
  }
  return {quotient(a1, chance1), quotient(a2, chance2)};
}

// As choose_exact, for the sequential estimate, mvue24<T, false>. Its chances need seven divisions, which are first estimated
// with reciprocals. With u = 2^-24, such a value differs from that of the definition by at most 20 u of itself: 8 u of
// roundings there and 12 u here, of which three reciprocals are 6 u. Exact divisions follow only where that may change the
// rounded value.
template <class T>
S24_HD void choose_sequential(const Numbers& group, uint32_t word0, uint32_t word1, Chosen& out, Common& common) {
  constexpr float kSlack = 24 * 0x1p-24f;
  const float largest = larger_magnitude(larger_magnitude(group.x[0], group.x[1]), larger_magnitude(group.x[2], group.x[3]));
  const uint32_t exponent = bits_of(largest) & kF32Inf;
  const float scale = float_of((254u << 23) - exponent), unscale = float_of(exponent);
  float a[4], b[4], o[4], first[4], second[4], sum, rest, parts1 = 1.0f, parts2 = 1.0f;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    a[i] = scaled_down(group.x[i], scale);
    b[i] = a[i] + 0x1p-23f;
  }
  float one = draw_position(b, word0, first, sum);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) o[i] = fused(-b[i], first[i], b[i]);
  float two = draw_position(o, word1, second, rest);
  S24_UNROLL
  for (int j = 0; j < 4; ++j) {
    const float part = reciprocal(sum_without(b, j));
    parts1 = fused(o[j], part, parts1);
    parts2 = fused(fused(-b[j], second[j], b[j]), part, parts2);
  }
  const float a1 = pick(a, first), a2 = pick(a, second);
  const float v1 = a1 * sum * reciprocal((a1 + 0x1p-23f) * parts1), v2 = a2 * sum * reciprocal((a2 + 0x1p-23f) * parts2);
  const float less = unscale * (1.0f - kSlack), more = unscale * (1.0f + kSlack);
  uint32_t rounded = round_pair<T>(v1 * less, v2 * less);
  if (rounded != round_pair<T>(v1 * more, v2 * more)) {
    const TwoNumbers exact = exact_values(b[0], b[1], b[2], b[3], a1, a2, one, two);
    rounded = round_pair<T>(exact.one * unscale, exact.two * unscale);
  }
  // Of zeros the lowest is kept.
  if (a2 == 0.0f) two = saturated(one, -1.0f, 1.0f);
  if (a1 == 0.0f) one = saturated(two, -1.0f, 1.0f);
  const float apart = one - two;
  out.selector = selector_of(one + two, apart);
  out.bits = signed_pair<T>(swapped_if(apart > 0.0f, rounded), select_bytes(group.signs, 0u, out.selector));
  const bool tiny = (a1 < 0x1p-60f && a1 != 0.0f) || (a2 < 0x1p-60f && a2 != 0.0f) || (largest < 0x1p-60f && largest != 0.0f);
  common.sum += largest;
  if (tiny) common.apart = 0.0f;
}

// The estimate of any group by its definition in core/mvue.h, packed.
template <class T, bool kExact>
S24_HD PackedGroup pack_defined_estimate(Words x, uint32_t word0, uint32_t word1) {
  const uint16_t in[4] = {uint16_t(x.low), uint16_t(x.low >> 16), uint16_t(x.high), uint16_t(x.high >> 16)};
  uint16_t y[4];
  mvue24<T, kExact>(in, word0, word1, y);
  return pack_largest<T>(words_of(y));
}

template <class T, bool kExact>
S24_HD void choose_estimate(const Numbers& group, uint32_t word0, uint32_t word1, Chosen& out, Common& common) {
  if constexpr (kExact)
    choose_exact<T>(group, word0, out, common);
  else
    choose_sequential<T>(group, word0, word1, out, common);
}

template <class T, bool kExact>
S24_HD PackedGroup pack_estimate(Words x, uint32_t word0, uint32_t word1) {
  Chosen chosen;
  Common common;
  choose_estimate<T, kExact>(numbers_of<T>(x), word0, word1, chosen, common);
  return common.all() ? chosen.pair() : pack_defined_estimate<T, kExact>(x, word0, word1);
}

}  // namespace s24
