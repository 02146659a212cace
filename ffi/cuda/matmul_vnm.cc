// The handler of the product of a V:N:M matrix and a dense one.
#include "../call/matmul_vnm.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error VnmMatmul(cudaStream_t stream, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                     ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::AnyBuffer dense,
                     ffi::Result<ffi::AnyBuffer> out) {
  const MatmulVnmCall c = MatmulVnmCall::of("s24_vnm_matmul", v, m, dense_k_last, out_packed_last,
                                      {values, metadata, columns}, dense, *out);
  if (c.error.failure()) return c.error;
  if (c.empty()) return ffi::Error::Success();
  const MatmulArgs& p = c.args.product;
  if (p.depth == 0) return status(c.target, cudaMemsetAsync(p.out, 0, size_t(c.batch.count() * c.out_bytes()), stream));
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const MatmulVnmArgs a = c.at(b);
    const cudaError_t e = p.in == Dtype::kF32 ? launch_matmul_vnm_f32(a, stream) : launch_matmul_vnm(a, stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_vnm_matmul", VnmMatmul, on_stream(takes<4>, gives<1>, "v", "m", "dense_k_last", "out_packed_last"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
