// Blocks of groups, packed and unpacked lane by lane.
#pragma once
#include "../core/packed24.h"
#include "../core/select.h"
#include "../core/squared_relu.h"
#include "lanes.h"

namespace s24 {
namespace S24_ISA {

// One block of groups in packed form. B: the bits of an element.
template <class B>
struct Packed {
  alignas(64) B pairs[2][kLanes<B>];
  alignas(64) B nibbles[kLanes<B>];
};

// Packs one lane: x, with its mask or, for kGather, its nibble, gives the kept pair and the nibble.
template <class T, PackOp kOp>
S24_HD void pack_lane(typename T::Bits x[4], const typename T::Bits allowed[4], typename T::Bits& nibble,
                      typename T::Bits pair[2]) {
  using Bits = typename T::Bits;
  if (kOp == PackOp::kGather) return take_nibble(x, nibble, pair);
  if (kOp == PackOp::kSquaredRelu) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = squared_relu<T>(x[j]);
  }
  Bits keep[4];
  if (kOp == PackOp::kMasked) {
    keep24_masked<T>(x, allowed, keep);
  } else {
    keep24<T>(x, keep);
  }
  nibble = nibble_of(keep);
  take_kept(x, keep, pair);
}

template <class T, PackOp kOp>
S24_HD void pack_block(const Quad<typename T::Bits>& in, const Quad<typename T::Bits>& allowed,
                       Packed<typename T::Bits>& out) {
  using Bits = typename T::Bits;
  S24_LOOP
  for (int l = 0; l < kLanes<Bits>; ++l) {
    Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
    const Bits m[4] = {allowed.at[0][l], allowed.at[1][l], allowed.at[2][l], allowed.at[3][l]};
    Bits nibble = out.nibbles[l], pair[2];
    pack_lane<T, kOp>(x, m, nibble, pair);
    out.nibbles[l] = nibble;
    out.pairs[0][l] = pair[0];
    out.pairs[1][l] = pair[1];
  }
}

template <class T>
S24_HD void unpack_block(const Packed<typename T::Bits>& in, Quad<typename T::Bits>& out) {
  using Bits = typename T::Bits;
  for (int l = 0; l < kLanes<Bits>; ++l) {
    const Bits pair[2] = {in.pairs[0][l], in.pairs[1][l]};
    Bits x[4];
    put_nibble(pair, in.nibbles[l], x);
    for (int j = 0; j < 4; ++j) out.at[j][l] = x[j];
  }
}

// ---- the group axis is the last one

template <class B>
S24_HD void store_pairs(const Packed<B>& p, B* v) {
  for (int l = 0; l < kLanes<B>; ++l) {
    v[2 * l] = p.pairs[0][l];
    v[2 * l + 1] = p.pairs[1][l];
  }
}

template <class B>
S24_HD void load_pairs(const B* v, Packed<B>& p) {
  for (int l = 0; l < kLanes<B>; ++l) {
    p.pairs[0][l] = v[2 * l];
    p.pairs[1][l] = v[2 * l + 1];
  }
}

constexpr int kRow = 64;  // groups of a row that are treated at a time

S24_HD void load_nibbles(const uint8_t* bytes, int64_t n, uint8_t nibbles[kRow]) {
  uint8_t b[kRow / 2] = {};
  __builtin_memcpy(b, bytes, n == kRow ? sizeof b : size_t((n + 1) / 2));
  for (int i = 0; i < kRow / 2; ++i) {
    nibbles[2 * i] = b[i] & 0xf;
    nibbles[2 * i + 1] = b[i] >> 4;
  }
}

}  // namespace S24_ISA
}  // namespace s24
