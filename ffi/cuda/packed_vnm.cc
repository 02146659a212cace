// FFI handlers of V:N:M arrays.
#include "../call/matmul_vnm.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const VnmCall& c) {
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const cudaError_t e = launch_vnm(c.at(b), stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

ffi::Error VnmMask(cudaStream_t stream, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> mask) {
  return run(stream, VnmCall::select("s24_vnm_mask", trailing, v, m, exact, x, *mask));
}

ffi::Error VnmPack(cudaStream_t stream, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                   ffi::Result<ffi::AnyBuffer> columns) {
  return run(stream, VnmCall::pack("s24_vnm_pack", trailing, v, m, exact, x, {*values, *metadata, *columns}));
}

ffi::Error VnmSquaredRelu(cudaStream_t stream, int64_t v, int64_t m, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                          ffi::Result<ffi::AnyBuffer> metadata, ffi::Result<ffi::AnyBuffer> columns) {
  const char* const target = "s24_vnm_squared_relu";
  const VnmCall c = VnmCall::pack(target, 0, v, m, 0, x, {*values, *metadata, *columns});
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const VnmArgs a = c.at(b);
    if (!fits_vnm_tiles(a)) return ffi::Error::InvalidArgument(std::string(target) + ": takes 16-bit floats in whole tiles");
    const cudaError_t e = launch_vnm_squared_relu(a, stream);
    if (e != cudaSuccess) return status(target, e);
  }
  return ffi::Error::Success();
}

ffi::Error VnmPackMasked(cudaStream_t stream, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                         ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                         ffi::Result<ffi::AnyBuffer> columns) {
  return run(stream, VnmCall::pack_masked("s24_vnm_pack_masked", trailing, v, m, x, mask, {*values, *metadata, *columns}));
}

ffi::Error VnmGather(cudaStream_t stream, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  return run(stream, VnmCall::gather("s24_vnm_gather", trailing, v, m, x, {*values, metadata, columns}));
}

ffi::Error VnmUnpack(cudaStream_t stream, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer values,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> dense) {
  return run(stream, VnmCall::unpack("s24_vnm_unpack", trailing, v, m, {values, metadata, columns}, *dense));
}

ffi::Error VnmMatmul(cudaStream_t stream, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                     ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::AnyBuffer dense,
                     ffi::Result<ffi::AnyBuffer> out) {
  const VnmMatmulCall c = VnmMatmulCall::of("s24_vnm_matmul", v, m, dense_k_last, out_packed_last,
                                      {values, metadata, columns}, dense, *out);
  if (c.error.failure()) return c.error;
  if (c.empty()) return ffi::Error::Success();
  const MatmulArgs& p = c.args.product;
  if (p.depth == 0) return status(c.target, cudaMemsetAsync(p.out, 0, size_t(c.batch.count() * c.out_bytes()), stream));
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const VnmMatmulArgs a = c.at(b);
    const cudaError_t e = p.in == Dtype::kF32 ? launch_vnm_matmul_f32(a, stream) : launch_vnm_matmul(a, stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

ffi::Error VnmRepack(cudaStream_t stream, int64_t v, int64_t m, int64_t strided, int64_t collected, ffi::AnyBuffer values,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> along_values,
                     ffi::Result<ffi::AnyBuffer> along_metadata, ffi::Result<ffi::AnyBuffer> along_columns) {
  const char* const target = "s24_vnm_repack";
  Check check(target);
  RepackArgs a{};
  a.dtype = check.dtype("values", values);
  a.strided = check.flag("strided", strided);
  a.collected = check.flag("collected", collected);
  a.v = v;
  a.m = m;
  const VnmParts from = {values, metadata, columns}, to = {*along_values, *along_metadata, *along_columns};
  const Dims tokens = dims_of(values), features = dims_of(*along_values);
  check.require(tokens.size() >= 2 && features.size() >= 2, "values need two dimensions");
  if (!check.ok()) return check.error();
  a.tokens = tokens[tokens.size() - 2];
  a.features = features[features.size() - 2];
  const VnmShape shape = VnmShape::of(check, {a.tokens, a.features}, 0, v, m);
  const VnmShape along = VnmShape::of(check, {a.tokens, a.features}, 1, v, m);
  const Dims v_lead = from.values_lead(), m_lead = from.metadata_lead(), c_lead = from.columns_lead();
  const Dims lead =
      check.broadcast("values and columns", check.broadcast("values and metadata", v_lead, m_lead), c_lead);
  if (check.ok()) {
    from.check(check, shape, v_lead, m_lead, c_lead, values.element_type());
    to.check(check, along, lead, lead, lead, values.element_type());
  }
  if (!check.ok()) return check.error();
  const Batch batch(lead, {v_lead, m_lead, c_lead}, lead.size());
  for (int64_t b = 0; b < batch.count(); ++b) {
    a.values = at_bytes(values.untyped_data(), batch.index(0, b) * shape.values_size() * 2);
    a.metadata = static_cast<const uint8_t*>(metadata.untyped_data()) + batch.index(1, b) * shape.metadata_size();
    a.columns = static_cast<const uint8_t*>(columns.untyped_data()) + batch.index(2, b) * shape.columns_size();
    a.along_values = at_bytes(along_values->untyped_data(), b * along.values_size() * 2);
    a.along_metadata = static_cast<uint8_t*>(along_metadata->untyped_data()) + b * along.metadata_size();
    a.along_columns = static_cast<uint8_t*>(along_columns->untyped_data()) + b * along.columns_size();
    if (!fits_vnm_repack(a)) return ffi::Error::InvalidArgument(std::string(target) + ": takes 16-bit floats in whole tiles");
    const cudaError_t e = launch_vnm_repack(a, stream);
    if (e != cudaSuccess) return status(target, e);
  }
  return ffi::Error::Success();
}

#define S24_GRAPH {ffi::Traits::kCmdBufferCompatible}
#define S24_VNM_BINDING \
  ffi::Ffi::Bind().Ctx<Stream>().Attr<int64_t>("trailing").Attr<int64_t>("v").Attr<int64_t>("m")

XLA_FFI_DEFINE_HANDLER(kVnmMask, VnmMask, S24_VNM_BINDING.Attr<int64_t>("exact").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmPack, VnmPack,
                       S24_VNM_BINDING.Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmSquaredRelu, VnmSquaredRelu,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("v")
                           .Attr<int64_t>("m")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmPackMasked, VnmPackMasked,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmGather, VnmGather,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmUnpack, VnmUnpack,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmMatmul, VnmMatmul,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("v")
                           .Attr<int64_t>("m")
                           .Attr<int64_t>("dense_k_last")
                           .Attr<int64_t>("out_packed_last")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);
XLA_FFI_DEFINE_HANDLER(kVnmRepack, VnmRepack,
                       ffi::Ffi::Bind()
                           .Ctx<Stream>()
                           .Attr<int64_t>("v")
                           .Attr<int64_t>("m")
                           .Attr<int64_t>("strided")
                           .Attr<int64_t>("collected")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>(),
                       S24_GRAPH);

}  // namespace

const Target kVnmTargets[] = {{"s24_vnm_mask", kVnmMask, nullptr},
                              {"s24_vnm_pack", kVnmPack, nullptr},
                              {"s24_vnm_squared_relu", kVnmSquaredRelu, nullptr},
                              {"s24_vnm_pack_masked", kVnmPackMasked, nullptr},
                              {"s24_vnm_gather", kVnmGather, nullptr},
                              {"s24_vnm_unpack", kVnmUnpack, nullptr},
                              {"s24_vnm_matmul", kVnmMatmul, nullptr},
                              {"s24_vnm_repack", kVnmRepack, nullptr},
                              {nullptr, nullptr, nullptr}};

}  // namespace cuda
}  // namespace s24
