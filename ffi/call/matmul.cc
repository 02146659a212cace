// The product of a 2:4 matrix and a dense one by our own kernels.
#include "../core/matmul.h"

#include "handler.h"

namespace s24 {
namespace {

struct MatmulCall : Call {
  MatmulArgs args{};  // of the first element
  using Call::Call;

  static MatmulCall of(const char* target, int64_t dense_k_last, int64_t out_packed_last, const ffi::AnyBuffer& values,
                    const ffi::AnyBuffer& metadata, const ffi::AnyBuffer& dense, const ffi::AnyBuffer& out) {
    MatmulCall c(target);
    Check check(target);
    MatmulArgs& a = c.args;
    a.in = check.dtype("values", values);
    a.out_dtype = check.dtype("the result", out);
    a.dense_k_last = check.flag("dense_k_last", dense_k_last);
    a.out_packed_last = check.flag("out_packed_last", out_packed_last);
    check.require(dense.element_type() == values.element_type(), "values and dense must have the same dtype");
    check.require(a.out_dtype == a.in || a.out_dtype == Dtype::kF32,
                  "the result must have the dtype of values, or float32");
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
    const Dims v = dims_of(values), m = dims_of(metadata), d = dims_of(dense), o = dims_of(out);
    check.require(v.size() >= 2 && m.size() >= 2 && d.size() >= 2 && o.size() >= 2, "operands need two dimensions");
    if (!check.ok()) return c.error = check.error(), c;
    a.rows = v[v.size() - 2];
    a.depth = 2 * v.back();
    a.cols = dense_k_last ? d[d.size() - 2] : d.back();
    check.require(a.depth % 4 == 0, "values hold pairs: their last dimension must be even, got " + text(v));
    check.require(m[m.size() - 2] == a.rows && m.back() == ceil_div(a.depth, 8),
                  "metadata of shape " + text(m) + " does not belong to values of shape " + text(v));
    check.require((dense_k_last ? d.back() : d[d.size() - 2]) == a.depth,
                  "contraction " + std::to_string(a.depth) + " of the packed operand differs from dense " + text(d));
    const Dims v_lead = leading(v, 2), m_lead = leading(m, 2), d_lead = leading(d, 2);
    const Dims lead = check.broadcast("packed and dense", check.broadcast("values and metadata", v_lead, m_lead), d_lead);
    Dims want = lead;
    want.push_back(out_packed_last ? a.cols : a.rows);
    want.push_back(out_packed_last ? a.rows : a.cols);
    check.shape("the result", out, want);
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(lead, {v_lead, m_lead, d_lead}, lead.size());
    a.values = values.untyped_data();
    a.metadata = static_cast<const uint8_t*>(metadata.untyped_data());
    a.dense = dense.untyped_data();
    a.out = out.untyped_data();
    return c;
  }

  MatmulArgs at(int64_t b) const {
    MatmulArgs a = args;
    const int64_t in = size_of(a.in);
    a.values = at_bytes(a.values, batch.index(0, b) * a.rows * (a.depth / 2) * in);
    a.metadata += batch.index(1, b) * a.rows * ceil_div(a.depth, 8);
    a.dense = at_bytes(a.dense, batch.index(2, b) * a.depth * a.cols * in);
    a.out = at_bytes(a.out, b * out_bytes());
    return a;
  }
  int64_t out_bytes() const { return args.rows * args.cols * size_of(args.out_dtype); }
  bool empty() const { return batch.count() * args.rows * args.cols == 0; }
};

ffi::Error Matmul(Device device, int64_t dense_k_last, int64_t out_packed_last, ffi::AnyBuffer values, ffi::AnyBuffer metadata,
                  ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  const MatmulCall c = MatmulCall::of("s24_matmul", dense_k_last, out_packed_last, values, metadata, dense, *out);
  if (c.error.failure() || c.empty()) return c.error;
  if (c.args.depth == 0) return clear(c.target, device, c.args.out, c.batch.count() * c.out_bytes());
  return compute(device, c);
}

S24_TARGET("s24_matmul", Matmul, "dense_k_last", "out_packed_last");

}  // namespace
}  // namespace s24
