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

// A random key, and the numbers that the groups of an array have. An array may be a shard of a larger one, in which its groups
// are counted.
struct Key {
  uint32_t k0, k1;
  uint64_t first, others, width;  // the number of the first group; groups of other shards between two rows; groups of a row

  S24_HD uint64_t number(uint64_t group, uint64_t row) const { return first + group + row * others; }
  S24_HD uint64_t number(uint64_t group) const { return others == 0 ? first + group : number(group, group / width); }
};

constexpr int kKeyWords = 2, kShardWords = 5;

// By what an operation draws. words: of a key, in memory of the device; of a shard three more: its number among the shards from
// above and from the left, and how many of them stand side by side.
struct Draws {
  const uint32_t* words = nullptr;
  bool shard = false;
  int64_t width = 0, count = 0;  // groups of a row, and of the array

  // Whether the numbers of every four groups are a quartet, as they are in an array that is no shard.
  S24_HD bool in_quartets() const { return !shard || width % 4 == 0; }
  S24_HD Key key(const uint32_t w[kShardWords]) const {
    if (!shard) return {w[0], w[1], 0, 0, 0};
    const uint64_t row = uint64_t(width), across = w[4];
    return {w[0], w[1], w[2] * across * uint64_t(count) + w[3] * row, (across - 1) * row, row};
  }
};

enum class GroupwiseOp : int32_t { kMask, kPrune, kSoft, kMvueExact, kMvueSequential };

// Groups of x -> groups of an array of the same shape, of bytes for kMask. Groups are counted in row-major order; a group
// draws the random words of its number, see Key.
struct GroupwiseArgs {
  GroupwiseOp op;
  Dtype dtype;
  const void* x;
  void* out;
  Groups groups;
  Draws draws = {};             // of operations that draw
  const void* scale = nullptr;  // of kSoft: one element
};

}  // namespace s24
