// out(R, N) = P(R, K) D(K, N) on sparse tensor cores, bfloat16 and float16, P packed 2:4.
#include "matmul_sp.cuh"

namespace s24 {
namespace cuda {

cudaError_t launch_matmul(const MatmulArgs& a, cudaStream_t stream) {
  return for_product(a, [&](auto type, auto dense_k_last, auto whole) {
    return launch_matmul_sp<decltype(type), kTile, dense_k_last.value, whole.value>(a, EveryColumn(), stream);
  });
}

}  // namespace cuda
}  // namespace s24
