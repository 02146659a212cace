// Checked calls of packing to 2:4, unpacking and gathering.
#pragma once
#include "../core/packed24.h"
#include "compressed24.h"
#include "handler.h"

namespace s24 {

struct PackCall : Call {
  PackOp op{};
  Dtype dtype{};
  Groups groups{};  // of a batch element
  int64_t dense_step = 0, values_step = 0, bytes_step = 0;
  // Sizes of the packed matrix if its values are the head of a compressed matrix of cuSPARSELt; 0 if they are an array of
  // their own.
  int64_t rows = 0, depth = 0;
  bool strided = false;  // members of a group are a quarter of the axis apart, and not neighbours
  Operand dense, mask, scale, values, metadata, keys;
  Draws draws;
  using Call::Call;

  // Without a mask or keys.
  static PackCall plain(const char* target, PackOp op, int64_t trailing, const ffi::AnyBuffer& x,
                        const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata, bool strided = false) {
    PackCall c(target);
    c.strided = strided;
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
    if (check.ok()) c.check_packed(check, g, g.lead, x, values, metadata);
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data()};
    return c.set(op, dtype, g, Batch(g.lead, {}, c.least(g)), values.untyped_data(), metadata.untyped_data());
  }

  static PackCall masked(const char* target, int64_t trailing, const ffi::AnyBuffer& x, const ffi::AnyBuffer& mask,
                         const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
    PackCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    check.type("mask", mask, ffi::DataType::PRED, "bool");
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing), gm = GroupShape::of(check, dims_of(mask), trailing);
    check.require(g.len == gm.len && g.inner == gm.inner,
                  "mask has shape " + text(dims_of(mask)) + ", x has shape " + text(dims_of(x)));
    const Dims lead = check.broadcast("x and mask", g.lead, gm.lead);
    if (check.ok()) c.check_packed(check, g, lead, x, values, metadata);
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data(), 0};
    c.mask = {mask.untyped_data(), 1};
    return c.set(PackOp::kMasked, dtype, g, Batch(lead, {g.lead, gm.lead}, c.least(g)), values.untyped_data(),
                 metadata.untyped_data());
  }

  static PackCall mvue(const char* target, int64_t trailing, int64_t exact, const ffi::AnyBuffer& key,
                       const ffi::AnyBuffer& x, const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata,
                       bool strided = false) {
    PackCall c(target);
    c.strided = strided;
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const bool best = check.flag("exact", exact);
    check.type("key", key, ffi::DataType::U32, "uint32");
    const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
    if (check.ok()) c.check_packed(check, keyed.group, keyed.lead, x, values, metadata);
    if (!check.ok()) return c.error = check.error(), c;
    c.keys = {key.untyped_data(), 0};
    c.draws = keyed.draws;
    c.dense = {x.untyped_data(), 1};
    return c.set(best ? PackOp::kMvueExact : PackOp::kMvueSequential, dtype, keyed.group, keyed.batch,
                 values.untyped_data(), metadata.untyped_data());
  }

  // Of the soft threshold times a scale; scale (batch...), x (batch..., shape).
  static PackCall soft(const char* target, int64_t trailing, const ffi::AnyBuffer& x, const ffi::AnyBuffer& scale,
                       const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
    PackCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const EntryBatch all = EntryBatch::scaled(check, scale, x, trailing);
    if (check.ok()) c.check_packed(check, all.group, all.lead, x, values, metadata);
    if (!check.ok()) return c.error = check.error(), c;
    c.scale = {scale.untyped_data(), 0};
    c.dense = {x.untyped_data(), 1};
    return c.set(PackOp::kSoft, dtype, all.group, all.batch, values.untyped_data(), metadata.untyped_data());
  }

  static PackCall gather(const char* target, int64_t trailing, const ffi::AnyBuffer& x, const ffi::AnyBuffer& metadata,
                         const ffi::AnyBuffer& values) {
    PackCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
    const Dims meta_lead = packed_lead(check, "metadata", dims_of(metadata), g, g.bytes_len());
    const Dims lead = check.broadcast("x and metadata", g.lead, meta_lead);
    if (check.ok()) check.shape("values", values, g.packed(lead, g.values_len()));
    check.require(values.element_type() == x.element_type(), "values must have the dtype of x");
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {x.untyped_data(), 0};
    c.set(PackOp::kGather, dtype, g, Batch(lead, {g.lead, meta_lead}), values.untyped_data(), metadata.untyped_data());
    c.metadata.batch_operand = 1;
    return c;
  }

  static PackCall unpack(const char* target, int64_t trailing, const ffi::AnyBuffer& values,
                         const ffi::AnyBuffer& metadata, const ffi::AnyBuffer& dense) {
    PackCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("values", values);
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
    check.require(dense.element_type() == values.element_type(), "the result must have the dtype of values");
    const GroupShape g = GroupShape::of(check, dims_of(dense), trailing);
    const Dims value_lead = packed_lead(check, "values", c.values_dims(g, values), g, g.values_len());
    const Dims meta_lead = packed_lead(check, "metadata", dims_of(metadata), g, g.bytes_len());
    const Dims lead = check.broadcast("values and metadata", value_lead, meta_lead);
    check.require(lead == g.lead, "the result has shape " + text(dims_of(dense)) + ", expected " + text(g.array(lead)));
    if (!check.ok()) return c.error = check.error(), c;
    c.dense = {dense.untyped_data()};
    c.set(PackOp::kUnpack, dtype, g, Batch(lead, {value_lead, meta_lead}, c.least(g)), values.untyped_data(),
          metadata.untyped_data());
    c.values.batch_operand = 0;
    c.metadata.batch_operand = 1;
    return c;
  }

  PackArgs at(int64_t b) const {
    const int64_t size = size_of(dtype);
    PackArgs a = {op,
                  dtype,
                  dense.at(batch, b, dense_step * size),
                  reinterpret_cast<uint8_t*>(mask.at(batch, b, dense_step)),
                  values.at(batch, b, values_step * size),
                  reinterpret_cast<uint8_t*>(metadata.at(batch, b, bytes_step)),
                  groups,
                  draws,
                  scale.at(batch, b, size),
                  strided};
    a.draws.words = keys.words(batch, b, draws);
    if (rows == 0 || op == PackOp::kUnpack) return a;
    a.behind = static_cast<uint8_t*>(a.values) + rows * (depth / 2) * size;
    a.rows = rows;
    a.depth = depth;
    return a;
  }

 private:
  PackCall& set(PackOp what, Dtype type, const GroupShape& g, const Batch& all, const void* v, const void* m) {
    op = what;
    dtype = type;
    batch = all;
    values = {v};
    metadata = {m};
    const int64_t packed_rows = all.rest() * g.inner_size();
    if (rows != 0 && rows != packed_rows)
      error = ffi::Error::InvalidArgument(std::string(target) + ": compressed matrices need leading dimensions of their own");
    dense_step = packed_rows * g.len;
    values_step = (rows == 0 ? packed_rows : compressed_rows(rows, 2)) * (g.len / 2);
    bytes_step = packed_rows * g.bytes_len();
    groups = {all.rest(), g.len, g.inner_size()};
    // Rows whose metadata are whole bytes follow each other without a gap, so they are treated as one long row.
    if (!strided && groups.inner == 1 && groups.len % 8 == 0) groups = Groups{1, groups.outer * groups.len, 1};
    return *this;
  }

  // The dims of `values` without the rows of metadata that a compressed matrix appends. Notes its sizes in rows and depth.
  Dims values_dims(const GroupShape& g, const ffi::AnyBuffer& values) {
    Dims d = dims_of(values);
    const Dims& outer = g.inner.empty() ? g.lead : g.inner;
    if (g.inner.size() <= 1 && !outer.empty() && drop_metadata(d, outer.back(), g.len, values))
      rows = outer.back(), depth = g.len;
    return d;
  }
  // How many leading dimensions must be iterated over: the values of one compressed matrix do not follow those of another.
  size_t least(const GroupShape& g) const { return rows == 0 ? 0 : g.lead.size() + g.inner.size() - 1; }

  void check_packed(Check& check, const GroupShape& g, const Dims& lead, const ffi::AnyBuffer& x,
                    const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
    check.shape("values", values_dims(g, values), g.packed(lead, g.values_len()));
    check.shape("metadata", metadata, g.packed(lead, g.bytes_len()));
    check.require(values.element_type() == x.element_type(), "values must have the dtype of x");
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  }

  // The part `lead` of the dims of a packed array, which are lead + inner + (last).
  static Dims packed_lead(Check& check, const char* name, const Dims& d, const GroupShape& g, int64_t last) {
    const size_t tail = g.inner.size() + 1;
    if (!check.require(d.size() >= tail, std::string(name) + " has too few dimensions: " + text(d))) return {};
    const Dims lead = leading(d, tail);
    check.require(d == g.packed(lead, last),
                  std::string(name) + " has shape " + text(d) + ", expected " + text(g.packed(lead, last)));
    return lead;
  }
};

// Packs one matrix along its rows and along its columns. A CPU and a GPU do it at once in ways of their own (packed24.cc in
// their folders).
ffi::Error compute_both(Device& device, const PackCall& rows, const PackCall& columns);

}  // namespace s24
