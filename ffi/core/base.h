// What every core header needs: the host/device marker and bit casts.
//
// The files under ffi/core define each bit decision of the package once. CPU handlers and CUDA kernels call them.
// They hold no state, allocate nothing and use no standard containers. Everything is forced inline: one header is
// compiled into several translation units with different instruction sets, and an out-of-line copy picked by the
// linker could use instructions that the machine lacks. Tests define S24_HD as plain `inline`, which compiles in a third of
// the time where every access is checked; each of their instruction sets is a library that hides its copies.
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)
#define S24_HD __host__ __device__ __forceinline__
#elif !defined(S24_HD)
#define S24_HD inline __attribute__((always_inline))
#endif

// Marks a function that is rarely needed: it is called and not inlined, so that the common path keeps its registers.
#if defined(__CUDACC__)
#define S24_RARE static __host__ __device__ __noinline__
#else
#define S24_RARE S24_HD
#endif

#if defined(__CUDACC__) || defined(__clang__)
#define S24_UNROLL _Pragma("unroll")
#else
#define S24_UNROLL _Pragma("GCC unroll 16")
#endif

// Stands before a short loop over lanes, which becomes vector code only if it is not unrolled first.
#if defined(__CUDACC__) || defined(__clang__)
#define S24_LOOP
#else
#define S24_LOOP _Pragma("GCC unroll 1")
#endif

namespace s24 {

S24_HD uint32_t bits_of(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, sizeof u);
  return u;
}

S24_HD float float_of(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, sizeof f);
  return f;
}

// A condition as a mask, all ones or zero. Compilers make vector code of selections by integer masks, but branches of
// expressions over bool.
template <class K>
S24_HD K mask_if(bool c) {
  return K(K(0) - K(c));
}

template <class K>
S24_HD K blend(K mask, K a, K b) {
  return mask != 0 ? a : b;
}

// As blend, bit by bit, for masks that are results of logic and not of a comparison.
template <class K>
S24_HD K merge(K mask, K a, K b) {
  return K((a & mask) | (b & ~mask));
}

S24_HD float blend(uint32_t mask, float a, float b) { return mask != 0 ? a : b; }

S24_HD float keep_if(uint32_t mask, float v) { return float_of(bits_of(v) & mask); }

template <class K>
struct SignedOf;
template <>
struct SignedOf<uint32_t> {
  using Type = int32_t;
};
template <>
struct SignedOf<uint16_t> {
  using Type = int16_t;
};
template <class K>
using Signed = typename SignedOf<K>::Type;

// Each bit that is set in two or three of the words.
template <class K>
S24_HD K majority(K a, K b, K c) {
  return K((a & b) | (c & (a | b)));
}

S24_HD uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
S24_HD uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

}  // namespace s24
