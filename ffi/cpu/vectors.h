// Vectors of 32-bit lanes as wide as the instruction set has them, and the transposes that are made of them.
#pragma once
#include "../core/base.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace s24 {
namespace S24_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#define S24_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define S24_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define S24_BY_BLOCK 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15
#define S24_BY_LANE S24_BY_BLOCK
#define S24_EACH_BLOCK(M, size, at) M(at), M((size) + (at)), M(2 * (size) + (at)), M(3 * (size) + (at))
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#define S24_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define S24_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define S24_BY_BLOCK 0, 4, 1, 5, 2, 6, 3, 7
#define S24_BY_LANE 0, 2, 4, 6, 1, 3, 5, 7
#define S24_EACH_BLOCK(M, size, at) M(at), M((size) + (at))
#else
constexpr int kWidth = 4;
#define S24_LOW 0, 4, 1, 5
#define S24_HIGH 2, 6, 3, 7
#define S24_BY_BLOCK 0, 1, 2, 3
#define S24_BY_LANE S24_BY_BLOCK
#define S24_EACH_BLOCK(M, size, at) M(at)
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));
typedef int16_t HalfVec __attribute__((vector_size(4 * kWidth)));
typedef uint64_t WideVec __attribute__((vector_size(4 * kWidth)));

#if defined(__clang__)
#define S24_SHUFFLE(Index, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define S24_SHUFFLE(Index, a, b, ...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif

// Bit i: lane i is negative.
S24_HD uint32_t sign_bits(IntVec v) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)v);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)v));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps((__m128)v));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= uint32_t(v[i] < 0) << i;
  return bits;
#endif
}

// Whether any bit of any element is set. A vector test: reducing to the largest element would take a chain of shuffles.
template <class B, int kCount>
S24_HD bool any_bit(const B (&a)[kCount]) {
  IntVec all{}, part;
  S24_UNROLL
  for (int l = 0; l < kCount; l += int(sizeof part / sizeof(B))) {
    __builtin_memcpy(&part, a + l, sizeof part);
    all |= part;
  }
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)all, (__m512i)all) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)all, (__m256i)all);
#else
  int32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= all[i];
  return bits != 0;
#endif
}

// Stores past the caches, of whole cache lines; `to` is aligned to 64 bytes. Ordered by end_streams.
template <int kWords>
S24_HD void stream_words(const uint32_t* from, void* to) {
  static_assert(kWords % 16 == 0, "whole lines");
  S24_UNROLL
  for (int w = 0; w < kWords; w += kWidth) {
    Vec v;
    __builtin_memcpy(&v, from + w, sizeof v);
    float* at = static_cast<float*>(to) + w;
#if defined(__AVX512F__)
    _mm512_stream_ps(at, v);
#elif defined(__AVX2__)
    _mm256_stream_ps(at, v);
#elif defined(__SSE2__)
    _mm_stream_ps(at, v);
#else
    __builtin_memcpy(at, &v, sizeof v);
#endif
  }
}

S24_HD void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Bytes -> a vector of wider elements.
template <class B, int kCount>
S24_HD void load_bytes(const uint8_t* from, B (&to)[kCount]) {
  static_assert(sizeof to == sizeof(Vec), "one vector");
#if defined(__AVX512BW__)  // with a mask of ones: without, g++ 12 warns of its own headers
  const __m512i wide =
      sizeof(B) == 4 ? _mm512_maskz_cvtepu8_epi32(__mmask16(-1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))
                     : _mm512_maskz_cvtepu8_epi16(__mmask32(-1), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  __builtin_memcpy(to, &wide, sizeof wide);
#elif defined(__AVX2__)
  const __m256i wide = sizeof(B) == 4 ? _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))
                                      : _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  __builtin_memcpy(to, &wide, sizeof wide);
#else
  for (int l = 0; l < kCount; ++l) to[l] = from[l];
#endif
}

S24_HD Vec interleave_low(Vec a, Vec b) { return S24_SHUFFLE(IntVec, a, b, S24_LOW); }
S24_HD Vec interleave_high(Vec a, Vec b) { return S24_SHUFFLE(IntVec, a, b, S24_HIGH); }

// to[j][i] = from[i][j] for a square of kWidth; steps count lanes between rows. Only bits move: any 32-bit type will do.
template <class W>
S24_HD void transpose(const W* from, int64_t from_step, W* to, int64_t to_step) {
  static_assert(sizeof(W) == 4, "32-bit lanes");
  Vec a[kWidth], b[kWidth];
  S24_UNROLL
  for (int i = 0; i < kWidth; ++i) __builtin_memcpy(&a[i], from + i * from_step, sizeof(Vec));
  // Interleaving the halves log2(kWidth) times transposes.
  S24_UNROLL
  for (int step = 1; step < kWidth; step *= 2) {
    S24_UNROLL
    for (int i = 0; i < kWidth / 2; ++i) {
      b[2 * i] = interleave_low(a[i], a[i + kWidth / 2]);
      b[2 * i + 1] = interleave_high(a[i], a[i + kWidth / 2]);
    }
    S24_UNROLL
    for (int i = 0; i < kWidth; ++i) a[i] = b[i];
  }
  S24_UNROLL
  for (int i = 0; i < kWidth; ++i) __builtin_memcpy(to + i * to_step, &a[i], sizeof(Vec));
}

// ---- groups of four that lie one after the other, to and from one vector per member

// Interleave within each block of 128 bits, by elements of kSize bytes: no element leaves its block, which is cheap.
#define S24_PAIR(i, lanes) (i), (i) + (lanes)
#define S24_WORDS(i) S24_PAIR(i, kWidth), S24_PAIR((i) + 1, kWidth)
#define S24_HALVES(i) \
  S24_PAIR(i, 2 * kWidth), S24_PAIR((i) + 1, 2 * kWidth), S24_PAIR((i) + 2, 2 * kWidth), S24_PAIR((i) + 3, 2 * kWidth)

template <int kSize>
S24_HD Vec block_low(Vec a, Vec b) {
  if (kSize == 4) return S24_SHUFFLE(IntVec, a, b, S24_EACH_BLOCK(S24_WORDS, 4, 0));
  return (Vec)S24_SHUFFLE(HalfVec, (HalfVec)a, (HalfVec)b, S24_EACH_BLOCK(S24_HALVES, 8, 0));
}

template <int kSize>
S24_HD Vec block_high(Vec a, Vec b) {
  if (kSize == 4) return S24_SHUFFLE(IntVec, a, b, S24_EACH_BLOCK(S24_WORDS, 4, 2));
  return (Vec)S24_SHUFFLE(HalfVec, (HalfVec)a, (HalfVec)b, S24_EACH_BLOCK(S24_HALVES, 8, 4));
}

// Elements of 16 bits in turn, those of a first.
S24_HD void interleave_halves(HalfVec a, HalfVec b, HalfVec out[2]) {
#if defined(__AVX512BW__)
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                    8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  out[0] = (HalfVec)_mm512_permutex2var_epi16((__m512i)a, low, (__m512i)b);
  out[1] = (HalfVec)_mm512_permutex2var_epi16((__m512i)a, high, (__m512i)b);
#else
  const Vec low = block_low<2>((Vec)a, (Vec)b), high = block_high<2>((Vec)a, (Vec)b);
#if defined(__AVX2__)
  out[0] = (HalfVec)_mm256_permute2f128_ps(low, high, 0x20);
  out[1] = (HalfVec)_mm256_permute2f128_ps(low, high, 0x31);
#else
  out[0] = (HalfVec)low;
  out[1] = (HalfVec)high;
#endif
#endif
}

// Turns the address of every element (vector, place in its block) left by one bit.
template <int kSize>
S24_HD void turn(Vec a[4]) {
  const Vec b[4] = {block_low<kSize>(a[0], a[2]), block_high<kSize>(a[0], a[2]), block_low<kSize>(a[1], a[3]),
                    block_high<kSize>(a[1], a[3])};
  S24_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = b[i];
}

// Four vectors as they lie in memory, where a group is four neighbouring elements, become four vectors of which vector j holds
// element j of every group. Without kOrdered the groups come in another order, the same in all four; join_groups undoes it.
template <int kSize, bool kOrdered>
S24_HD void split_groups(Vec a[4]) {
  turn<kSize>(a);
  turn<kSize>(a);
  if (kSize == 2) turn<kSize>(a);
  if (!kOrdered) return;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = S24_SHUFFLE(IntVec, a[i], a[i], S24_BY_BLOCK);
}

template <int kSize, bool kOrdered>
S24_HD void join_groups(Vec a[4]) {
  if (kOrdered) {
    S24_UNROLL
    for (int i = 0; i < 4; ++i) a[i] = S24_SHUFFLE(IntVec, a[i], a[i], S24_BY_LANE);
  }
  turn<kSize>(a);
  turn<kSize>(a);
}

}  // namespace S24_ISA
}  // namespace s24
