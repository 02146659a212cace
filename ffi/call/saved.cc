// The backward pass of an activation that was saved packed.
#include "../core/saved.h"

#include "compressed24.h"
#include "handler.h"

namespace s24 {
namespace {

Dims with(Dims d, int64_t rows, int64_t cols) {
  d.push_back(rows), d.push_back(cols);
  return d;
}

// Packed values (batch..., rows, depth / 2), which may stand in compressed matrices of cuSPARSELt.
struct Values {
  Dims dims;  // without the metadata there
  bool compressed = false;
  void* data = nullptr;
  int64_t step = 0, own = 0;  // bytes from one matrix to the next, and of the values of one

  static Values of(const ffi::AnyBuffer& b, int64_t rows, int64_t depth, int64_t size) {
    Values v;
    v.dims = dims_of(b);
    v.compressed = drop_metadata(v.dims, rows, depth, b);
    v.data = b.untyped_data();
    v.step = (v.compressed ? compressed_rows(rows, 2) : rows) * (depth / 2) * size;
    v.own = rows * (depth / 2) * size;
    return v;
  }
  char* at(int64_t b) const { return at_bytes(data, b * step); }
  uint8_t* behind(int64_t b) const { return compressed ? reinterpret_cast<uint8_t*>(at(b) + own) : nullptr; }
};

// What is packed along tokens: values (batch..., features, tokens / 2), metadata, and dense rows (batch..., rows, tokens).
struct Along {
  Values values;
  void *metadata = nullptr, *dense = nullptr;

  AlongTokens at(int64_t b, int64_t bytes, int64_t dense_bytes) const {
    return {values.at(b), reinterpret_cast<uint8_t*>(at_bytes(metadata, b * bytes)), at_bytes(dense, b * dense_bytes),
            values.behind(b)};
  }
};

// Operands: packed Y2, values (batch..., tokens, features / 2) and metadata (batch..., tokens, ceil(features / 8)); dY2; ranks.
struct SavedCall : Call {
  SavedArgs args{};  // without memory
  Values y2, dy1;
  const void *metadata = nullptr, *dy2 = nullptr, *ranks = nullptr;
  Along y2_along, dy1_along;
  using Call::Call;

  // Checks Y2; returns the leading dimensions of its values and metadata.
  std::pair<Dims, Dims> packed(Check& check, const ffi::AnyBuffer& values, const ffi::AnyBuffer& bytes) {
    const Dims stored = dims_of(values), m = dims_of(bytes);
    args.dtype = check.dtype("values", values);
    check.require(kSavedSizes.float32 || args.dtype != Dtype::kF32, "values must have 16 bits");
    check.type("metadata", bytes, ffi::DataType::U8, "uint8");
    if (!check.require(stored.size() >= 2 && m.size() >= 2, "values and metadata need two dimensions")) return {};
    args.tokens = m[m.size() - 2];
    args.features = 2 * stored.back();
    y2 = Values::of(values, args.tokens, args.features, size_of(args.dtype));
    check.require(args.tokens % kSavedSizes.tokens == 0 && args.features % kSavedSizes.features == 0,
                  "tokens must be a multiple of " + std::to_string(kSavedSizes.tokens) + " and features of " +
                      std::to_string(kSavedSizes.features) + ", got values " + text(y2.dims));
    check.require(args.tokens <= INT32_MAX && args.features <= INT32_MAX && args.tokens * args.features < kSavedSizes.limit,
                  "values are too large: " + text(y2.dims));
    check.require(y2.dims[y2.dims.size() - 2] == args.tokens && m.back() == ceil_div(args.features, 8),
                  "metadata of shape " + text(m) + " does not belong to values of shape " + text(y2.dims));
    metadata = bytes.untyped_data();
    return {leading(y2.dims, 2), leading(m, 2)};
  }

  Along along(Check& check, const Dims& lead, const ffi::AnyBuffer& values, const ffi::AnyBuffer& bytes,
              const ffi::AnyBuffer& dense) const {
    const int64_t tokens = args.tokens, features = args.features;
    const Along to = {Values::of(values, features, tokens, size_of(args.dtype)), bytes.untyped_data(),
                      dense.untyped_data()};
    check.shape("values along tokens", to.values.dims, with(lead, features, tokens / 2));
    check.shape("metadata along tokens", bytes, with(lead, features, ceil_div(tokens, 8)));
    check.type("metadata along tokens", bytes, ffi::DataType::U8, "uint8");
    check.shape("dense rows", dense, with(lead, args.dense_rows, tokens));
    return to;
  }

  SavedArgs at(int64_t b) const {
    const int64_t size = size_of(args.dtype), bytes = args.features * ceil_div(args.tokens, 8);
    const int64_t dense = args.dense_rows * args.tokens * size;
    SavedArgs a = args;
    a.values = y2.at(batch.index(0, b));
    a.metadata = reinterpret_cast<uint8_t*>(at_bytes(metadata, batch.index(1, b) * a.tokens * ceil_div(a.features, 8)));
    a.dy2 = at_bytes(dy2, batch.index(2, b) * a.tokens * a.features * size);
    a.ranks = reinterpret_cast<const int32_t*>(at_bytes(ranks, batch.index(3, b) * a.features * int64_t(sizeof(int32_t))));
    a.dy1 = dy1.at(b);
    a.behind = dy1.behind(b);
    a.y2_along = y2_along.at(b, bytes, dense);
    a.dy1_along = dy1_along.at(b, bytes, dense);
    return a;
  }
};

ffi::Error SavedBackward(Device device, int64_t relu, int64_t strided, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                         ffi::AnyBuffer dy2, ffi::AnyBuffer ranks, ffi::Result<ffi::AnyBuffer> dy1,
                         ffi::Result<ffi::AnyBuffer> y2_values, ffi::Result<ffi::AnyBuffer> y2_metadata,
                         ffi::Result<ffi::AnyBuffer> y2_dense, ffi::Result<ffi::AnyBuffer> dy1_values,
                         ffi::Result<ffi::AnyBuffer> dy1_metadata, ffi::Result<ffi::AnyBuffer> dy1_dense) {
  SavedCall c("s24_saved_backward");
  Check check(c.target);
  const auto [v_lead, m_lead] = c.packed(check, values, metadata);
  if (!check.ok()) return check.error();
  SavedArgs& a = c.args;
  a.slope = check.flag("relu", relu) ? Slope::kRelu : Slope::kSquaredRelu;
  a.strided = check.flag("strided", strided);
  const Dims d = dims_of(dy2), r = dims_of(ranks), few = dims_of(*y2_dense);
  check.type("ranks", ranks, ffi::DataType::S32, "int32");
  if (!check.require(d.size() >= 2 && !r.empty() && few.size() >= 2, "dy2 and dense rows need two dimensions, ranks one"))
    return check.error();
  const Dims d_lead = leading(d, 2), r_lead = leading(r, 1);
  check.shape("dy2", dy2, with(d_lead, a.tokens, a.features));
  check.require(r.back() == a.features, "ranks has shape " + text(r) + ", it needs one for each feature");
  const Dims lead = check.broadcast("packed and dy2", check.broadcast("values and metadata", v_lead, m_lead),
                                    check.broadcast("dy2 and ranks", d_lead, r_lead));
  a.dense_rows = few[few.size() - 2];
  c.dy1 = Values::of(*dy1, a.tokens, a.features, size_of(a.dtype));
  check.shape("dy1", c.dy1.dims, with(lead, a.tokens, a.features / 2));
  c.y2_along = c.along(check, lead, *y2_values, *y2_metadata, *y2_dense);
  c.dy1_along = c.along(check, lead, *dy1_values, *dy1_metadata, *dy1_dense);
  for (const ffi::AnyBuffer& b : {dy2, *dy1, *y2_values, *dy1_values, *y2_dense, *dy1_dense})
    check.require(b.element_type() == values.element_type(), "all arrays must have the dtype of values");
  if (!check.ok()) return check.error();
  c.dy2 = dy2.untyped_data();
  c.ranks = ranks.untyped_data();
  c.batch = Batch(lead, {v_lead, m_lead, d_lead, r_lead}, lead.size());
  return compute(device, c);
}

S24_TARGET("s24_saved_backward", SavedBackward, "relu", "strided");

}  // namespace
}  // namespace s24
