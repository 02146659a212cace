// Soft thresholds of blocks of groups, and results times a scale.
#pragma once
#include "../core/soft.h"
#include "lanes.h"

namespace s24 {
namespace S24_ISA {

// Gives the results of a block, unless an element is not finite, and whether all are.
template <class T>
S24_HD bool soft_usual(const Quad<typename T::Bits>& in, Quad<typename T::Bits>& out) {
  using B = typename T::Bits;
  constexpr int kCount = kLanes<B>;
  alignas(64) B unusual[kCount];
  if constexpr (T::kInf == BF16::kInf) {
    Quad<B> a;
    alignas(64) B threshold[kCount];
    for (int l = 0; l < kCount; ++l) {
      const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      B m[4], t;
      const int16_t largest = soft24_threshold(x, m, t);
      unusual[l] = mask_if<B>(largest >= int16_t(BF16::kInf));
      threshold[l] = t;
      for (int j = 0; j < 4; ++j) a.at[j][l] = m[j];
    }
    for (int j = 0; j < 4; ++j) {
      for_words(a.at[j], threshold, out.at[j], subtract_two);
      for (int l = 0; l < kCount; ++l) out.at[j][l] = soft24_result(in.at[j][l], out.at[j][l]);
    }
    return !any_bit(unusual);
  } else {
    alignas(64) uint32_t not_finite[kCount];
    for (int l = 0; l < kCount; ++l) {
      const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      B y[4];
      not_finite[l] = ~soft24_finite<T>(x, y);
      for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
    }
    return !any_bit(not_finite);
  }
}

// The results of any block, and whether all are finite.
template <class T>
S24_HD bool soft_block(const Quad<typename T::Bits>& in, Quad<typename T::Bits>& out) {
  using B = typename T::Bits;
  if (soft_usual<T>(in, out)) return true;
  for_lanes(in, out, [](const B x[4], B y[4]) { soft24<T>(x, y); });
  return false;
}

// Multiplies results by a scale. all_finite: whether none of the results is NaN or infinite.
template <class T, int n>
S24_HD void multiply(typename T::Bits (&y)[n], float scale, bool all_finite) {
  if (scale == 1) return;
  if (!all_finite || scale - scale != 0) {
    for (int l = 0; l < n; ++l) y[l] = scaled<T>(y[l], scale);
  } else if constexpr (T::kInf == BF16::kInf) {
    for_words(y, y, y, [scale](uint32_t two, uint32_t) {
      return round_two(scaled_number(first_of(two), scale), scaled_number(second_of(two), scale));
    });
  } else {
    for (int l = 0; l < n; ++l) y[l] = T::from_f32_number(scaled_number(T::to_f32(y[l]), scale));
  }
}

}  // namespace S24_ISA
}  // namespace s24
