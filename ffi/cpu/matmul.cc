// The handler of the product of a packed and a dense matrix.
#include <algorithm>
#include <cstring>

#include "../call/matmul.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "scratch.h"

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

ffi::Error Matmul(ffi::ThreadPool pool, int64_t dense_k_last, int64_t out_packed_last, ffi::AnyBuffer values,
                  ffi::AnyBuffer metadata, ffi::AnyBuffer dense, ffi::Result<ffi::AnyBuffer> out) {
  constexpr const char* kName = "s24_matmul";
  const MatmulCall p = MatmulCall::of(kName, dense_k_last, out_packed_last, values, metadata, dense, *out);
  if (p.error.failure()) return p.error;
  if (p.empty()) return ffi::Error::Success();
  const MatmulArgs& a = p.args;
  if (a.depth == 0) {
    std::memset(a.out, 0, size_t(p.batch.count() * p.out_bytes()));
    return ffi::Error::Success();
  }
  const Grid grid(p.batch.count(), a.rows, a.cols, pool.num_threads());
  const int64_t tasks = grid.row_blocks * grid.col_blocks;
  return parallel_for_with_scratch(kName, pool, p.batch.count() * tasks, [&](int64_t begin, int64_t end, void* scratch) {
    for_each_batch(begin, end, tasks, [&](int64_t b, int64_t task0, int64_t task1) {
      const MatmulArgs one = p.at(b);
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
}

S24_TARGET("s24_matmul", Matmul, on_pool(takes<3>, gives<1>, "dense_k_last", "out_packed_last"));

}  // namespace
}  // namespace s24
