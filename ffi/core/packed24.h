// The nibble of a group: idx0 | idx1 << 2 with idx0 < idx1, the positions of the two kept elements.
// A metadata byte holds the nibble of group 2b in its low half and of group 2b+1 in the high half.
#pragma once
#include "arguments.h"

namespace s24 {

constexpr uint8_t kEmptyNibble = 0x4;  // positions 0 and 1: what stands for a group that does not exist

// keep: masks of which exactly two are set.
template <class K>
S24_HD K nibble_of(const K keep[4]) {
  const K low = K(~keep[0] & (K(2) ^ (K(3) & keep[1])));                // 0, 1 or 2
  const K high = K((K(12) & keep[3]) | (K(4) ^ (K(12) & keep[2])));  // 3, 2 or 1, times 4
  return K(low | high);
}

// The kept pair, in index order.
template <class B>
S24_HD void take_kept(const B x[4], const B keep[4], B pair[2]) {
  pair[0] = merge(keep[0], x[0], merge(keep[1], x[1], x[2]));
  pair[1] = merge(keep[3], x[3], merge(keep[2], x[2], x[1]));
}

template <class B>
S24_HD B take_one(const B x[4], B index) {
  const B odd = mask_if<B>((index & B(1)) != 0);
  return merge(mask_if<B>((index & B(2)) != 0), merge(odd, x[3], x[2]), merge(odd, x[1], x[0]));
}

// The elements at the positions that a nibble names.
template <class B>
S24_HD void take_nibble(const B x[4], B nibble, B pair[2]) {
  pair[0] = take_one(x, B(nibble & B(3)));
  pair[1] = take_one(x, B((nibble >> 2) & B(3)));
}

// Inverse of take_nibble: zeros elsewhere.
template <class B>
S24_HD void put_nibble(const B pair[2], B nibble, B x[4]) {
  const B first = B(nibble & B(3)), second = B((nibble >> 2) & B(3));
  S24_UNROLL
  for (int i = 0; i < 4; ++i)
    x[i] = merge(mask_if<B>(second == B(i)), pair[1], B(pair[0] & mask_if<B>(first == B(i))));
}

enum class PackOp : int32_t { kPlain, kMasked, kSquaredRelu, kMvueExact, kMvueSequential, kGather, kUnpack, kSoft };

// dense (outer, len, inner) <-> values (outer, inner, len/2), metadata (outer, inner, ceil(len/8)). kUnpack writes dense and
// reads both others; kGather reads dense and metadata and writes values; the other operations write values and metadata.
struct PackArgs {
  PackOp op;
  Dtype dtype;
  void* dense;
  const uint8_t* mask;
  void* values;
  uint8_t* metadata;
  Groups groups;
  Draws draws = {};             // of operations that draw
  const void* scale = nullptr;  // of kSoft: one element
  // Only on CUDA: whether members of a group are a quarter of the axis apart, and not neighbours; and unless behind is null,
  // where the metadata of a packed matrix (rows, depth) go too, in cuSPARSELt's order.
  bool strided = false;
  uint8_t* behind = nullptr;
  int64_t rows = 0, depth = 0;
};

}  // namespace s24
