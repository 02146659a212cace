// Gradients of an activation of which only the result y was saved: the slope at y times the gradient dy, computed in float32
// and rounded once.
//
// Hardware disagrees on what is subnormal just above 2^-126, so results below 2^-125 are zero with the sign of dy. The results
// of squared ReLU are zero, too, where y < 2^-100, because the residue in slope_at would be subnormal. A NaN result has all
// bits set but the sign.
#pragma once
#include "arguments.h"
#include "floats.h"

namespace s24 {

enum class Slope : int32_t { kRelu, kSquaredRelu };

// dy/dx of y = max(x, 0) or max(x, 0)^2.
template <Slope kind>
S24_HD float slope_at(float y) {
  if constexpr (kind == Slope::kRelu) return y >= 0x1p-126f ? 1.0f : 0.0f;
#if defined(__CUDA_ARCH__)
  // 2 sqrt(y), rounded correctly for every y of 16 bits: no such root lies near the middle of two floats.
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
  const float root = __fmul_rn(y, r), residue = __fmaf_rn(-root, root, y);
  const float twice = __fmaf_rn(residue, r, __fadd_rn(root, root));
  const float slope = y < 0x1p-100f ? 0.0f : twice;
  return bits_of(y) == kF32Inf ? y : slope;
#else
  return y < 0x1p-100f ? 0.0f : 2.0f * __builtin_sqrtf(y);
#endif
}

// slope * dy, in float32.
S24_HD float scaled_gradient(float slope, float dy) {
#if defined(__CUDA_ARCH__)
  float half;  // below 2^-126 exactly where the product is below 2^-125
  asm("{.reg .f32 p; mul.rn.ftz.f32 p, %1, %2; mul.rn.ftz.f32 %0, p, 0f3f000000;}" : "=f"(half) : "f"(slope), "f"(dy));
  return __fadd_rn(half, half);
#else
  const float product = slope * without_subnormals(dy);
  return magnitude(product) < 0x1p-125f ? float_of(bits_of(dy) & ~kF32Magnitude) : product;
#endif
}

template <class T, Slope kind>
S24_HD typename T::Bits sloped(typename T::Bits y, typename T::Bits dy) {
  using Bits = typename T::Bits;
  const uint32_t made = bits_of(scaled_gradient(slope_at<kind>(float_of(T::to_f32(y))), float_of(T::to_f32(dy))));
  return (made & kF32Magnitude) > kF32Inf ? Bits(T::kMagnitude) : T::from_f32_number(made);
}

// Two of 16 bits, the first in the low half of a word.
template <class T, Slope kind>
S24_HD uint32_t sloped_pair(uint32_t y, uint32_t dy) {
#if defined(__CUDA_ARCH__)
  const auto second = [](uint32_t word) {
    return T::kInf == BF16::kInf ? float_of(second_of(word)) : high_number<T>(word);
  };
  const float a = scaled_gradient(slope_at<kind>(low_number<T>(y)), low_number<T>(dy));
  const float b = scaled_gradient(slope_at<kind>(second(y)), second(dy));
  return converted_pair<T>(a, b);
#else
  return uint32_t(sloped<T, kind>(uint16_t(y), uint16_t(dy))) | uint32_t(sloped<T, kind>(uint16_t(y >> 16), uint16_t(dy >> 16)))
                                                                  << 16;
#endif
}

// The saved activations that a device takes: multiples of so many tokens and features, whether of float32 too, and fewer elements
// than so many.
struct SavedSizes {
  int64_t tokens, features;
  bool float32;
  int64_t limit;
};

// An activation (tokens, features) cut to the two largest of four tokens and packed along tokens; the chosen features, dense,
// as rows of tokens; and, on CUDA and unless behind is null, the metadata in cuSPARSELt's order.
struct AlongTokens {
  void* values;
  uint8_t* metadata;
  void* dense;
  uint8_t* behind = nullptr;
};

// The backward pass of Y2 (tokens, features), which was saved packed along features, with dY2 of the same shape. It gives dY1
// on the support of Y2, whose metadata it shares, and both Y2 and dY1 along tokens. Tokens of a group are neighbours or, if
// strided, a quarter of all tokens apart. A feature with ranks[i] >= 0 also goes to row ranks[i] of the dense rows
// (dense_rows, tokens), in the order of packed tokens; a rank without such a row counts as negative.
struct SavedArgs {
  Dtype dtype;
  Slope slope;
  bool strided;
  int64_t tokens, features, dense_rows;
  const void* values;
  const uint8_t* metadata;
  const void* dy2;
  const int32_t* ranks;
  void* dy1;
  AlongTokens y2_along, dy1_along;
  uint8_t* behind = nullptr;  // of dY1 along features, only on CUDA: where its metadata go in cuSPARSELt's order
};

}  // namespace s24
