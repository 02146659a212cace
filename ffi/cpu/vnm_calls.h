// Calls of V:N:M operations: as calls.h.
#pragma once
#include <initializer_list>

#include "../core/vnm.h"
#include "calls.h"

namespace s24 {

// Matrices (lead..., R, K), or (lead..., K, R) if trailing is 1, and their packed parts.
struct VnmShape {
  int64_t rows = 0, depth = 0, v = 1, m = 1;
  bool depth_last = true;

  static VnmShape of(Check& check, const Dims& dense, int64_t trailing, int64_t v, int64_t m) {
    VnmShape s;
    check.require(trailing == 0 || trailing == 1, "trailing must be 0 or 1, got " + std::to_string(trailing));
    check.require(is_vnm_height(v), "v=" + std::to_string(v) + " has no kernels; v must be 16, 32, 64, 128 or 256");
    check.require(m >= kVnmMinM && m <= kVnmMaxM, "m=" + std::to_string(m) + " has no kernels; m must be from " +
                                                      std::to_string(kVnmMinM) + " to " + std::to_string(kVnmMaxM));
    if (!check.require(dense.size() >= 2, "needs two dimensions, got " + text(dense)) || !check.ok()) return s;
    s.depth_last = trailing == 0;
    s.rows = dense[dense.size() - 1 - (s.depth_last ? 1 : 0)];
    s.depth = dense[dense.size() - 1 - (s.depth_last ? 0 : 1)];
    s.v = v;
    s.m = m;
    check.require(s.rows % v == 0 && s.depth % m == 0, "blocks of v=" + std::to_string(v) + ", m=" + std::to_string(m) +
                                                           " do not fit into shape " + text(dense));
    return s;
  }

  int64_t groups() const { return depth / m; }
  int64_t values_size() const { return rows * 2 * groups(); }
  int64_t metadata_size() const { return rows * ceil_div(groups(), 2); }
  int64_t columns_size() const { return rows / v * groups() * 4; }
  Dims dense(const Dims& lead) const {
    return depth_last ? with(lead, {rows, depth}) : with(lead, {depth, rows});
  }
  Dims values(const Dims& lead) const { return with(lead, {rows, 2 * groups()}); }
  Dims metadata(const Dims& lead) const { return with(lead, {rows, ceil_div(groups(), 2)}); }
  Dims columns(const Dims& lead) const { return with(lead, {rows / v, groups(), 4}); }

 private:
  static Dims with(Dims lead, std::initializer_list<int64_t> tail) {
    lead.insert(lead.end(), tail);
    return lead;
  }
};

// Values, metadata and columns, as operands or as results.
struct VnmParts {
  const ffi::AnyBuffer &values, &metadata, &columns;

  Dims values_lead() const { return leading(dims_of(values), 2); }
  Dims metadata_lead() const { return leading(dims_of(metadata), 2); }
  Dims columns_lead() const { return leading(dims_of(columns), 3); }
  void check(Check& check, const VnmShape& s, const Dims& values_lead, const Dims& metadata_lead, const Dims& columns_lead,
             ffi::DataType dtype) const {
    check.shape("values", values, s.values(values_lead));
    check.shape("metadata", metadata, s.metadata(metadata_lead));
    check.shape("columns", columns, s.columns(columns_lead));
    check.require(values.element_type() == dtype, "values must have the dtype of the dense array");
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
    check.type("columns", columns, ffi::DataType::U8, "uint8");
  }
};

struct VnmCall : Call {
  VnmArgs shared{};  // without pointers
  VnmShape shape;
  Operand dense, mask, values, metadata, columns;
  using Call::Call;

  static VnmCall select(const char* target, int64_t trailing, int64_t v, int64_t m, int64_t exact, const ffi::AnyBuffer& x,
                        const ffi::AnyBuffer& mask) {
    VnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    check.shape("the result", mask, dims_of(x));
    check.type("the result", mask, ffi::DataType::PRED, "bool");
    const bool best = check_exact(check, s, exact);
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data()};
    c.mask = {mask.untyped_data()};
    return c.set(VnmOp::kMask, dtype, best, s, Batch(leading(dims_of(x), 2), {}));
  }

  static VnmCall pack(const char* target, int64_t trailing, int64_t v, int64_t m, int64_t exact, const ffi::AnyBuffer& x,
                      const VnmParts& parts) {
    VnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    const Dims lead = leading(dims_of(x), 2);
    const bool best = check_exact(check, s, exact);
    if (check.ok()) parts.check(check, s, lead, lead, lead, x.element_type());
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data()};
    return c.set(VnmOp::kPack, dtype, best, s, Batch(lead, {}), &parts);
  }

  static VnmCall pack_masked(const char* target, int64_t trailing, int64_t v, int64_t m, const ffi::AnyBuffer& x,
                             const ffi::AnyBuffer& mask, const VnmParts& parts) {
    VnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    check.type("mask", mask, ffi::DataType::PRED, "bool");
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    const Dims x_lead = leading(dims_of(x), 2), mask_lead = leading(dims_of(mask), 2);
    const Dims lead = check.broadcast("x and mask", x_lead, mask_lead);
    if (check.ok()) {
      check.shape("mask", mask, s.dense(mask_lead));
      parts.check(check, s, lead, lead, lead, x.element_type());
    }
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data(), 0};
    c.mask = {mask.untyped_data(), 1};
    return c.set(VnmOp::kPackMasked, dtype, false, s, Batch(lead, {x_lead, mask_lead}), &parts);
  }

  static VnmCall gather(const char* target, int64_t trailing, int64_t v, int64_t m, const ffi::AnyBuffer& x,
                        const VnmParts& parts) {
    VnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    const Dims x_lead = leading(dims_of(x), 2), m_lead = parts.metadata_lead(), c_lead = parts.columns_lead();
    const Dims lead = check.broadcast("x and columns", check.broadcast("x and metadata", x_lead, m_lead), c_lead);
    if (check.ok()) parts.check(check, s, lead, m_lead, c_lead, x.element_type());
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data(), 0};
    c = c.set(VnmOp::kGather, dtype, false, s, Batch(lead, {x_lead, m_lead, c_lead}), &parts);
    c.metadata.batch_operand = 1;
    c.columns.batch_operand = 2;
    return c;
  }

  static VnmCall unpack(const char* target, int64_t trailing, int64_t v, int64_t m, const VnmParts& parts,
                        const ffi::AnyBuffer& dense) {
    VnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("values", parts.values);
    const VnmShape s = VnmShape::of(check, dims_of(dense), trailing, v, m);
    const Dims v_lead = parts.values_lead(), m_lead = parts.metadata_lead(), c_lead = parts.columns_lead();
    const Dims lead =
        check.broadcast("values and columns", check.broadcast("values and metadata", v_lead, m_lead), c_lead);
    if (check.ok()) {
      check.shape("the result", dense, s.dense(lead));
      parts.check(check, s, v_lead, m_lead, c_lead, dense.element_type());
    }
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {dense.untyped_data()};
    c = c.set(VnmOp::kUnpack, dtype, false, s, Batch(lead, {v_lead, m_lead, c_lead}), &parts);
    c.values.batch_operand = 0;
    c.metadata.batch_operand = 1;
    c.columns.batch_operand = 2;
    return c;
  }

  VnmArgs at(int64_t b) const {
    const int64_t size = size_of(shared.dtype);
    const auto bytes_at = [&](const Operand& o, int64_t bytes) {
      return reinterpret_cast<uint8_t*>(o.at(batch, b, batch.rest() * bytes));
    };
    VnmArgs a = shared;
    a.dense = bytes_at(dense, shape.rows * shape.depth * size);
    a.mask = bytes_at(mask, shape.rows * shape.depth);
    a.values = bytes_at(values, shape.values_size() * size);
    a.metadata = bytes_at(metadata, shape.metadata_size());
    a.columns = bytes_at(columns, shape.columns_size());
    return a;
  }

 private:
  VnmCall& set(VnmOp op, Dtype dtype, bool exact, const VnmShape& s, const Batch& all, const VnmParts* parts = nullptr) {
    batch = all;
    shape = s;
    shared.op = op;
    shared.dtype = dtype;
    shared.exact = exact;
    shared.depth_last = s.depth_last;
    shared.outer = all.rest();
    shared.rows = s.rows;
    shared.depth = s.depth;
    shared.v = s.v;
    shared.m = s.m;
    if (parts != nullptr) {
      values = {parts->values.untyped_data()};
      metadata = {parts->metadata.untyped_data()};
      columns = {parts->columns.untyped_data()};
    }
    return *this;
  }

  static bool check_exact(Check& check, const VnmShape& s, int64_t exact) {
    const bool best = check.flag("exact", exact);
    check.require(!best || s.m <= kVnmMaxExactM, "an exhaustive search takes m up to " + std::to_string(kVnmMaxExactM) +
                                                      ", got m=" + std::to_string(s.m) + "; use exact=0");
    return best;
  }
};

struct VnmProduct : Call {
  VnmMatmulArgs args{};  // of the first element; the product's depth is K
  VnmShape shape;
  using Call::Call;

  static VnmProduct of(const char* target, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                       const VnmParts& parts, const ffi::AnyBuffer& dense, const ffi::AnyBuffer& out) {
    VnmProduct c(target);
    Check check(target);
    MatmulArgs& p = c.args.product;
    p.in = check.dtype("values", parts.values);
    p.out_dtype = check.dtype("the result", out);
    p.dense_k_last = check.flag("dense_k_last", dense_k_last);
    p.out_packed_last = check.flag("out_packed_last", out_packed_last);
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
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(lead, {v_lead, m_lead, c_lead, d_lead}, lead.size());
    c.shape = s;
    c.args.v = v;
    c.args.m = m;
    c.args.columns = static_cast<const uint8_t*>(parts.columns.untyped_data());
    p.values = parts.values.untyped_data();
    p.metadata = static_cast<const uint8_t*>(parts.metadata.untyped_data());
    p.dense = dense.untyped_data();
    p.out = out.untyped_data();
    return c;
  }

  VnmMatmulArgs at(int64_t b) const {
    VnmMatmulArgs a = args;
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
