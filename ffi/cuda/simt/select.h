// GPU version of the selections (the same bits as core/select.h, squared_relu.h and mvue.h): returns the two kept elements of
// a group of four 16-bit floats, as positions and bits.
//
// The definitions work on masks, for the vector units of a CPU. A GPU runs each group in a thread of its own, so this takes
// fewer operations per group and branches for rare groups. A group is two words: elements 0 and 1 are in the first, the lower
// one in its low half. A pair is one word.
#pragma once
#include "../../core/packed24.h"
#include "../../core/mvue.h"
#include "../../core/squared_relu.h"

namespace s24 {

struct Words {
  uint32_t low, high;
};

// A group in packed form: its nibble of metadata, and both kept elements, the first one in the low half.
struct PackedGroup {
  uint32_t nibble, bits;
};

// Bytes of (high, low), numbered from the lowest, that the four lowest nibbles of a selector name; none is above 7.
S24_HD uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
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
S24_HD PackedGroup take_nibble(Words x, uint32_t nibble) { return {nibble, take_two(x, nibble & 3u, nibble >> 2)}; }

// Keys that differ: the magnitude (all NaN equal), then the lower index.
template <class T>
S24_HD uint32_t distinct_key(uint32_t x, uint32_t i) {
  return min_u32(x & T::kMagnitude, uint32_t(T::kInf) + 1u) * 4u + (3u - i);
}

// By the lowest five bits of n.
S24_HD uint32_t shift_left(uint32_t v, uint32_t n) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_l(0u, v, n);
#else
  return v << (n & 31u);
#endif
}

S24_HD uint32_t shift_right(uint32_t v, uint32_t n) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(v, 0u, n);
#else
  return v >> (n & 31u);
#endif
}

struct TopTwo {
  uint32_t largest, second;  // keys
  // Larger keys of the low bits are lower indices.
  S24_HD uint32_t nibble() const {
    const uint32_t a = largest & 3u, b = second & 3u;
    return 15u ^ (max_u32(a, b) | min_u32(a, b) << 2);
  }
  // Four bytes, 1 for what is kept.
  S24_HD uint32_t bytes() const { return shift_right(0x01000000u, largest << 3) | shift_right(0x01000000u, second << 3); }
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
S24_HD PackedGroup pack_largest(Words x) {
  return take_nibble(x, top_two_of<T>(x).nibble());
}

// The same in fewer operations where all NaN are alike.
struct Largest {
  uint32_t places, key;  // two digits that name both places; the largest key

  // Selector of both elements, for select_bytes.
  S24_HD uint32_t take() const { return select_bytes(0x76327654u, 0x10321054u, places); }
  // Selector that puts bytes 0 and 2 to the places of the first and the second, and byte 1 to the others.
  S24_HD uint32_t put() const { return select_bytes(0x21012011u, 0x20111012u, places); }
  S24_HD PackedGroup of(Words x) const {
    const uint32_t selector = take();
    return {(selector >> 5 & 3u) | (selector >> 11 & 12u), select_bytes(x.low, x.high, selector)};
  }
  S24_HD uint32_t magnitude() const { return key >> 17; }
};

S24_HD Largest two_largest(Words x) {
  // Below the magnitudes stand numbers that fall with the index. In the sum of two of them one digit depends on the first
  // place and one on the second: they name the bytes of tables, and no byte is named by both.
  constexpr uint32_t kHigh = 0xfffe0000u;
  const uint32_t k[4] = {(x.low << 17) + 0x35u, (x.low << 1 & kHigh) | 0x32u, (x.high << 17) + 0x10u, x.high << 1 & kHigh};
  const TopTwo top = top_two(k);
  return {top.largest + top.second, top.largest};
}

// The nibbles of four selectors of elements, each in the low half of a byte.
S24_HD uint32_t selected_nibbles(const uint32_t selectors[4]) {
  const uint32_t a = select_bytes(selectors[0], selectors[1], 0x5410u), b = select_bytes(selectors[2], selectors[3], 0x5410u);
  return (select_bytes(a, b, 0x6420u) >> 5 & 0x03030303u) | (select_bytes(a, b, 0x7531u) >> 3 & 0x0c0c0c0cu);
}

constexpr uint32_t kSignsOfTwo = 0x80008000u;

// The larger and the smaller of the halves of two words.
S24_HD uint32_t max_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  return max_u32(a & 0xffffu, b & 0xffffu) | max_u32(a & ~0xffffu, b & ~0xffffu);
#endif
}

S24_HD uint32_t min_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vminu2(a, b);
#else
  return min_u32(a & 0xffffu, b & 0xffffu) | min_u32(a & ~0xffffu, b & ~0xffffu);
#endif
}

// 1 in each half of a word that is not zero.
S24_HD uint32_t non_zero_halves(uint32_t pair) { return min_halves(pair, 0x00010001u); }

// All bits of each half in which a is at least b, of magnitudes that are not NaN.
template <class T>
S24_HD uint32_t at_least(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t ones;
  if constexpr (T::kInf == BF16::kInf)
    asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  else
    asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(a), "r"(b));
  return ones;
#else
  const uint32_t difference = (a | kSignsOfTwo) - b;  // a half's highest bit stays where it borrows nothing
  return (difference >> 15 & 0x00010001u) * 0xffffu;
#endif
}

// Whether one of two magnitudes, in the halves of a word, is that of a NaN.
template <class T>
S24_HD bool has_nan(uint32_t magnitudes) {
  constexpr uint32_t kInf = T::kInf * 0x00010001u;
  return max_halves(magnitudes, kInf) != kInf;
}

// Bits of a where `ones` has them, of b elsewhere.
S24_HD uint32_t either(uint32_t ones, uint32_t a, uint32_t b) { return (ones & a) | (~ones & b); }

// Two groups in packed form.
struct TwoPacked {
  uint32_t bits[2];    // of each group both kept elements, the first one in the low half
  uint32_t nibbles;    // of each group in the lowest bits of a half
  uint32_t magnitude;  // of each group the largest, in a half
};

// The two largest of two groups, of which the halves of word i are elements i, where no element is NaN.
template <class T>
S24_HD TwoPacked two_largest_of_both(const uint32_t x[4]) {
  uint32_t m[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) m[i] = x[i] & ~kSignsOfTwo;
  const uint32_t high01 = max_halves(m[0], m[1]), low01 = min_halves(m[0], m[1]);
  const uint32_t high23 = max_halves(m[2], m[3]), low23 = min_halves(m[2], m[3]);
  // Both of the first two, both of the last two, or the larger of each: of equal elements the first ones.
  const uint32_t front = at_least<T>(low01, high23), not_back = at_least<T>(high01, low23);
  const uint32_t is_0 = at_least<T>(m[0], m[1]), is_2 = at_least<T>(m[2], m[3]);
  const uint32_t first = either(front, x[0], either(not_back, either(is_0, x[0], x[1]), x[2]));
  const uint32_t second = either(front, x[1], either(not_back, either(is_2, x[2], x[3]), x[3]));
  const uint32_t odd_first = not_back & ~front & ~is_0, odd_second = ~not_back | front | ~is_2;
  const uint32_t nibbles = (odd_first & 0x00010001u) | (~not_back & 0x00020002u) | (odd_second & 0x00040004u) |
                           (~front & 0x00080008u);
  return {{select_bytes(first, second, 0x5410u), select_bytes(first, second, 0x7632u)}, nibbles, max_halves(high01, high23)};
}

// What a nibble of metadata says of four elements in two words. If its two places are the same, the selectors name any bytes.
struct alignas(8) Places {
  uint32_t take;  // selectors of the two that are kept
  uint32_t put;   // of the four in the pair that is kept, a half for each word: bytes 1 and 0, 3 and 2, or those of zero
  static S24_HD Places of(uint32_t nibble) {
    const uint32_t first = nibble & 3, second = nibble >> 2;
    return {(0x10u + 0x22u * first) | (0x10u + 0x22u * second) << 8,
            0x44444444u - ((0x44u - 0x10u) << (8 * first)) - ((0x44u - 0x32u) << (8 * second))};
  }
};

// The group packed by a mask, as by keep24_masked. mask: four bytes, 0 or 1.
template <class T>
S24_HD PackedGroup pack_by_mask(Words x, uint32_t mask) {
  constexpr uint32_t kAllowed = 1u << 17;
  uint32_t k[4] = {distinct_key<T>(x.low, 0), distinct_key<T>(x.low >> 16, 1), distinct_key<T>(x.high, 2),
                   distinct_key<T>(x.high >> 16, 3)};
  S24_UNROLL
  for (int i = 0; i < 4; ++i) k[i] += (mask >> (8 * i) & 1u) * kAllowed;
  const TopTwo top = top_two(k);
  PackedGroup kept = take_nibble(x, top.nibble());
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
  if constexpr (T::kInf == BF16::kInf) {
    a = float_of(x << 16);
    b = float_of(x & 0xffff0000u);
  } else {
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
  }
  // The square of a 16-bit float is exact in float32 unless it is subnormal, which counts as zero.
  asm("max.NaN.f32 %0, %0, 0f00000000; mul.rn.ftz.f32 %0, %0, %0;" : "+f"(a));
  asm("max.NaN.f32 %0, %0, 0f00000000; mul.rn.ftz.f32 %0, %0, %0;" : "+f"(b));
  return converted_pair<T>(a, b);
#else
  return uint32_t(squared_relu<T>(uint16_t(x))) | uint32_t(squared_relu<T>(uint16_t(x >> 16))) << 16;
#endif
}

template <class T>
S24_HD PackedGroup pack_squared_relu(Words x) {
  const Words y = {squared_relu_pair<T>(x.low), squared_relu_pair<T>(x.high)};
  const Largest two = two_largest(y);
  if (two.magnitude() <= T::kInf) return two.of(y);
  // A NaN keeps its bits.
  Words exact = {0, 0};
  S24_UNROLL
  for (uint32_t i = 0; i < 2; ++i) {
    exact.low |= uint32_t(squared_relu<T>(uint16_t(x.low >> (16 * i)))) << (16 * i);
    exact.high |= uint32_t(squared_relu<T>(uint16_t(x.high >> (16 * i)))) << (16 * i);
  }
  return pack_largest<T>(exact);
}

// A group from its packed form.
S24_HD Words put_nibble(PackedGroup kept) {
  const uint32_t first = kept.nibble & 3u, second = kept.nibble >> 2;
  const uint64_t all = uint64_t(kept.bits & 0xffffu) << (16 * first) | uint64_t(kept.bits >> 16) << (16 * second);
  return {uint32_t(all), uint32_t(all >> 32)};
}

}  // namespace s24
