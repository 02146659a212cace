// FFI handler of the product of a packed and a dense matrix by cuSPARSELt.
//
// Its compressed matrix is the values and then the metadata in an order of its own, in one buffer: both are written there
// before the product. That buffer and the workspace are results, so that nothing is allocated here.
#include "cusparselt.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

constexpr const char* kName = "s24_cusparselt_matmul";

cudaDataType type_of(Dtype d) { return d == Dtype::kF32 ? CUDA_R_32F : d == Dtype::kF16 ? CUDA_R_16F : CUDA_R_16BF; }

// A call: a product with what the library makes of its result.
struct LibraryCall {
  Product product;
  PlanKey key;
  const void* bias = nullptr;  // one number per row of the packed operand; of all elements of the batch, or of each
  Batch bias_batch = Batch({}, {});
  ffi::Error error = ffi::Error::Success();

  explicit LibraryCall(const Product& p) : product(p) {}

  static LibraryCall of(int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t activation,
                        int64_t algorithm, const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata,
                        const ffi::AnyBuffer& dense, const ffi::RemainingArgs& rest, const ffi::AnyBuffer& out) {
    Dims bias_dims, bias_lead;
    const bool biased = rest.size() > 0;
    if (biased) {
      bias_dims = dims_of(*rest.get<ffi::AnyBuffer>(0));
      bias_lead = leading(bias_dims, 1);
    }
    LibraryCall c(Product::of(kName, dense_k_last != 0, out_packed_last != 0, values, metadata, dense, out, true,
                              biased ? &bias_lead : nullptr));
    const Product& p = c.product;
    if (p.error.failure()) return c.error = p.error, c;
    const MatmulArgs& a = p.args;
    Check check(kName);
    check.require(p.float8 || (a.in != Dtype::kF32 && a.out_dtype == a.in),
                  "operands and result must be bfloat16 or float16, or operands float8_e4m3fn");
    const int64_t multiple = p.float8 ? 64 : 32;
    check.require(a.depth % multiple == 0,
                  "K must be a multiple of " + std::to_string(multiple) + ", got " + std::to_string(a.depth));
    check.require(!p.float8 || dense_k_last != 0, "float8_e4m3fn needs both operands contiguous along K");
    if (biased) {
      const ffi::AnyBuffer bias = *rest.get<ffi::AnyBuffer>(0);
      check.require(!bias_dims.empty() && bias_dims.back() == a.rows,
                    "bias has shape " + text(bias_dims) + ", the packed operand has " + std::to_string(a.rows) + " rows");
      check.require(check.dtype("bias", bias) == a.out_dtype, "bias must have the dtype of the result");
      c.bias = bias.untyped_data();
      c.bias_batch = Batch(p.lead, {bias_lead}, p.lead.size());
    }
    c.key = {device, a.rows, a.depth, a.cols, a.dense_k_last, a.out_packed_last, p.float8 ? CUDA_R_8F_E4M3 : type_of(a.in),
             type_of(a.out_dtype), Epilogue(activation), c.bias, algorithm};
    if (!check.ok()) c.error = check.error();
    return c;
  }

  PlanKey key_at(int64_t b) const {
    PlanKey k = key;
    if (bias != nullptr) k.bias = at_bytes(bias, bias_batch.index(0, b) * key.rows * size_of(product.args.out_dtype));
    return k;
  }
};

ffi::Error Initialize(int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t activation, int64_t algorithm,
                      ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer dense, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> compressed,
                      ffi::Result<ffi::AnyBuffer> workspace) {
  const LibraryCall c = LibraryCall::of(device, dense_k_last, out_packed_last, activation, algorithm, values, metadata,
                                        dense, rest, *out);
  if (c.error.failure() || c.product.empty() || c.key.depth == 0) return c.error;
  Check check(kName);
  for (int64_t b = 0; b < (c.bias == nullptr ? 1 : c.product.batch.count()); ++b) {
    const Needs needs = cusparselt_needs(c.key_at(b));
    if (!needs.error.empty()) return ffi::Error::Internal(std::string(kName) + ": " + needs.error);
    check.require(int64_t(compressed->size_bytes()) >= needs.compressed,
                  "the compressed matrix needs " + std::to_string(needs.compressed) + " bytes, got " +
                      std::to_string(compressed->size_bytes()));
    check.require(int64_t(workspace->size_bytes()) >= needs.workspace,
                  "the workspace needs " + std::to_string(needs.workspace) + " bytes, got " +
                      std::to_string(workspace->size_bytes()));
  }
  return check.ok() ? ffi::Error::Success() : check.error();
}

ffi::Error Execute(cudaStream_t stream, int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t activation,
                   int64_t algorithm, ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer dense,
                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> compressed,
                   ffi::Result<ffi::AnyBuffer> workspace) {
  const LibraryCall c = LibraryCall::of(device, dense_k_last, out_packed_last, activation, algorithm, values, metadata,
                                        dense, rest, *out);
  if (c.error.failure() || c.product.empty()) return c.error;
  const Product& p = c.product;
  if (p.args.depth == 0)
    return status(kName, cudaMemsetAsync(p.args.out, 0, size_t(p.batch.count() * p.out_bytes()), stream));
  auto* const buffer = static_cast<uint8_t*>(compressed->untyped_data());
  const size_t value_bytes = size_t(p.args.rows * (p.args.depth / 2) * p.in_bytes());
  const auto write_metadata = p.float8 ? launch_metadata_sm90_8bit : launch_metadata_sm90_16bit;
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
      const cudaError_t e = write_metadata(a.metadata, buffer + value_bytes, a.rows, a.depth, stream);
      if (e != cudaSuccess) return status(kName, e);
    }
    const std::string why = cusparselt_matmul(c.key_at(b), buffer, a.dense, a.out, workspace->untyped_data(), stream);
    if (!why.empty()) return ffi::Error::Internal(std::string(kName) + ": " + why);
  }
  return ffi::Error::Success();
}

#define S24_OPERANDS                   \
  Ctx<ffi::DeviceOrdinal>()            \
      .Attr<int64_t>("dense_k_last")   \
      .Attr<int64_t>("out_packed_last") \
      .Attr<int64_t>("activation")     \
      .Attr<int64_t>("algorithm")      \
      .Arg<ffi::AnyBuffer>()           \
      .Arg<ffi::AnyBuffer>()           \
      .Arg<ffi::AnyBuffer>()           \
      .RemainingArgs()                 \
      .Ret<ffi::AnyBuffer>()           \
      .Ret<ffi::AnyBuffer>()           \
      .Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, ffi::Ffi::BindInitialize().S24_OPERANDS);
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ffi::Ffi::Bind().Ctx<Stream>().S24_OPERANDS,
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

const Target kCusparseltTargets[] = {{kName, kExecute, kInitialize}, {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
