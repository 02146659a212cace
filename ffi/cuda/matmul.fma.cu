// The product of a 2:4 matrix and a dense one on sparse tensor cores, in bfloat16 and float16.
//
// Operands: out (R, N) = P (R, K) D (K, N), or out^T or D^T as the flags say; P is packed along K as values and metadata.
// Steps: those of matmul.cuh with every column of P in its own place.
// Constraints: sm_80 or later. Operands that are not whole accesses of 16 bytes are read element by element.
#include "matmul.cuh"

namespace s24 {
namespace cuda {

template <>
cudaError_t run(const MatmulArgs& a, cudaStream_t stream) {
  if (a.in == Dtype::kF32) return launch_matmul_f32(a, stream);
  const bool whole = whole_accesses(a);
  return for_type(a.in, [&](auto type) {
    using T = decltype(type);
    if (a.dense_k_last)
      return whole ? launch_matmul_sp<T, kTile, true, true>(a, EveryColumn(), stream)
                   : launch_matmul_sp<T, kTile, true, false>(a, EveryColumn(), stream);
    return whole ? launch_matmul_sp<T, kTile, false, true>(a, EveryColumn(), stream)
                 : launch_matmul_sp<T, kTile, false, false>(a, EveryColumn(), stream);
  });
}

}  // namespace cuda
}  // namespace s24
