// FFI handler of the product of a packed and a dense matrix by cuSPARSELt.
//
// Its compressed matrix is the values and then the metadata in an order of its own, in one buffer: both are written there
// before the product. That buffer and the workspace are results, so that nothing is allocated here.
#include "cusparselt.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

PlanKey plan_key(const MatmulArgs& a, int32_t device, int64_t algorithm) {
  return {device, a.rows, a.depth, a.cols, a.dense_k_last, a.out_packed_last, a.in == Dtype::kF16, algorithm};
}

ffi::Error check_product(const Product& p) {
  if (p.error.failure()) return p.error;
  Check check("s24_cusparselt_matmul");
  check.require(p.args.in != Dtype::kF32 && p.args.out_dtype == p.args.in, "operands and result must be bfloat16 or float16");
  check.require(p.args.depth % 32 == 0, "K must be a multiple of 32, got " + std::to_string(p.args.depth));
  return check.ok() ? ffi::Error::Success() : check.error();
}

ffi::Error Initialize(int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t algorithm,
                      ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer dense,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> compressed,
                      ffi::Result<ffi::AnyBuffer> workspace) {
  const Product p = Product::of("s24_cusparselt_matmul", dense_k_last != 0, out_packed_last != 0, values, metadata, dense,
                                *out);
  ffi::Error error = check_product(p);
  if (error.failure() || p.empty() || p.args.depth == 0) return error;
  const Needs needs = cusparselt_needs(plan_key(p.args, device, algorithm));
  if (!needs.error.empty()) return ffi::Error::Internal("s24_cusparselt_matmul: " + needs.error);
  Check check("s24_cusparselt_matmul");
  check.require(int64_t(compressed->size_bytes()) >= needs.compressed,
                "the compressed matrix needs " + std::to_string(needs.compressed) + " bytes, got " +
                    std::to_string(compressed->size_bytes()));
  check.require(int64_t(workspace->size_bytes()) >= needs.workspace,
                "the workspace needs " + std::to_string(needs.workspace) + " bytes, got " +
                    std::to_string(workspace->size_bytes()));
  return check.ok() ? ffi::Error::Success() : check.error();
}

ffi::Error Execute(cudaStream_t stream, int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t algorithm,
                   ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out,
                   ffi::Result<ffi::AnyBuffer> compressed, ffi::Result<ffi::AnyBuffer> workspace) {
  constexpr const char* kName = "s24_cusparselt_matmul";
  const Product p = Product::of(kName, dense_k_last != 0, out_packed_last != 0, values, metadata, dense, *out);
  ffi::Error error = check_product(p);
  if (error.failure() || p.empty()) return error;
  if (p.args.depth == 0)
    return status(kName, cudaMemsetAsync(p.args.out, 0, size_t(p.batch.count() * p.out_bytes()), stream));
  const PlanKey key = plan_key(p.args, device, algorithm);
  auto* const buffer = static_cast<uint8_t*>(compressed->untyped_data());
  const size_t value_bytes = size_t(p.args.rows * (p.args.depth / 2) * size_of(p.args.in));
  int64_t values_in = -1, metadata_in = -1;  // batch elements that the buffer holds
  for (int64_t b = 0; b < p.batch.count(); ++b) {
    const MatmulArgs a = p.at(b);
    if (p.batch.index(0, b) != values_in) {
      values_in = p.batch.index(0, b);
      const cudaError_t e = cudaMemcpyAsync(buffer, a.values, value_bytes, cudaMemcpyDeviceToDevice, stream);
      if (e != cudaSuccess) return status(kName, e);
    }
    if (p.batch.index(1, b) != metadata_in) {
      metadata_in = p.batch.index(1, b);
      const cudaError_t e = launch_metadata_sm90(a.metadata, buffer + value_bytes, a.rows, a.depth, stream);
      if (e != cudaSuccess) return status(kName, e);
    }
    const std::string why = cusparselt_matmul(key, buffer, a.dense, a.out, workspace->untyped_data(), stream);
    if (!why.empty()) return ffi::Error::Internal(std::string(kName) + ": " + why);
  }
  return ffi::Error::Success();
}

#define S24_OPERANDS                   \
  Ctx<ffi::DeviceOrdinal>()            \
      .Attr<int64_t>("dense_k_last")   \
      .Attr<int64_t>("out_packed_last") \
      .Attr<int64_t>("algorithm")      \
      .Arg<ffi::AnyBuffer>()           \
      .Arg<ffi::AnyBuffer>()           \
      .Arg<ffi::AnyBuffer>()           \
      .Ret<ffi::AnyBuffer>()           \
      .Ret<ffi::AnyBuffer>()           \
      .Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, ffi::Ffi::BindInitialize().S24_OPERANDS);
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ffi::Ffi::Bind().Ctx<Stream>().S24_OPERANDS,
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const Target kCusparseltTargets[] = {{"s24_cusparselt_matmul", kExecute, kInitialize}, {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
