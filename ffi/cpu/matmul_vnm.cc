// The handler of the product of a V:N:M matrix and a dense one.
#include <algorithm>
#include <cstring>

#include "../call/matmul_vnm.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "scratch.h"

namespace s24 {
namespace {

ffi::Error VnmMatmul(ffi::ThreadPool pool, int64_t v, int64_t m, int64_t dense_k_last, int64_t out_packed_last,
                     ffi::AnyBuffer values, ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::AnyBuffer dense,
                     ffi::Result<ffi::AnyBuffer> out) {
  const MatmulVnmCall c = MatmulVnmCall::of("s24_vnm_matmul", v, m, dense_k_last, out_packed_last,
                                      {values, metadata, columns}, dense, *out);
  if (c.error.failure()) return c.error;
  if (c.empty()) return ffi::Error::Success();
  const MatmulArgs& p = c.args.product;
  if (p.depth == 0) {
    std::memset(p.out, 0, size_t(c.batch.count() * c.out_bytes()));
    return ffi::Error::Success();
  }
  // Many rows share a panel; few enough that every thread has work. The result does not depend on them.
  int64_t height = (p.depth > kVnmMatmulDepth ? kVnmMatmulRows / 2 : kVnmMatmulRows) / v * v;
  const int64_t col_blocks = ceil_div(p.cols, kVnmMatmulCols);
  while (height > v && c.batch.count() * col_blocks * ceil_div(p.rows, height) < 4 * pool.num_threads())
    height = ceil_div(height / v, 2) * v;
  const int64_t row_blocks = ceil_div(p.rows, height), tasks = row_blocks * col_blocks;
  return parallel_for_with_scratch(c.target, pool, c.batch.count() * tasks, [&](int64_t begin, int64_t end, void* scratch) {
    for_each_batch(begin, end, tasks, [&](int64_t b, int64_t task0, int64_t task1) {
      const MatmulVnmArgs one = c.at(b);
      for (int64_t t = task0; t < task1; ++t) {
        const int64_t row0 = t % row_blocks * height, col0 = t / row_blocks * kVnmMatmulCols;
        kernels().matmul_vnm(one, {row0, std::min(p.rows, row0 + height), col0, std::min(p.cols, col0 + kVnmMatmulCols)},
                             scratch);
      }
    });
  });
}

S24_TARGET("s24_vnm_matmul", VnmMatmul, on_pool(takes<4>, gives<1>, "v", "m", "dense_k_last", "out_packed_last"));

}  // namespace
}  // namespace s24
