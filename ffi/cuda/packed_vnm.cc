// V:N:M packing that only CUDA has.
#include "../call/handler.h"
#include "../call/packed_vnm.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error VnmSquaredRelu(Device stream, int64_t v, int64_t m, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                          ffi::Result<ffi::AnyBuffer> metadata, ffi::Result<ffi::AnyBuffer> columns) {
  const char* const target = "s24_vnm_squared_relu";
  const PackVnmCall c = PackVnmCall::pack(target, 0, v, m, 0, x, {*values, *metadata, *columns});
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const PackVnmArgs a = c.at(b);
    if (!fits_pack_vnm_tiles(a)) return ffi::Error::InvalidArgument(std::string(target) + ": takes 16-bit floats in whole tiles");
    const cudaError_t e = launch_squared_relu_vnm(a, stream);
    if (e != cudaSuccess) return status(target, e);
  }
  return ffi::Error::Success();
}

ffi::Error VnmRepack(Device stream, int64_t v, int64_t m, int64_t strided, int64_t collected, ffi::AnyBuffer values,
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
    if (!fits_repack_vnm(a)) return ffi::Error::InvalidArgument(std::string(target) + ": takes 16-bit floats in whole tiles");
    const cudaError_t e = launch_repack_vnm(a, stream);
    if (e != cudaSuccess) return status(target, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_vnm_squared_relu", VnmSquaredRelu, "v", "m");
S24_TARGET("s24_vnm_repack", VnmRepack, "v", "m", "strided", "collected");

}  // namespace
}  // namespace cuda
}  // namespace s24
