// Handlers of cuSPARSELt: a compressed matrix from values and metadata, and its product with a dense one.
//
// The library's compressed matrix is the values and then the metadata in an order of its own, in one buffer; here an array
// of `compressed_rows` rows. The workspace is a result, so that nothing is allocated.
#include "../call/compressed24.h"
#include "../call/handler.h"
#include "cusparselt.h"

namespace s24 {
namespace cuda {
namespace {

constexpr const char* kProduct = "s24_cusparselt_matmul";

struct Type {
  cudaDataType type = CUDA_R_16BF;
  int64_t bytes = 2;

  bool float8() const { return type == CUDA_R_8F_E4M3; }

  static Type of(Check& check, const char* name, const ffi::AnyBuffer& b) {
    switch (b.element_type()) {
      case ffi::DataType::BF16: return {CUDA_R_16BF, 2};
      case ffi::DataType::F16: return {CUDA_R_16F, 2};
      case ffi::DataType::F32: return {CUDA_R_32F, 4};
      case ffi::DataType::F8E4M3FN: return {CUDA_R_8F_E4M3, 1};
      default: break;
    }
    check.require(false, std::string(name) + " must be bfloat16, float16, float32 or float8_e4m3fn");
    return {};
  }
};

// The type of the operands; depth: K.
Type operands_type(Check& check, const char* name, const ffi::AnyBuffer& b, int64_t depth) {
  const Type t = Type::of(check, name, b);
  check.require(t.bytes < 4, std::string(name) + " must be bfloat16, float16 or float8_e4m3fn");
  const int64_t multiple = t.float8() ? 64 : 32;
  check.require(depth % multiple == 0,
                "K must be a multiple of " + std::to_string(multiple) + ", got " + std::to_string(depth));
  return t;
}

ffi::Error Compress(Device stream, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                    ffi::Result<ffi::AnyBuffer> compressed) {
  constexpr const char* kName = "s24_cusparselt_compress";
  Check check(kName);
  const Dims v = dims_of(values), m = dims_of(metadata);
  if (!check.require(v.size() >= 2 && m.size() >= 2, "operands need two dimensions")) return check.error();
  const int64_t rows = v[v.size() - 2], depth = 2 * v.back();
  const Type type = operands_type(check, "values", values, depth);
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.require(compressed->element_type() == values.element_type(), "the result must have the dtype of values");
  const Dims v_lead = leading(v, 2), m_lead = leading(m, 2), lead = check.broadcast("values and metadata", v_lead, m_lead);
  Dims want = m_lead;
  want.insert(want.end(), {rows, depth / 8});
  check.shape("metadata", metadata, want);
  want = lead;
  want.insert(want.end(), {compressed_rows(rows, type.bytes), depth / 2});
  check.shape("the result", *compressed, want);
  if (!check.ok()) return check.error();
  const Batch batch(lead, {v_lead, m_lead}, lead.size());
  const int64_t value_bytes = rows * (depth / 2) * type.bytes, metadata_bytes = rows * (depth / 8);
  const int64_t step = compressed_rows(rows, type.bytes) * (depth / 2) * type.bytes;
  for (int64_t b = 0; step > 0 && b < batch.count(); ++b) {
    auto* const to = reinterpret_cast<uint8_t*>(at_bytes(compressed->untyped_data(), b * step));
    const void* const from = at_bytes(values.untyped_data(), batch.index(0, b) * value_bytes);
    cudaError_t e = cudaMemcpyAsync(to, from, size_t(value_bytes), cudaMemcpyDeviceToDevice, stream);
    if (e == cudaSuccess) {
      const char* const bytes = at_bytes(metadata.untyped_data(), batch.index(1, b) * metadata_bytes);
      e = launch_metadata(reinterpret_cast<const uint8_t*>(bytes), to + value_bytes, rows, depth, type.bytes, stream);
    }
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

// A product with what the library makes of its result.
struct LibraryCall {
  PlanKey key;
  Operand compressed, dense, bias;
  void* out = nullptr;
  int64_t compressed_bytes = 0, dense_bytes = 0, bias_bytes = 0, out_bytes = 0;  // of an element of the batch
  Batch batch = Batch({}, {});
  ffi::Error error = ffi::Error::Success();

  static LibraryCall of(int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t activation,
                        int64_t algorithm, const ffi::AnyBuffer& compressed, const ffi::AnyBuffer& dense,
                        const ffi::RemainingArgs& rest, const ffi::AnyBuffer& out, const ffi::AnyBuffer& workspace) {
    LibraryCall call;
    Check check(kProduct);
    const Dims c = dims_of(compressed), d = dims_of(dense), o = dims_of(out);
    if (!check.require(c.size() >= 2 && d.size() >= 2 && o.size() >= 2, "operands need two dimensions"))
      return call.error = check.error(), call;
    const bool k_last = check.flag("dense_k_last", dense_k_last), packed_last = check.flag("out_packed_last", out_packed_last);
    const int64_t depth = 2 * c.back(), rows = packed_last ? o.back() : o[o.size() - 2];
    const int64_t cols = packed_last ? o[o.size() - 2] : o.back();
    const Type in = operands_type(check, "the compressed matrix", compressed, depth);
    const Type result = Type::of(check, "the result", out);
    check.require(dense.element_type() == compressed.element_type(), "both operands must have the same dtype");
    check.require(in.float8() ? !result.float8() : result.type == in.type,
                  "the result must have the dtype of the operands, or of 8-bit ones a wider one");
    check.require(!in.float8() || k_last, "float8_e4m3fn needs both operands contiguous along K");
    const Dims c_lead = leading(c, 2), d_lead = leading(d, 2);
    check.require(rest.size() <= 1, "takes one bias after both operands, got " + std::to_string(rest.size()));
    check.type("the workspace", workspace, ffi::DataType::U8, "uint8");
    check.shape("the compressed matrix", c, of_lead(c_lead, {compressed_rows(rows, in.bytes), depth / 2}));
    check.shape("dense", d, k_last ? of_lead(d_lead, {cols, depth}) : of_lead(d_lead, {depth, cols}));
    Dims lead = check.broadcast("both operands", c_lead, d_lead), b_lead = lead;
    if (rest.size() > 0) {
      const ffi::AnyBuffer b = *rest.get<ffi::AnyBuffer>(0);
      const Dims dims = dims_of(b);
      b_lead = leading(dims, 1);
      check.require(!dims.empty() && dims.back() == rows,
                    "bias has shape " + text(dims) + ", the packed operand has " + std::to_string(rows) + " rows");
      check.require(b.element_type() == out.element_type(), "bias must have the dtype of the result");
      lead = check.broadcast("operands and bias", lead, b_lead);
      call.bias = {b.untyped_data(), 2};
    }
    check.shape("the result", o, of_lead(lead, {o[o.size() - 2], o.back()}));
    if (!check.ok()) return call.error = check.error(), call;
    call.batch = Batch(lead, {c_lead, d_lead, b_lead}, lead.size());
    call.compressed = {compressed.untyped_data(), 0};
    call.dense = {dense.untyped_data(), 1};
    call.out = out.untyped_data();
    call.compressed_bytes = compressed_rows(rows, in.bytes) * (depth / 2) * in.bytes;
    call.dense_bytes = depth * cols * in.bytes;
    call.bias_bytes = rows * result.bytes;
    call.out_bytes = rows * cols * result.bytes;
    call.key = {device,      rows,        depth, cols, k_last, packed_last, in.type, result.type, Epilogue(activation),
                call.bias.data, algorithm};
    return call;
  }

  bool empty() const { return batch.count() * key.rows * key.cols == 0; }
  PlanKey key_at(int64_t b) const {
    PlanKey k = key;
    k.bias = bias.at(batch, b, bias_bytes);
    return k;
  }
};

ffi::Error Initialize(int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t activation, int64_t algorithm,
                      ffi::AnyBuffer compressed, ffi::AnyBuffer dense, ffi::RemainingArgs rest,
                      ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace) {
  const LibraryCall c = LibraryCall::of(device, dense_k_last, out_packed_last, activation, algorithm, compressed, dense, rest, *out,
                                        *workspace);
  if (c.error.failure() || c.empty() || c.key.depth == 0) return c.error;
  Check check(kProduct);
  for (int64_t b = 0; b < (c.bias.data == nullptr ? 1 : c.batch.count()); ++b) {
    const Needs needs = cusparselt_needs(c.key_at(b));
    if (!needs.error.empty()) return ffi::Error::Internal(std::string(kProduct) + ": " + needs.error);
    const std::string misfit = needs.misfit(c.compressed_bytes, int64_t(workspace->size_bytes()));
    check.require(misfit.empty(), misfit);
  }
  return check.ok() ? ffi::Error::Success() : check.error();
}

ffi::Error Execute(Device stream, int32_t device, int64_t dense_k_last, int64_t out_packed_last, int64_t activation,
                   int64_t algorithm, ffi::AnyBuffer compressed, ffi::AnyBuffer dense, ffi::RemainingArgs rest,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> workspace) {
  const LibraryCall c = LibraryCall::of(device, dense_k_last, out_packed_last, activation, algorithm, compressed, dense, rest, *out,
                                        *workspace);
  if (c.error.failure() || c.empty()) return c.error;
  if (c.key.depth == 0) return status(kProduct, cudaMemsetAsync(c.out, 0, size_t(c.batch.count() * c.out_bytes), stream));
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const std::string why = cusparselt_matmul(c.key_at(b), c.compressed.at(c.batch, b, c.compressed_bytes), c.compressed_bytes,
                                              c.dense.at(c.batch, b, c.dense_bytes), at_bytes(c.out, b * c.out_bytes),
                                              workspace->untyped_data(), int64_t(workspace->size_bytes()), stream);
    if (!why.empty()) return ffi::Error::Internal(std::string(kProduct) + ": " + why);
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
      .RemainingArgs()                 \
      .Ret<ffi::AnyBuffer>()           \
      .Ret<ffi::AnyBuffer>()

S24_TARGET("s24_cusparselt_compress", Compress);
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize, ffi::Ffi::BindInitialize().S24_OPERANDS);
XLA_FFI_DEFINE_HANDLER(kExecute, of_aligned<kAlignment>(kProduct, Execute), ffi::Ffi::Bind().Ctx<Context>().S24_OPERANDS, kTraits);
const RegisteredTarget registered_product({kProduct, kExecute, kInitialize});

}  // namespace
}  // namespace cuda
}  // namespace s24
