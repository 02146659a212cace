// What the arguments of kernels are made of.
//
// The header of an operation defines the arguments of its kernel beside its bits. A kernel sees contiguous memory of its own
// device, keys too. It knows nothing of XLA, of threads or of streams; handlers (ffi/call) make its arguments from checked
// buffers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "base.h"

namespace s24 {

S24_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Dtype : int32_t { kF32, kBF16, kF16 };

S24_HD int64_t size_of(Dtype d) { return d == Dtype::kF32 ? 4 : 2; }

// An array seen as (outer, len, inner), with groups of four along len.
struct Groups {
  int64_t outer, len, inner;
  S24_HD int64_t count() const { return outer * (len / 4) * inner; }
};

// The two words of a random key.
struct Key {
  uint32_t k0, k1;
};

enum class GroupwiseOp : int32_t { kMask, kPrune, kSoft, kMvueExact, kMvueSequential };

// Groups of x -> groups of an array of the same shape, of bytes for kMask. Groups are counted in row-major order; a group
// draws the random words of its number.
struct GroupwiseArgs {
  GroupwiseOp op;
  Dtype dtype;
  const void* x;
  void* out;
  Groups groups;
  const uint32_t* key = nullptr;  // two words, of operations that draw
};

}  // namespace s24
