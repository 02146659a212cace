// The product of a V:N:M matrix and a dense one.
#include "../core/matmul_vnm.h"

#include "handler.h"
#include "packed_vnm.h"

namespace s24 {
namespace {

struct MatmulVnmCall : Call {
  MatmulVnmArgs args{};  // of the first element; the product's depth is K
  VnmShape shape;
  using Call::Call;

  static MatmulVnmCall of(const char* target, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                          int64_t strided, int64_t collected, const VnmParts& parts, const ffi::AnyBuffer& dense,
                          const ffi::AnyBuffer& out) {
    MatmulVnmCall c(target);
    Check check(target);
    MatmulArgs& p = c.args.product;
    p.in = check.dtype("values", parts.values);
    p.out_dtype = check.dtype("the result", out);
    p.dense_k_last = check.flag("dense_k_last", dense_k_last);
    p.out_packed_last = check.flag("out_packed_last", out_packed_last);
    const bool apart = check.flag("strided", strided), moved = check.flag("collected", collected);
    check.require(!(moved && p.out_packed_last), "collected=1 is for rows of the result, which out_packed_last=1 makes columns");
    check.require(p.out_dtype == p.in || p.out_dtype == Dtype::kF32, "the result must have the dtype of values, or float32");
    const Dims d = dims_of(dense), values = dims_of(parts.values);
    check.require(values.size() >= 2 && d.size() >= 2, "operands need two dimensions");
    if (!check.ok()) return c.error = check.error(), c;
    p.rows = values[values.size() - 2];
    p.depth = dense_k_last ? d.back() : d[d.size() - 2];
    p.cols = dense_k_last ? d[d.size() - 2] : d.back();
    const Dims v_lead = parts.values_lead(), m_lead = parts.metadata_lead(), c_lead = parts.columns_lead(),
               d_lead = leading(d, 2);
    const VnmShape s = VnmShape::of(check, {p.rows, p.depth}, 0, v, m);
    const Dims all = check.broadcast("values, metadata and columns", check.broadcast("values and metadata", v_lead, m_lead),
                                     c_lead);
    const Dims lead = check.broadcast("packed and dense", all, d_lead);
    if (!check.ok()) return c.error = check.error(), c;
    parts.check(check, s, v_lead, m_lead, c_lead, dense.element_type());
    Dims want = lead;
    want.push_back(out_packed_last ? p.cols : p.rows);
    want.push_back(out_packed_last ? p.rows : p.cols);
    check.shape("the result", out, want);
    check.require(!moved || p.rows % m == 0,
                  "collected=1 needs rows in groups of m=" + std::to_string(m) + ", got " + std::to_string(p.rows));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(lead, {v_lead, m_lead, c_lead, d_lead}, lead.size());
    c.shape = s;
    c.args.v = v;
    c.args.grouping = Grouping::of(m, p.depth / m, apart);
    if (moved) c.args.collected = {p.rows / m, m};
    c.args.columns = static_cast<const uint8_t*>(parts.columns.untyped_data());
    p.values = parts.values.untyped_data();
    p.metadata = static_cast<const uint8_t*>(parts.metadata.untyped_data());
    p.dense = dense.untyped_data();
    p.out = out.untyped_data();
    return c;
  }

  MatmulVnmArgs at(int64_t b) const {
    MatmulVnmArgs a = args;
    MatmulArgs& p = a.product;
    const int64_t in = size_of(p.in);
    p.values = at_bytes(p.values, batch.index(0, b) * shape.values_size() * in);
    p.metadata += batch.index(1, b) * shape.metadata_size();
    a.columns += batch.index(2, b) * shape.columns_size();
    p.dense = at_bytes(p.dense, batch.index(3, b) * p.depth * p.cols * in);
    p.out = at_bytes(p.out, b * out_bytes());
    return a;
  }
  int64_t out_bytes() const { return args.product.rows * args.product.cols * size_of(args.product.out_dtype); }
  bool empty() const { return batch.count() * args.product.rows * args.product.cols == 0; }
};

ffi::Error VnmMatmul(Device device, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last, int64_t strided,
                     int64_t collected, ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer columns,
                     ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  const MatmulVnmCall c = MatmulVnmCall::of("s24_vnm_matmul", v, m, dense_k_last, out_packed_last, strided, collected,
                                            {values, metadata, columns}, dense, *out);
  if (c.error.failure() || c.empty()) return c.error;
  if (c.args.product.depth == 0) return clear(c.target, device, c.args.product.out, c.batch.count() * c.out_bytes());
  return compute(device, c);
}

S24_TARGET("s24_vnm_matmul", VnmMatmul, "v", "m", "dense_k_last", "out_packed_last", "strided", "collected");

}  // namespace
}  // namespace s24
