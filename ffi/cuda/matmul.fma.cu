// out(R, N) = P(R, K) D(K, N) on sparse tensor cores, bfloat16 and float16, P packed 2:4.
#include "matmul_sp.cuh"

namespace s24 {
namespace cuda {

cudaError_t launch_matmul(const MatmulArgs& a, cudaStream_t stream) {
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
