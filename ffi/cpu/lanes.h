// Blocks of groups as lanes: member j of kLanes groups becomes one contiguous row of a Quad, so that the scalar
// definitions of ffi/core, called in a loop over lanes, become vector code.
//
// Everything lives in the namespace of the instruction set: nothing may be merged across them.
#pragma once
#include "../core/arguments.h"
#include "kernels.h"
#include "vectors.h"

namespace s24 {
namespace S24_ISA {

// The key of an operation that draws; of others, which have none, zeros.
S24_HD Key read_key(const Draws& draws) { return draws.words == nullptr ? Key{} : draws.key(draws.words); }

// Groups of one block: a Quad is four registers.
template <class B>
constexpr int kLanes = int(sizeof(Vec) / sizeof(B));

template <class B>
struct Quad {
  alignas(64) B at[4][kLanes<B>];
};

// Calls f(first group, offset of its first element, count) for blocks of at most kCount of the groups [begin, end), none
// of which crosses a row.
template <int kCount, bool kRows, class F>
S24_HD void for_blocks(const Groups& g, int64_t begin, int64_t end, F f) {
  if (kRows) {
    for (int64_t q = begin; q < end; q += kCount) f(q, 4 * q, end - q < kCount ? end - q : int64_t{kCount});
    return;
  }
  for (int64_t q = begin; q < end;) {
    const int64_t row = q / g.inner, stop = (row + 1) * g.inner < end ? (row + 1) * g.inner : end;
    for (; q < stop; q += kCount)
      f(q, row * 3 * g.inner + q, stop - q < kCount ? stop - q : int64_t{kCount});
    q = stop;
  }
}

// If kRows, the members of a group are neighbours in memory. Otherwise the members j of neighbouring groups are, and lie `step`
// elements after their members j - 1.
template <bool kRows, bool kOrdered, class B>
S24_HD void load_block(const B* p, int64_t step, Quad<B>& v) {
  Vec a[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) __builtin_memcpy(&a[j], p + j * (kRows ? kLanes<B> : step), sizeof(Vec));
  if (kRows) split_groups<sizeof(B), kOrdered>(a);
  __builtin_memcpy(v.at, a, sizeof a);
}

template <bool kRows, bool kOrdered, class B>
S24_HD void store_block(B* p, int64_t step, const Quad<B>& v) {
  Vec a[4];
  __builtin_memcpy(a, v.at, sizeof a);
  if (kRows) join_groups<sizeof(B), kOrdered>(a);
  S24_UNROLL
  for (int j = 0; j < 4; ++j) __builtin_memcpy(p + j * (kRows ? kLanes<B> : step), &a[j], sizeof(Vec));
}

// Calls f(group, result) for each lane.
template <class B, class F>
S24_HD void for_lanes(const Quad<B>& in, Quad<B>& out, F f) {
  for (int l = 0; l < kLanes<B>; ++l) {
    const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
    B y[4];
    f(x, y);
    for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
  }
}

// out = f(a, b) on words of two elements.
template <int kCount, class F>
S24_HD void for_words(const uint16_t (&a)[kCount], const uint16_t (&b)[kCount], uint16_t (&out)[kCount], F f) {
  alignas(64) uint32_t x[kCount / 2], y[kCount / 2];
  __builtin_memcpy(x, a, sizeof x);
  __builtin_memcpy(y, b, sizeof y);
  for (int l = 0; l < kCount / 2; ++l) x[l] = f(x[l], y[l]);
  __builtin_memcpy(out, x, sizeof x);
}

// Copies n groups.
template <bool kRows, class B>
S24_HD void copy_groups(const B* from, int64_t from_step, int64_t n, B* to, int64_t to_step) {
  if (kRows) {
    __builtin_memcpy(to, from, size_t(4 * n) * sizeof(B));
  } else {
    for (int j = 0; j < 4; ++j) __builtin_memcpy(to + j * to_step, from + j * from_step, size_t(n) * sizeof(B));
  }
}

}  // namespace S24_ISA
}  // namespace s24
