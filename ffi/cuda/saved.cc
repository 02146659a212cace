// Handlers of activations that are saved packed: the packing that counts, and the backward pass.
#include "../call/packed24.h"

namespace s24 {
namespace cuda {
namespace {

// Along rows, with counts (batch..., tokens / kSavedTokens, features) of what is kept and not zero.
ffi::Error PackCounted(Device stream, int64_t squared, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> values,
                       ffi::Result<ffi::AnyBuffer> metadata, ffi::Result<ffi::AnyBuffer> counts) {
  constexpr const char* kName = "s24_pack_counted";
  Check check(kName);
  const PackOp op = check.flag("squared", squared) ? PackOp::kSquaredRelu : PackOp::kPlain;
  const PackCall c = PackCall::plain(kName, op, 0, x, *values, *metadata);
  if (c.error.failure()) return c.error;
  Dims parts = dims_of(x);
  const int64_t features = parts.back(), tokens = parts.size() < 2 ? 0 : parts[parts.size() - 2];
  check.require(c.dtype != Dtype::kF32 && parts.size() >= 2 && tokens % kSavedTokens == 0 && features % 8 == 0,
                "needs 16-bit floats, tokens a multiple of " + std::to_string(kSavedTokens) + " and features of 8, got x " +
                    text(parts));
  if (!check.ok()) return check.error();
  parts[parts.size() - 2] = tokens / kSavedTokens;
  check.shape("counts", *counts, parts);
  check.type("counts", *counts, ffi::DataType::U8, "uint8");
  if (!check.ok()) return check.error();
  const int64_t step = c.batch.rest() / kSavedTokens * features;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    auto* const to = reinterpret_cast<uint8_t*>(at_bytes(counts->untyped_data(), b * step));
    const cudaError_t e = launch_pack_counted(c.at(b), features, to, stream);
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

// Packed values (batch..., rows, depth / 2), which may stand in compressed matrices of cuSPARSELt.
struct Values {
  Dims dims;  // without the metadata there
  bool compressed = false;
  int64_t step = 0;  // bytes from one matrix to the next

  static Values of(const ffi::AnyBuffer& b, int64_t rows, int64_t depth) {
    Values v;
    v.dims = dims_of(b);
    v.compressed = drop_metadata(v.dims, rows, depth, b);
    v.step = (v.compressed ? compressed_rows(rows, 2) : rows) * depth;
    return v;
  }
};

// Packed Y2: values (batch..., tokens, features / 2) and metadata (batch..., tokens, features / 8).
struct SavedCall : Call {
  SavedArgs args{};  // of the first element
  Values values;
  Dims lead;
  using Call::Call;

  static SavedCall of(Check& check, const char* target, const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
    SavedCall c(target);
    const Dims stored = dims_of(values), m = dims_of(metadata);
    c.args.dtype = check.dtype("values", values);
    check.require(c.args.dtype != Dtype::kF32, "values must have 16 bits");
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
    if (!check.require(stored.size() >= 2 && m.size() >= 2, "values and metadata need two dimensions")) return c;
    c.args.tokens = m[m.size() - 2];
    c.args.features = 2 * stored.back();
    c.values = Values::of(values, c.args.tokens, c.args.features);
    const Dims& v = c.values.dims;
    check.require(c.args.tokens % kSavedTokens == 0 && c.args.features % 8 == 0,
                  "tokens must be a multiple of " + std::to_string(kSavedTokens) + " and features of 8, got values " + text(v));
    check.require(c.args.tokens <= INT32_MAX && c.args.features <= INT32_MAX, "values are too large: " + text(v));
    check.require(v[v.size() - 2] == c.args.tokens && m.back() == c.args.features / 8,
                  "metadata of shape " + text(m) + " does not belong to values of shape " + text(v));
    c.lead = check.broadcast("values and metadata", leading(v, 2), leading(m, 2));
    c.args.values = values.untyped_data();
    c.args.metadata = static_cast<const uint8_t*>(metadata.untyped_data());
    return c;
  }

  static Dims with(Dims d, int64_t rows, int64_t cols) {
    d.push_back(rows), d.push_back(cols);
    return d;
  }

  // With the packed operands of element b.
  SavedArgs at(int64_t b) const {
    SavedArgs a = args;
    a.values = at_bytes(a.values, batch.index(0, b) * values.step);
    a.metadata += batch.index(1, b) * (args.tokens * args.features / 8);
    return a;
  }
};

ffi::Error SavedBackward(Device stream, int64_t relu, int64_t strided, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                         ffi::AnyBuffer dy2, ffi::AnyBuffer ranks, ffi::Result<ffi::AnyBuffer> dy1,
                         ffi::Result<ffi::AnyBuffer> y2_values, ffi::Result<ffi::AnyBuffer> y2_metadata,
                         ffi::Result<ffi::AnyBuffer> y2_dense, ffi::Result<ffi::AnyBuffer> dy1_values,
                         ffi::Result<ffi::AnyBuffer> dy1_metadata, ffi::Result<ffi::AnyBuffer> dy1_dense) {
  constexpr const char* kName = "s24_saved_backward";
  Check check(kName);
  SavedCall c = SavedCall::of(check, kName, values, metadata);
  if (!check.ok()) return check.error();
  SavedArgs& a = c.args;
  a.slope = check.flag("relu", relu) ? Slope::kRelu : Slope::kSquaredRelu;
  a.strided = check.flag("strided", strided);
  const Dims d = dims_of(dy2), r = dims_of(ranks), few = dims_of(*y2_dense);
  check.type("ranks", ranks, ffi::DataType::S32, "int32");
  if (!check.require(d.size() >= 2 && !r.empty() && few.size() >= 2, "dy2 and dense rows need two dimensions, ranks one"))
    return check.error();
  const Dims d_lead = leading(d, 2), r_lead = leading(r, 1);
  check.shape("dy2", dy2, SavedCall::with(d_lead, a.tokens, a.features));
  check.require(r.back() == a.features, "ranks has shape " + text(r) + ", it needs one for each feature");
  const Dims v_lead = leading(c.values.dims, 2), m_lead = leading(dims_of(metadata), 2);
  const Dims lead = check.broadcast("packed and dy2", c.lead, check.broadcast("dy2 and ranks", d_lead, r_lead));
  const int64_t dense = few[few.size() - 2];
  const Values rows = Values::of(*dy1, a.tokens, a.features), y2_columns = Values::of(*y2_values, a.features, a.tokens),
               dy1_columns = Values::of(*dy1_values, a.features, a.tokens);
  check.shape("dy1", rows.dims, SavedCall::with(lead, a.tokens, a.features / 2));
  for (const Values& v : {y2_columns, dy1_columns})
    check.shape("values along tokens", v.dims, SavedCall::with(lead, a.features, a.tokens / 2));
  for (const ffi::AnyBuffer& b : {*y2_metadata, *dy1_metadata}) {
    check.shape("metadata along tokens", b, SavedCall::with(lead, a.features, a.tokens / 8));
    check.type("metadata along tokens", b, ffi::DataType::U8, "uint8");
  }
  for (const ffi::AnyBuffer& b : {*y2_dense, *dy1_dense})
    check.shape("dense rows", b, SavedCall::with(lead, dense, a.tokens));
  for (const ffi::AnyBuffer& b : {dy2, *dy1, *y2_values, *dy1_values, *y2_dense, *dy1_dense})
    check.require(b.element_type() == values.element_type(), "all arrays must have the dtype of values");
  if (!check.ok()) return check.error();
  a.dense_rows = dense;
  c.batch = Batch(lead, {v_lead, m_lead, d_lead, r_lead}, lead.size());
  const int64_t total = a.tokens * a.features;  // bytes of packed values
  const auto along = [&](int64_t b, const Values& form, ffi::AnyBuffer& v, ffi::AnyBuffer& m, ffi::AnyBuffer& few) {
    char* const to = at_bytes(v.untyped_data(), b * form.step);
    return AlongTokens{to, reinterpret_cast<uint8_t*>(at_bytes(m.untyped_data(), b * (total / 8))),
                       at_bytes(few.untyped_data(), b * dense * a.tokens * 2),
                       form.compressed ? reinterpret_cast<uint8_t*>(to + total) : nullptr};
  };
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    SavedArgs one = c.at(b);
    one.dy2 = at_bytes(dy2.untyped_data(), c.batch.index(2, b) * total * 2);
    one.ranks = reinterpret_cast<const int32_t*>(at_bytes(ranks.untyped_data(), c.batch.index(3, b) * a.features * 4));
    one.dy1 = at_bytes(dy1->untyped_data(), b * rows.step);
    one.y2_along = along(b, y2_columns, *y2_values, *y2_metadata, *y2_dense);
    one.dy1_along = along(b, dy1_columns, *dy1_values, *dy1_metadata, *dy1_dense);
    cudaError_t e = launch_saved_backward(one, stream);
    if (e == cudaSuccess && rows.compressed) {
      auto* const behind = static_cast<uint8_t*>(one.dy1) + total;
      e = launch_metadata_sm90_16bit(one.metadata, behind, a.tokens, a.features, stream);
    }
    if (e != cudaSuccess) return status(kName, e);
  }
  return ffi::Error::Success();
}

S24_TARGET("s24_pack_counted", PackCounted, "squared");
S24_TARGET("s24_saved_backward", SavedBackward, "relu", "strided");

}  // namespace
}  // namespace cuda
}  // namespace s24
