// What packing does to one group, for both ways that groups lie.
#pragma once
#include "../core/metadata.h"
#include "../core/mvue.h"
#include "../core/squared_relu.h"
#include "vectors.cuh"

namespace s24 {
namespace cuda {

template <PackOp op>
constexpr bool kHeavy = op == PackOp::kMvueExact || op == PackOp::kMvueSequential;

// The two kept elements of a group and their nibble. mask: of kMasked; nibble: what kGather is given.
template <PackOp op, class T>
__device__ __forceinline__ uint32_t encode(typename T::Bits x[4], const uint8_t mask[4], uint32_t nibble, Key key,
                                           int64_t group, typename T::Bits pair[2]) {
  using Bits = typename T::Bits;
  if constexpr (op == PackOp::kGather) {
    take_nibble<Bits>(x, Bits(nibble), pair);
    return nibble;
  } else {
    Bits keep[4];
    if constexpr (op == PackOp::kMasked) {
      keep24_masked<T>(x, mask, keep);
    } else {
      if constexpr (op == PackOp::kSquaredRelu) {
        S24_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = squared_relu<T>(x[i]);
      } else if constexpr (kHeavy<op>) {
        uint32_t words[4];
        Bits y[4];
        group_words(key.k0, key.k1, uint64_t(group), words);
        mvue24<T, op == PackOp::kMvueExact>(x, words[0], words[1], y);
        S24_UNROLL
        for (int i = 0; i < 4; ++i) x[i] = y[i];
      }
      keep24<T>(x, keep);
    }
    take_kept<Bits>(x, keep, pair);
    return uint32_t(nibble_of<Bits>(keep)) & 15u;
  }
}

template <template <PackOp, class> class Launch>
cudaError_t for_pack(const PackArgs& a, const uint32_t* key, cudaStream_t stream) {
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    switch (a.op) {
      case PackOp::kPlain: return Launch<PackOp::kPlain, T>::run(a, key, stream);
      case PackOp::kMasked: return Launch<PackOp::kMasked, T>::run(a, key, stream);
      case PackOp::kSquaredRelu: return Launch<PackOp::kSquaredRelu, T>::run(a, key, stream);
      case PackOp::kMvueExact: return Launch<PackOp::kMvueExact, T>::run(a, key, stream);
      case PackOp::kMvueSequential: return Launch<PackOp::kMvueSequential, T>::run(a, key, stream);
      case PackOp::kGather: return Launch<PackOp::kGather, T>::run(a, key, stream);
      case PackOp::kUnpack: return Launch<PackOp::kUnpack, T>::run(a, key, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace cuda
}  // namespace s24
