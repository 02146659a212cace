// FFI handler of the product of a packed and a dense matrix.
#include <algorithm>
#include <cstring>

#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "scratch.h"
#include "shapes.h"

namespace s24 {
namespace {

// Blocks small enough that every thread has work, and of nearly equal size, so that all end together. The result does not
// depend on them.
struct Grid {
  int64_t rows = kMatmulRows, cols = kMatmulCols, row_blocks, col_blocks;

  Grid(int64_t batch, int64_t total_rows, int64_t total_cols, int64_t threads) {
    constexpr int64_t kLeastRows = 48, kLeastCols = 128, kRowStep = 16, kColStep = 64;
    for (;;) {
      row_blocks = ceil_div(total_rows, rows);
      col_blocks = ceil_div(total_cols, cols);
      if (threads <= 1 || batch * row_blocks * col_blocks >= 4 * threads) break;
      if (rows > kLeastRows && row_blocks * rows >= kLeastRows * 2) {
        rows -= kLeastRows;
      } else if (cols > kLeastCols) {
        cols /= 2;
      } else {
        break;
      }
    }
    rows = ceil_div(ceil_div(total_rows, row_blocks), kRowStep) * kRowStep;
    cols = ceil_div(ceil_div(total_cols, col_blocks), kColStep) * kColStep;
    row_blocks = ceil_div(total_rows, rows);
    col_blocks = ceil_div(total_cols, cols);
  }
};

Dims leading(const Dims& d) { return Dims(d.begin(), d.end() - 2); }

ffi::Error Matmul(ffi::ThreadPool pool, int64_t dense_k_last, int64_t out_packed_last, ffi::AnyBuffer values,
                  ffi::AnyBuffer metadata, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  Check check("s24_matmul");
  MatmulArgs a{};
  a.in = check.dtype("values", values);
  a.out_dtype = check.dtype("the result", *out);
  a.dense_k_last = dense_k_last != 0;
  a.out_packed_last = out_packed_last != 0;
  check.require(dense.element_type() == values.element_type(), "values and dense must have the same dtype");
  check.type("metadata", metadata, ffi::DataType::U8, "uint8");
  const Dims v = dims_of(values), m = dims_of(metadata), d = dims_of(dense), o = dims_of(*out);
  check.require(v.size() >= 2 && m.size() >= 2 && d.size() >= 2 && o.size() >= 2, "operands need two dimensions");
  if (!check.ok()) return check.error();
  a.rows = v[v.size() - 2];
  a.depth = 2 * v.back();
  a.cols = a.dense_k_last ? d[d.size() - 2] : d.back();
  check.require(a.depth % 4 == 0, "values hold pairs: their last dimension must be even, got " + text(v));
  check.require(m[m.size() - 2] == a.rows && m.back() == ceil_div(a.depth, 8),
                "metadata of shape " + text(m) + " does not belong to values of shape " + text(v));
  check.require((a.dense_k_last ? d.back() : d[d.size() - 2]) == a.depth,
                "contraction " + std::to_string(a.depth) + " of the packed operand differs from dense " + text(d));
  const Dims packed_lead = check.broadcast("values and metadata", leading(v), leading(m));
  Dims want = check.broadcast("packed and dense", packed_lead, leading(d));
  const Dims lead = want;
  want.push_back(a.out_packed_last ? a.cols : a.rows);
  want.push_back(a.out_packed_last ? a.rows : a.cols);
  check.shape("the result", *out, want);
  if (!check.ok()) return check.error();

  const Batch batch(lead, {leading(v), leading(m), leading(d)}, lead.size());
  const int64_t in_size = size_of(a.in), out_size = size_of(a.out_dtype);
  if (batch.count() * a.rows * a.cols == 0) return ffi::Error::Success();
  if (a.depth == 0) {
    std::memset(out->untyped_data(), 0, size_t(batch.count() * a.rows * a.cols * out_size));
    return ffi::Error::Success();
  }
  const Grid grid(batch.count(), a.rows, a.cols, pool.num_threads());
  const int64_t tasks = grid.row_blocks * grid.col_blocks;
  parallel_for(pool, batch.count() * tasks, 1, [&](int64_t begin, int64_t end) {
    void* scratch = thread_scratch();
    for_each_batch(begin, end, tasks, [&](int64_t b, int64_t task0, int64_t task1) {
      MatmulArgs one = a;
      one.values = at_bytes(values.untyped_data(), batch.index(0, b) * a.rows * (a.depth / 2) * in_size);
      one.metadata = reinterpret_cast<uint8_t*>(
          at_bytes(metadata.untyped_data(), batch.index(1, b) * a.rows * ceil_div(a.depth, 8)));
      one.dense = at_bytes(dense.untyped_data(), batch.index(2, b) * a.depth * a.cols * in_size);
      one.out = at_bytes(out->untyped_data(), b * a.rows * a.cols * out_size);
      for (int64_t t = task0; t < task1; ++t) {
        MatmulBlock block;
        block.row0 = t % grid.row_blocks * grid.rows;
        block.row1 = std::min(a.rows, block.row0 + grid.rows);
        block.col0 = t / grid.row_blocks * grid.cols;
        block.col1 = std::min(a.cols, block.col0 + grid.cols);
        kernels().matmul(one, block, scratch);
      }
    });
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMatmul, Matmul,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Attr<int64_t>("dense_k_last")
                           .Attr<int64_t>("out_packed_last")
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>());

}  // namespace

const Target kMatmulTargets[] = {{"s24_matmul", kMatmul}, {nullptr, nullptr}};

}  // namespace s24
