// Checked calls of V:N:M packing, unpacking and gathering.
#pragma once
#include <initializer_list>

#include "../core/packed_vnm.h"
#include "shapes.h"

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
    return depth_last ? of_lead(lead, {rows, depth}) : of_lead(lead, {depth, rows});
  }
  Dims values(const Dims& lead) const { return of_lead(lead, {rows, 2 * groups()}); }
  Dims metadata(const Dims& lead) const { return of_lead(lead, {rows, ceil_div(groups(), 2)}); }
  Dims columns(const Dims& lead) const { return of_lead(lead, {rows / v, groups(), 4}); }
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

struct PackVnmCall : Call {
  PackVnmArgs shared{};  // without pointers
  VnmShape shape;
  Operand dense, mask, values, metadata, columns;
  using Call::Call;

  static PackVnmCall select(const char* target, int64_t trailing, int64_t v, int64_t m, int64_t exact, const ffi::AnyBuffer& x,
                        const ffi::AnyBuffer& mask) {
    PackVnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    check.shape("the result", mask, dims_of(x));
    check.type("the result", mask, ffi::DataType::PRED, "bool");
    const bool best = check_exact(check, s, exact);
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data()};
    c.mask = {mask.untyped_data()};
    return c.set(PackVnmOp::kMask, dtype, best, s, Batch(leading(dims_of(x), 2), {}));
  }

  static PackVnmCall pack(const char* target, int64_t trailing, int64_t v, int64_t m, int64_t exact, const ffi::AnyBuffer& x,
                      const VnmParts& parts) {
    PackVnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    const Dims lead = leading(dims_of(x), 2);
    const bool best = check_exact(check, s, exact);
    if (check.ok()) parts.check(check, s, lead, lead, lead, x.element_type());
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data()};
    return c.set(PackVnmOp::kPack, dtype, best, s, Batch(lead, {}), &parts);
  }

  static PackVnmCall pack_masked(const char* target, int64_t trailing, int64_t v, int64_t m, const ffi::AnyBuffer& x,
                             const ffi::AnyBuffer& mask, const VnmParts& parts) {
    PackVnmCall c(target);
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
    return c.set(PackVnmOp::kPackMasked, dtype, false, s, Batch(lead, {x_lead, mask_lead}), &parts);
  }

  static PackVnmCall gather(const char* target, int64_t trailing, int64_t v, int64_t m, const ffi::AnyBuffer& x,
                        const VnmParts& parts) {
    PackVnmCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
    const Dims x_lead = leading(dims_of(x), 2), m_lead = parts.metadata_lead(), c_lead = parts.columns_lead();
    const Dims lead = check.broadcast("x and columns", check.broadcast("x and metadata", x_lead, m_lead), c_lead);
    if (check.ok()) parts.check(check, s, lead, m_lead, c_lead, x.element_type());
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data(), 0};
    c = c.set(PackVnmOp::kGather, dtype, false, s, Batch(lead, {x_lead, m_lead, c_lead}), &parts);
    c.metadata.batch_operand = 1;
    c.columns.batch_operand = 2;
    return c;
  }

  static PackVnmCall unpack(const char* target, int64_t trailing, int64_t v, int64_t m, const VnmParts& parts,
                        const ffi::AnyBuffer& dense) {
    PackVnmCall c(target);
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
    c = c.set(PackVnmOp::kUnpack, dtype, false, s, Batch(lead, {v_lead, m_lead, c_lead}), &parts);
    c.values.batch_operand = 0;
    c.metadata.batch_operand = 1;
    c.columns.batch_operand = 2;
    return c;
  }

  PackVnmArgs at(int64_t b) const {
    const int64_t size = size_of(shared.dtype);
    const auto bytes_at = [&](const Operand& o, int64_t bytes) {
      return reinterpret_cast<uint8_t*>(o.at(batch, b, batch.rest() * bytes));
    };
    PackVnmArgs a = shared;
    a.dense = bytes_at(dense, shape.rows * shape.depth * size);
    a.mask = bytes_at(mask, shape.rows * shape.depth);
    a.values = bytes_at(values, shape.values_size() * size);
    a.metadata = bytes_at(metadata, shape.metadata_size());
    a.columns = bytes_at(columns, shape.columns_size());
    return a;
  }

 private:
  PackVnmCall& set(PackVnmOp op, Dtype dtype, bool exact, const VnmShape& s, const Batch& all,
                   const VnmParts* parts = nullptr) {
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

}  // namespace s24
