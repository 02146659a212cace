// The handler of the product of a 2:4 matrix and a dense one by our own kernels.
#include "../call/matmul.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error Matmul(cudaStream_t stream, int64_t dense_k_last, int64_t out_packed_last, ffi::AnyBuffer values,
                  ffi::AnyBuffer metadata, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  const MatmulCall p = MatmulCall::of("s24_matmul", dense_k_last, out_packed_last, values, metadata, dense, *out);
  if (p.error.failure()) return p.error;
  if (p.empty()) return ffi::Error::Success();
  if (p.args.depth == 0)
    return status("s24_matmul", cudaMemsetAsync(p.args.out, 0, size_t(p.batch.count() * p.out_bytes()), stream));
  for (int64_t b = 0; b < p.batch.count(); ++b) {
    const MatmulArgs a = p.at(b);
    const cudaError_t e = a.in == Dtype::kF32 ? launch_matmul_f32(a, stream) : launch_matmul(a, stream);
    if (e != cudaSuccess) return status("s24_matmul", e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_matmul", Matmul, on_stream(takes<3>, gives<1>, "dense_k_last", "out_packed_last"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
