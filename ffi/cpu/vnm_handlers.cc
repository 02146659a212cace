// FFI handlers of V:N:M arrays.
#include <algorithm>
#include <cstring>

#include "../core/vnm.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "scratch.h"
#include "shapes.h"

namespace s24 {
namespace {

constexpr int64_t kGrainElements = 1 << 15;

// Matrices (lead..., R, K), or (lead..., K, R) if trailing is 1, and their packed parts.
struct VnmShape {
  int64_t rows = 0, depth = 0, v = 1, m = 1;
  bool depth_last = true;

  static VnmShape of(Check& check, const Dims& dense, int64_t trailing, int64_t v, int64_t m) {
    VnmShape s;
    check.require(trailing == 0 || trailing == 1, "trailing must be 0 or 1, got " + std::to_string(trailing));
    check.require(v >= kVnmLanes && v <= kVnmMaxV && v % kVnmLanes == 0 && m >= 4 && m <= kVnmMaxM,
                  "no kernels for v=" + std::to_string(v) + ", m=" + std::to_string(m));
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
  Dims dense(Dims lead) const {
    lead.insert(lead.end(), {depth_last ? rows : depth, depth_last ? depth : rows});
    return lead;
  }
  Dims values(Dims lead) const { return with(lead, {rows, 2 * groups()}); }
  Dims metadata(Dims lead) const { return with(lead, {rows, ceil_div(groups(), 2)}); }
  Dims columns(Dims lead) const { return with(lead, {rows / v, groups(), 4}); }

 private:
  static Dims with(Dims lead, std::initializer_list<int64_t> tail) {
    lead.insert(lead.end(), tail);
    return lead;
  }
};

Dims leading(const ffi::AnyBuffer& b, size_t tail) {
  const Dims d = dims_of(b);
  return Dims(d.begin(), d.size() < tail ? d.begin() : d.end() - int64_t(tail));
}

// The buffers of one call. Unused ones are null; the index is the operand's place in the batch (-1: as the result).
struct Operand {
  const void* data = nullptr;
  int batch_operand = -1;
};

struct VnmCall {
  VnmOp op;
  Dtype dtype;
  bool exact;
  Operand dense, mask, values, metadata, columns;
};

ffi::Error run_vnm(ffi::ThreadPool& pool, const VnmCall& c, const VnmShape& s, const Batch& batch) {
  VnmArgs shared{};
  shared.op = c.op;
  shared.dtype = c.dtype;
  shared.exact = c.exact;
  shared.depth_last = s.depth_last;
  shared.outer = batch.rest();
  shared.rows = s.rows;
  shared.depth = s.depth;
  shared.v = s.v;
  shared.m = s.m;
  const int64_t units = vnm_units(shared), size = size_of(c.dtype);
  if (units == 0 || batch.count() == 0) return ffi::Error::Success();
  const int64_t grain = std::max<int64_t>(1, kGrainElements / (vnm_unit_rows(shared) * kVnmGroups * s.m));
  parallel_for(pool, batch.count() * units, grain, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units, [&](int64_t b, int64_t unit0, int64_t unit1) {
      const auto place = [&](const Operand& o, int64_t bytes) -> uint8_t* {
        if (o.data == nullptr) return nullptr;
        const int64_t at = o.batch_operand < 0 ? b : batch.index(size_t(o.batch_operand), b);
        return reinterpret_cast<uint8_t*>(at_bytes(o.data, at * batch.rest() * bytes));
      };
      VnmArgs args = shared;
      args.dense = place(c.dense, s.rows * s.depth * size);
      args.mask = place(c.mask, s.rows * s.depth);
      args.values = place(c.values, s.values_size() * size);
      args.metadata = place(c.metadata, s.metadata_size());
      args.columns = place(c.columns, s.columns_size());
      kernels().vnm(args, unit0, unit1);
    });
  });
  return ffi::Error::Success();
}

void check_parts(Check& check, const VnmShape& s, const Dims& lead, const ffi::AnyBuffer& x, const ffi::AnyBuffer& values,
                 const ffi::AnyBuffer& metadata, const ffi::AnyBuffer& columns) {
  check.shape("values", values, s.values(lead));
  check.shape("metadata", metadata, s.metadata(lead));
  check.shape("columns", columns, s.columns(lead));
  check.require(values.element_type() == x.element_type(), "values must have the dtype of x");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.type("columns", columns, ffi::DataType::U8, "uint8");
}

void check_exact(Check& check, const VnmShape& s, bool exact) {
  check.require(!exact || s.m <= kVnmMaxExactM, "no exhaustive search for m=" + std::to_string(s.m));
}

ffi::Error VnmMask(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> mask) {
  Check check("s24_vnm_mask");
  const Dtype dtype = check.dtype("x", x);
  const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
  check.shape("the result", *mask, dims_of(x));
  check.type("the result", *mask, ffi::DataType::PRED, "bool");
  check_exact(check, s, exact != 0);
  if (!check.ok()) return check.error();
  const VnmCall c{VnmOp::kMask, dtype, exact != 0, {x.untyped_data()}, {mask->untyped_data()}, {}, {}, {}};
  return run_vnm(pool, c, s, Batch(leading(x, 2), {}));
}

ffi::Error VnmPack(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                   ffi::Result<ffi::AnyBuffer> columns) {
  Check check("s24_vnm_pack");
  const Dtype dtype = check.dtype("x", x);
  const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
  check_exact(check, s, exact != 0);
  if (!check.ok()) return check.error();
  check_parts(check, s, leading(x, 2), x, *values, *metadata, *columns);
  if (!check.ok()) return check.error();
  const VnmCall c{VnmOp::kPack, dtype, exact != 0, {x.untyped_data()}, {}, {values->untyped_data()},
                  {metadata->untyped_data()}, {columns->untyped_data()}};
  return run_vnm(pool, c, s, Batch(leading(x, 2), {}));
}

ffi::Error VnmPackMasked(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                         ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                         ffi::Result<ffi::AnyBuffer> columns) {
  Check check("s24_vnm_pack_masked");
  const Dtype dtype = check.dtype("x", x);
  check.type("mask", mask, ffi::DataType::PRED, "bool");
  const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
  const Dims lead = check.broadcast("x and mask", leading(x, 2), leading(mask, 2));
  if (!check.ok()) return check.error();
  check.shape("mask", mask, s.dense(leading(mask, 2)));
  check_parts(check, s, lead, x, *values, *metadata, *columns);
  if (!check.ok()) return check.error();
  const VnmCall c{VnmOp::kPackMasked, dtype, false, {x.untyped_data(), 0}, {mask.untyped_data(), 1},
                  {values->untyped_data()}, {metadata->untyped_data()}, {columns->untyped_data()}};
  return run_vnm(pool, c, s, Batch(lead, {leading(x, 2), leading(mask, 2)}));
}

ffi::Error VnmGather(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  Check check("s24_vnm_gather");
  const Dtype dtype = check.dtype("x", x);
  const VnmShape s = VnmShape::of(check, dims_of(x), trailing, v, m);
  const Dims x_lead = leading(x, 2), m_lead = leading(metadata, 2), c_lead = leading(columns, 3);
  const Dims lead = check.broadcast("x and columns", check.broadcast("x and metadata", x_lead, m_lead), c_lead);
  if (!check.ok()) return check.error();
  check.shape("values", *values, s.values(lead));
  check.shape("metadata", metadata, s.metadata(m_lead));
  check.shape("columns", columns, s.columns(c_lead));
  check.require(values->element_type() == x.element_type(), "values must have the dtype of x");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.type("columns", columns, ffi::DataType::U8, "uint8");
  if (!check.ok()) return check.error();
  const VnmCall c{VnmOp::kGather, dtype, false, {x.untyped_data(), 0}, {}, {values->untyped_data()},
                  {metadata.untyped_data(), 1}, {columns.untyped_data(), 2}};
  return run_vnm(pool, c, s, Batch(lead, {x_lead, m_lead, c_lead}));
}

ffi::Error VnmUnpack(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer values,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> dense) {
  Check check("s24_vnm_unpack");
  const Dtype dtype = check.dtype("values", values);
  const VnmShape s = VnmShape::of(check, dims_of(*dense), trailing, v, m);
  const Dims v_lead = leading(values, 2), m_lead = leading(metadata, 2), c_lead = leading(columns, 3);
  const Dims some = check.broadcast("values and metadata", v_lead, m_lead);
  const Dims lead = check.broadcast("values and columns", some, c_lead);
  if (!check.ok()) return check.error();
  check.shape("the result", *dense, s.dense(lead));
  check.require(dense->element_type() == values.element_type(), "the result must have the dtype of values");
  check.shape("values", values, s.values(v_lead));
  check.shape("metadata", metadata, s.metadata(m_lead));
  check.shape("columns", columns, s.columns(c_lead));
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.type("columns", columns, ffi::DataType::U8, "uint8");
  if (!check.ok()) return check.error();
  const VnmCall c{VnmOp::kUnpack, dtype, false, {dense->untyped_data()}, {}, {values.untyped_data(), 0},
                  {metadata.untyped_data(), 1}, {columns.untyped_data(), 2}};
  return run_vnm(pool, c, s, Batch(lead, {v_lead, m_lead, c_lead}));
}

ffi::Error VnmMatmul(ffi::ThreadPool pool, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                     ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::AnyBuffer dense,
                     ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_vnm_matmul");
  VnmMatmulArgs a{};
  MatmulArgs& p = a.product;
  p.in = check.dtype("values", values);
  p.out_dtype = check.dtype("the result", *out);
  p.dense_k_last = dense_k_last != 0;
  p.out_packed_last = out_packed_last != 0;
  check.require(dense.element_type() == values.element_type(), "values and dense must have the same dtype");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  check.type("columns", columns, ffi::DataType::U8, "uint8");
  const Dims d = dims_of(dense);
  check.require(values.dimensions().size() >= 2 && d.size() >= 2, "operands need two dimensions");
  if (!check.ok()) return check.error();
  p.rows = dims_of(values)[values.dimensions().size() - 2];
  p.depth = p.dense_k_last ? d.back() : d[d.size() - 2];
  p.cols = p.dense_k_last ? d[d.size() - 2] : d.back();
  const Dims v_lead = leading(values, 2), m_lead = leading(metadata, 2), c_lead = leading(columns, 3), d_lead = leading(dense, 2);
  const VnmShape s = VnmShape::of(check, {p.rows, p.depth}, 0, v, m);
  const Dims parts = check.broadcast("values, metadata and columns", check.broadcast("values and metadata", v_lead, m_lead), c_lead);
  const Dims lead = check.broadcast("packed and dense", parts, d_lead);
  if (!check.ok()) return check.error();
  check.shape("values", values, s.values(v_lead));
  check.shape("metadata", metadata, s.metadata(m_lead));
  check.shape("columns", columns, s.columns(c_lead));
  Dims want = lead;
  want.push_back(p.out_packed_last ? p.cols : p.rows);
  want.push_back(p.out_packed_last ? p.rows : p.cols);
  check.shape("the result", *out, want);
  if (!check.ok()) return check.error();
  a.v = v;
  a.m = m;

  const Batch batch(lead, {v_lead, m_lead, c_lead, d_lead}, lead.size());
  const int64_t in_size = size_of(p.in), out_size = size_of(p.out_dtype);
  if (batch.count() * p.rows * p.cols == 0) return ffi::Error::Success();
  if (p.depth == 0) {
    std::memset(out->untyped_data(), 0, size_t(batch.count() * p.rows * p.cols * out_size));
    return ffi::Error::Success();
  }
  // Many rows share a panel; few enough that every thread has work. The result does not depend on them.
  int64_t height = kVnmMatmulRows / v * v;
  const int64_t col_blocks = ceil_div(p.cols, kVnmMatmulCols);
  while (height > v && batch.count() * col_blocks * ceil_div(p.rows, height) < 4 * pool.num_threads())
    height = ceil_div(height / v, 2) * v;
  const int64_t row_blocks = ceil_div(p.rows, height), tasks = row_blocks * col_blocks;
  parallel_for(pool, batch.count() * tasks, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_scratch();
    for_each_batch(begin, end, tasks, [&](int64_t b, int64_t task0, int64_t task1) {
      VnmMatmulArgs one = a;
      one.product.values = at_bytes(values.untyped_data(), batch.index(0, b) * s.values_size() * in_size);
      one.product.metadata =
          reinterpret_cast<uint8_t*>(at_bytes(metadata.untyped_data(), batch.index(1, b) * s.metadata_size()));
      one.columns = reinterpret_cast<uint8_t*>(at_bytes(columns.untyped_data(), batch.index(2, b) * s.columns_size()));
      one.product.dense = at_bytes(dense.untyped_data(), batch.index(3, b) * p.depth * p.cols * in_size);
      one.product.out = at_bytes(out->untyped_data(), b * p.rows * p.cols * out_size);
      for (int64_t t = task0; t < task1; ++t) {
        const int64_t row0 = t % row_blocks * height, col0 = t / row_blocks * kVnmMatmulCols;
        kernels().vnm_matmul(one, {row0, std::min(p.rows, row0 + height), col0, std::min(p.cols, col0 + kVnmMatmulCols)},
                             scratch);
      }
    });
  });
  return ffi::Error::Success();
}

#define S24_VNM_BINDING \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attr<int64_t>("trailing").Attr<int64_t>("v").Attr<int64_t>("m")

XLA_FFI_DEFINE_HANDLER(kVnmMask, VnmMask, S24_VNM_BINDING.Attr<int64_t>("exact").Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmPack, VnmPack,
                       S24_VNM_BINDING.Attr<int64_t>("exact")
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmPackMasked, VnmPackMasked,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmGather, VnmGather,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmUnpack, VnmUnpack,
                       S24_VNM_BINDING.Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER(kVnmMatmul, VnmMatmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int64_t>("v")
                           .Attr<int64_t>("m")
                           .Attr<int64_t>("dense_k_last")
                           .Attr<int64_t>("out_packed_last")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

const Target kVnmTargets[] = {{"s24_vnm_mask", kVnmMask},
                              {"s24_vnm_pack", kVnmPack},
                              {"s24_vnm_pack_masked", kVnmPackMasked},
                              {"s24_vnm_gather", kVnmGather},
                              {"s24_vnm_unpack", kVnmUnpack},
                              {"s24_vnm_matmul", kVnmMatmul},
                              {nullptr, nullptr}};

}  // namespace s24
