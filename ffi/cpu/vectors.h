// Vectors of 32-bit lanes as wide as the instruction set has them, and the transpose of a square of vectors.
#pragma once
#include "../core/base.h"

namespace s24 {
namespace S24_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#define S24_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define S24_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#define S24_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define S24_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int kWidth = 4;
#define S24_LOW 0, 4, 1, 5
#define S24_HIGH 2, 6, 3, 7
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));

#if defined(__clang__)
#define S24_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define S24_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntVec{__VA_ARGS__})
#endif

S24_HD Vec interleave_low(Vec a, Vec b) { return S24_SHUFFLE(a, b, S24_LOW); }
S24_HD Vec interleave_high(Vec a, Vec b) { return S24_SHUFFLE(a, b, S24_HIGH); }

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

}  // namespace S24_ISA
}  // namespace s24
