// out(R, N) = P(R, K) D(K, N) on sparse tensor cores, bfloat16 and float16, P packed V:2:M: the 2:4 product of the columns
// that a block of V rows keeps with the rows of D that belong to them, which are gathered on their way into shared memory.
//
// The rows of one block of threads share their columns. A kernel for Hopper's wgmma would take its place in
// launch_vnm_matmul, for v of 128 and 256; the table of columns and the packed form are the same.
#include "matmul_sp.cuh"

namespace s24 {
namespace cuda {

cudaError_t launch_vnm_matmul(const VnmMatmulArgs& args, cudaStream_t stream) {
  MatmulArgs a = args.product;
  a.depth = a.depth / args.m * 4;  // of P as it is stored
  const GatheredColumns columns = {args.columns, int(args.v), int(args.m)};
  return for_product(a, [&](auto type, auto dense_k_last, auto whole) {
    using T = decltype(type);
    if (args.v % 128 == 0) return launch_matmul_sp<T, 128, dense_k_last.value, whole.value>(a, columns, stream);
    if (args.v % 64 == 0) return launch_matmul_sp<T, 64, dense_k_last.value, whole.value>(a, columns, stream);
    return launch_matmul_sp<T, 16, dense_k_last.value, whole.value>(a, columns, stream);
  });
}

}  // namespace cuda
}  // namespace s24
