// Calls of 2:4 operations: the buffers of a handler, checked, and the kernel's arguments for each element of a batch. The
// handlers of all platforms run these; Python has checked before, so the errors are a backstop.
#pragma once
#include "../core/metadata_layouts.h"
#include "shapes.h"

namespace s24 {

inline Dims leading(const Dims& d, size_t tail) {
  return Dims(d.begin(), d.size() < tail ? d.begin() : d.end() - int64_t(tail));
}

// Dims of packed values (..., rows, depth / 2) may be those of a compressed matrix of cuSPARSELt: then the rows of its
// metadata are dropped. Whether they were.
inline bool drop_metadata(Dims& d, int64_t rows, int64_t depth, const ffi::AnyBuffer& values) {
  if (d.size() < 2 || rows == 0 || depth % 32 != 0 || values.element_type() == ffi::DataType::F32) return false;
  int64_t& found = d[d.size() - 2];
  if (found != compressed_rows(rows, 2)) return false;
  found = rows;
  return true;
}

struct Call {
  const char* target;
  ffi::Error error = ffi::Error::Success();
  Batch batch = Batch({}, {});

  explicit Call(const char* name) : target(name) {}
};

// A buffer, and its place among the operands of the batch: -1 for one that has the batch of the result. Unused: null.
struct Operand {
  const void* data = nullptr;
  int batch_operand = -1;

  char* at(const Batch& batch, int64_t b, int64_t bytes) const {
    if (data == nullptr) return nullptr;
    return at_bytes(data, (batch_operand < 0 ? b : batch.index(size_t(batch_operand), b)) * bytes);
  }
};

// ---- an array to one of the same shape

struct MapCall : Call {
  MapArgs first{};
  Operand x, keys;
  using Call::Call;

  static MapCall plain(const char* target, MapOp op, int64_t trailing, const ffi::AnyBuffer& x, const ffi::AnyBuffer& out) {
    MapCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
    check.shape("the result", out, dims_of(x));
    if (op == MapOp::kMask)
      check.type("the result", out, ffi::DataType::PRED, "bool");
    else
      check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
    if (!check.ok()) return c.error = check.error(), c;
    c.x = {x.untyped_data()};
    c.first = {op, dtype, nullptr, out.untyped_data(), {product(g.lead, 0, g.lead.size()), g.len, g.inner_size()}, {0, 0}};
    return c;
  }

  // key (batch..., 2), x (batch..., shape): the group counter restarts for every batch element.
  static MapCall mvue(const char* target, int64_t trailing, int64_t exact, const ffi::AnyBuffer& key,
                      const ffi::AnyBuffer& x, const ffi::AnyBuffer& out) {
    MapCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const bool best = check.flag("exact", exact);
    check.type("key", key, ffi::DataType::U32, "uint32");
    check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
    const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
    check.shape("the result", out, keyed.group.array(keyed.lead));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = keyed.batch;
    c.keys = {key.untyped_data(), 0};
    c.x = {x.untyped_data(), 1};
    c.first = {best ? MapOp::kMvueExact : MapOp::kMvueSequential, dtype, nullptr, out.untyped_data(),
               {keyed.batch.rest(), keyed.group.len, keyed.group.inner_size()}, {0, 0}};
    return c;
  }

  MapArgs at(int64_t b) const {
    const int64_t bytes = first.groups.count() * 4 * size_of(first.dtype);
    MapArgs a = first;
    a.x = x.at(batch, b, bytes);
    a.out = at_bytes(first.out, b * bytes);
    return a;
  }
  // Two words, where the arrays are; or null.
  const uint32_t* key(int64_t b) const {
    return reinterpret_cast<const uint32_t*>(keys.at(batch, b, 2 * sizeof(uint32_t)));
  }
};

// ---- tiles of 4x4

struct TileCall : Call {
  TileArgs args{};
  using Call::Call;

  static TileCall of(const char* target, TileOp op, const ffi::AnyBuffer& w, const ffi::AnyBuffer& out) {
    TileCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("w", w);
    const Dims dims = dims_of(w);
    check.shape("the result", out, dims);
    if (op == TileOp::kTransposableMask)
      check.type("the result", out, ffi::DataType::PRED, "bool");
    else
      check.require(out.element_type() == w.element_type(), "the result must have the dtype of w");
    if (check.require(dims.size() >= 2, "w needs two dimensions, got shape " + text(dims)))
      check.require(dims[dims.size() - 2] % 4 == 0 && dims.back() % 4 == 0,
                    "both last dimensions of " + text(dims) + " must be multiples of 4");
    if (!check.ok()) return c.error = check.error(), c;
    c.args = {op, dtype, w.untyped_data(), out.untyped_data(), product(dims, 0, dims.size() - 1), dims.back()};
    return c;
  }

  static TileCall double_prune(const char* target, int64_t first, const ffi::AnyBuffer& w, const ffi::AnyBuffer& out) {
    Check check(target);
    TileCall c = of(target, check.flag("first", first) ? TileOp::kPruneRowsFirst : TileOp::kPruneColumnsFirst, w, out);
    if (!check.ok()) c.error = check.error();
    return c;
  }
};

// ---- packing and unpacking

struct PackCall : Call {
  PackOp op{};
  Dtype dtype{};
  Groups groups{};  // of a batch element
  int64_t dense_step = 0, values_step = 0, bytes_step = 0;
  // Size of a matrix whose values stand in a compressed matrix of cuSPARSELt, which CUDA handlers take; 0: alone.
  int64_t rows = 0, depth = 0;
  bool strided = false;
  Operand dense, mask, values, metadata, keys;
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
    c.dense = {x.untyped_data(), 1};
    return c.set(best ? PackOp::kMvueExact : PackOp::kMvueSequential, dtype, keyed.group, keyed.batch,
                 values.untyped_data(), metadata.untyped_data());
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
    return {op,
            dtype,
            dense.at(batch, b, dense_step * size),
            reinterpret_cast<uint8_t*>(mask.at(batch, b, dense_step)),
            values.at(batch, b, values_step * size),
            reinterpret_cast<uint8_t*>(metadata.at(batch, b, bytes_step)),
            groups,
            Key{0, 0},
            strided};
  }
  const uint32_t* key(int64_t b) const {
    return reinterpret_cast<const uint32_t*>(keys.at(batch, b, 2 * sizeof(uint32_t)));
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
    // Rows of whole metadata bytes follow each other without a gap: then they are one long row.
    if (!strided && groups.inner == 1 && groups.len % 8 == 0) groups = Groups{1, groups.outer * groups.len, 1};
    return *this;
  }

  // Of `values`, without the rows of metadata in a compressed matrix.
  Dims values_dims(const GroupShape& g, const ffi::AnyBuffer& values) {
    Dims d = dims_of(values);
    const Dims& outer = g.inner.empty() ? g.lead : g.inner;
    if (g.inner.size() <= 1 && !outer.empty() && drop_metadata(d, outer.back(), g.len, values))
      rows = outer.back(), depth = g.len;
    return d;
  }
  // How many leading dimensions of the batch are not one piece: compressed matrices stand apart.
  size_t least(const GroupShape& g) const { return rows == 0 ? 0 : g.lead.size() + g.inner.size() - 1; }

  void check_packed(Check& check, const GroupShape& g, const Dims& lead, const ffi::AnyBuffer& x,
                    const ffi::AnyBuffer& values, const ffi::AnyBuffer& metadata) {
    check.shape("values", values_dims(g, values), g.packed(lead, g.values_len()));
    check.shape("metadata", metadata, g.packed(lead, g.bytes_len()));
    check.require(values.element_type() == x.element_type(), "values must have the dtype of x");
    check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  }

  // Leading dims of a packed array (lead + inner, last); the part that belongs to `lead`.
  static Dims packed_lead(Check& check, const char* name, const Dims& d, const GroupShape& g, int64_t last) {
    const size_t tail = g.inner.size() + 1;
    if (!check.require(d.size() >= tail, std::string(name) + " has too few dimensions: " + text(d))) return {};
    const Dims lead = leading(d, tail);
    check.require(d == g.packed(lead, last),
                  std::string(name) + " has shape " + text(d) + ", expected " + text(g.packed(lead, last)));
    return lead;
  }
};

// ---- out(R, N) = P(R, K) D(K, N)

struct Product : Call {
  MatmulArgs args{};  // of the first element
  using Call::Call;

  static Product of(const char* target, int64_t dense_k_last, int64_t out_packed_last, const ffi::AnyBuffer& values,
                    const ffi::AnyBuffer& metadata, const ffi::AnyBuffer& dense, const ffi::AnyBuffer& out) {
    Product p(target);
    Check check(target);
    MatmulArgs& a = p.args;
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
    if (!check.ok()) return p.error = check.error(), p;
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
    if (!check.ok()) return p.error = check.error(), p;
    p.batch = Batch(lead, {v_lead, m_lead, d_lead}, lead.size());
    a.values = values.untyped_data();
    a.metadata = static_cast<const uint8_t*>(metadata.untyped_data());
    a.dense = dense.untyped_data();
    a.out = out.untyped_data();
    return p;
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

}  // namespace s24
