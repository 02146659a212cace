// FFI handler of the product of a packed and a dense matrix by our own kernels.
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

XLA_FFI_DEFINE_HANDLER(kMatmul, Matmul,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("dense_k_last")
                           .Attr<int64_t>("out_packed_last")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const Target kMatmulTargets[] = {{"s24_matmul", kMatmul, nullptr}, {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
