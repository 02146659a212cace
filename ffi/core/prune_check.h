// Whether a group of four has more than two non-zeros, which the 2:4 pattern forbids.
#pragma once
#include "arguments.h"

namespace s24 {

// 1 or 0, for elements whose sign, if they have one, is the highest bit: floats, of which NaN and subnormals are not zero and
// -0 is, and bytes that are 0 or 1.
// The non-zeros are combined as masks and not counted: GCC 12 adds 16-bit comparisons up wrongly from -O2 on.
template <class B>
S24_HD B more_than_two(const B x[4]) {
  constexpr B kMagnitude = B(B(-1) >> 1);
  B is[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) is[i] = mask_if<B>((x[i] & kMagnitude) != 0);
  return B(((is[0] & is[1] & (is[2] | is[3])) | (is[2] & is[3] & (is[0] | is[1]))) & 1);
}

// Adds to `found` how many groups of x have more than two non-zeros.
struct PruneCheckArgs {
  int64_t width;  // of an element, in bytes: 4, 2, or 1 for bool
  const void* x;
  int32_t* found;
  Groups groups;
};

}  // namespace s24
