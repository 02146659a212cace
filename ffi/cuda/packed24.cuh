// What packing does to one group, for both ways that groups lie.
#pragma once
#include "mvue.cuh"
#include "simt/soft.h"

namespace s24 {
namespace cuda {

template <PackOp op>
constexpr int kDraws = op == PackOp::kMvueExact ? 1 : op == PackOp::kMvueSequential ? 2 : 0;

// Two kept elements in one access.
template <class Bits>
struct alignas(2 * sizeof(Bits)) Pair {
  Bits at[2];
};

// A group in registers: four elements, or two words of two 16-bit elements.
template <class T>
struct Group {
  typename T::Bits x[4];
  static __device__ __forceinline__ Group of(const typename T::Bits x[4]) { return {{x[0], x[1], x[2], x[3]}}; }
};
template <>
struct Group<BF16> : Words {
  static __device__ __forceinline__ Group of(const uint16_t x[4]) { return {words_of(x)}; }
};
template <>
struct Group<F16> : Words {
  static __device__ __forceinline__ Group of(const uint16_t x[4]) { return {words_of(x)}; }
};

// The two kept elements of a group and their nibble. with: of kMasked, a byte per element, and of kSoft the float32 bits of the
// scale; nibble: what kGather is given.
template <PackOp op, class T>
__device__ __forceinline__ uint32_t encode(const Group<T>& group, uint32_t with, uint32_t nibble,
                                           const Draw<kDraws<op>>& draw, Pair<typename T::Bits>& pair) {
  using Bits = typename T::Bits;
  if constexpr (sizeof(Bits) == 2) {
    PackedGroup kept;
    if constexpr (op == PackOp::kGather) {
      kept = take_nibble(group, nibble);
    } else if constexpr (op == PackOp::kMasked) {
      kept = pack_by_mask<T>(group, with);
    } else if constexpr (op == PackOp::kSquaredRelu) {
      kept = pack_squared_relu<T>(group);
    } else if constexpr (op == PackOp::kSoft) {
      kept = pack_soft<T>(group, float_of(with));
    } else if constexpr (kDraws<op> > 0) {
      kept = pack_estimate<T, op == PackOp::kMvueExact>(group, draw.words[0], draw.words[1]);
    } else {
      kept = pack_largest<T>(group);
    }
    __builtin_memcpy(&pair, &kept.bits, sizeof pair);
    return kept.nibble;
  } else if constexpr (op == PackOp::kGather) {
    take_nibble<Bits>(group.x, Bits(nibble), pair.at);
    return nibble;
  } else {
    Bits x[4] = {group.x[0], group.x[1], group.x[2], group.x[3]}, keep[4];
    if constexpr (op == PackOp::kMasked) {
      const Bits allowed[4] = {with & 0xff, with >> 8 & 0xff, with >> 16 & 0xff, with >> 24};
      keep24_masked<T>(x, allowed, keep);
    } else {
      if constexpr (op == PackOp::kSquaredRelu) {
        S24_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = squared_relu<T>(x[i]);
      } else if constexpr (op == PackOp::kSoft) {
        soft24<T>(group.x, x);
      } else if constexpr (kDraws<op> > 0) {
        Bits y[4];
        mvue24<T, op == PackOp::kMvueExact>(x, draw.words[0], draw.words[1], y);
        S24_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = y[i];
      }
      keep24<T>(x, keep);
    }
    take_kept<Bits>(x, keep, pair.at);
    if constexpr (op == PackOp::kSoft) pair = {scaled<T>(pair.at[0], float_of(with)), scaled<T>(pair.at[1], float_of(with))};
    return uint32_t(nibble_of<Bits>(keep)) & 15u;
  }
}

// What needs no more than the two largest.
template <PackOp op>
constexpr bool kLargest = op == PackOp::kPlain || op == PackOp::kSquaredRelu;

template <PackOp op, class T>
constexpr bool kChoose = kDraws<op> > 0 && sizeof(typename T::Bits) == 2;

// Packs the estimates of four groups that share a call of Philox, see choose_four. Returns their nibbles, each in the low half
// of a byte.
template <class T, int kDraws, class F>
__device__ __forceinline__ uint32_t encode_four(const Numbers (&numbers)[4], const QuartetDraw<kDraws>& draws, F group,
                                                Pair<uint16_t> (&pairs)[4]) {
  Chosen chosen[4];
  choose_four<T>(numbers, draws, group, chosen);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&pairs[i], &chosen[i].bits, sizeof pairs[i]);
  return nibbles_of(chosen);
}

// The inverse of encode, for kUnpack.
template <class T>
__device__ __forceinline__ Group<T> decode(const Pair<typename T::Bits>& pair, uint32_t nibble) {
  if constexpr (sizeof(typename T::Bits) == 2) {
    return {put_nibble(PackedGroup{nibble, uint32_t(pair.at[0]) | uint32_t(pair.at[1]) << 16})};
  } else {
    Group<T> group;
    put_nibble<typename T::Bits>(pair.at, nibble, group.x);
    return group;
  }
}

template <class T>
__device__ __forceinline__ typename T::Bits member(const Group<T>& group, int i) {
  if constexpr (sizeof(typename T::Bits) == 2)
    return typename T::Bits((i < 2 ? group.low : group.high) >> (i % 2 * 16));
  else
    return group.x[i];
}

// Packing where groups lie along a strided axis, in whole tiles, and whether that is so.
cudaError_t launch_pack_columns(const PackArgs& args, cudaStream_t stream);
bool fits_columns(const PackArgs& args);

template <template <PackOp, class> class Launch>
cudaError_t for_pack(const PackArgs& a, cudaStream_t stream) {
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    switch (a.op) {
      case PackOp::kPlain: return Launch<PackOp::kPlain, T>::run(a, stream);
      case PackOp::kMasked: return Launch<PackOp::kMasked, T>::run(a, stream);
      case PackOp::kSquaredRelu: return Launch<PackOp::kSquaredRelu, T>::run(a, stream);
      case PackOp::kMvueExact: return Launch<PackOp::kMvueExact, T>::run(a, stream);
      case PackOp::kMvueSequential: return Launch<PackOp::kMvueSequential, T>::run(a, stream);
      case PackOp::kGather: return Launch<PackOp::kGather, T>::run(a, stream);
      case PackOp::kUnpack: return Launch<PackOp::kUnpack, T>::run(a, stream);
      case PackOp::kSoft: return Launch<PackOp::kSoft, T>::run(a, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace cuda
}  // namespace s24
