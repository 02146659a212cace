// Checked calls of products at the entries of a V:N:M matrix.
#pragma once
#include "../core/sampled.h"
#include "packed_vnm.h"

namespace s24 {

// A (lead..., R, K) B (lead..., N, K)^T at entries.
struct SampledCall : Call {
  SampledArgs args{};  // of the first element
  VnmShape shape;
  using Call::Call;

  static SampledCall of(const char* target, int64_t v, int64_t m, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
                        const VnmParts& parts) {
    SampledCall c(target);
    Check check(target);
    SampledArgs& p = c.args;
    p.dtype = check.dtype("a", a);
    const Dims x = dims_of(a), y = dims_of(b);
    check.require(x.size() >= 2 && y.size() >= 2 && x.back() == y.back(), "a and b must be (..., R, K) and (..., N, K)");
    check.require(a.element_type() == b.element_type(), "a and b must have the same dtype");
    if (!check.ok()) return c.error = check.error(), c;
    p.rows = x[x.size() - 2];
    p.depth = x.back();
    p.cols = y[y.size() - 2];
    const VnmShape s = VnmShape::of(check, {p.rows, p.cols}, 0, v, m);
    const Dims a_lead = leading(x, 2), b_lead = leading(y, 2), m_lead = parts.metadata_lead(), c_lead = parts.columns_lead();
    const Dims lead = check.broadcast("operands and places", check.broadcast("a and b", a_lead, b_lead),
                                      check.broadcast("metadata and columns", m_lead, c_lead));
    if (check.ok()) parts.check(check, s, lead, m_lead, c_lead, a.element_type());
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(lead, {a_lead, b_lead, m_lead, c_lead}, lead.size());
    c.shape = s;
    p.v = v;
    p.m = m;
    p.a = a.untyped_data();
    p.b = b.untyped_data();
    p.values = parts.values.untyped_data();
    p.metadata = static_cast<const uint8_t*>(parts.metadata.untyped_data());
    p.columns = static_cast<const uint8_t*>(parts.columns.untyped_data());
    return c;
  }

  bool empty() const { return batch.count() * shape.values_size() == 0; }
  SampledArgs at(int64_t n) const {
    SampledArgs p = args;
    const int64_t size = size_of(p.dtype);
    p.a = at_bytes(p.a, batch.index(0, n) * p.rows * p.depth * size);
    p.b = at_bytes(p.b, batch.index(1, n) * p.cols * p.depth * size);
    p.metadata += batch.index(2, n) * shape.metadata_size();
    p.columns += batch.index(3, n) * shape.columns_size();
    p.values = at_bytes(p.values, n * shape.values_size() * size);
    return p;
  }
};

}  // namespace s24
