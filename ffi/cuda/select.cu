// Masks and pruned arrays: two of four by magnitude.
//
// Operands: x and a mask (bytes 0 or 1) or a pruned array of its shape; groups of four along any axis.
// Steps: groupwise.cuh loads groups, `apply` selects, and the result is stored.
// Constraints: those of groupwise.cuh, which takes any shape.
#include "groupwise.cuh"
#include "simt/select.h"

namespace s24 {
namespace cuda {
namespace {

template <GroupwiseOp op, class T>
__device__ __forceinline__ void apply(const typename T::Bits x[4], const Draw<kDraws<op>>&, Out<op, T> y[4]) {
  if constexpr (op == GroupwiseOp::kMask && sizeof(typename T::Bits) == 2) {
    const uint32_t bytes = top_two_of<T>(words_of(x)).bytes();
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint8_t(bytes >> (8 * i));
  } else if constexpr (op == GroupwiseOp::kMask) {
    typename T::Bits keep[4];
    keep24<T>(x, keep);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint8_t(keep[i] & 1);
  } else {
    prune24<T>(x, y);
  }
}

}  // namespace

template <>
cudaError_t run(const SelectArgs& a, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.op == GroupwiseOp::kMask) return launch_groups<GroupwiseOp::kMask, T>(a, stream);
    return launch_groups<GroupwiseOp::kPrune, T>(a, stream);
  });
}

}  // namespace cuda
}  // namespace s24
