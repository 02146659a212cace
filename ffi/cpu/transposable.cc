// Handlers of operations on tiles of 4x4: transposable masks, and pruning along both axes.
#include "../call/transposable.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"

namespace s24 {
namespace {

constexpr int64_t kTilesOfBlock = 4096;  // which cost much more than to claim them

ffi::Error run(ffi::ThreadPool& pool, const TileCall& c) {
  if (c.error.failure()) return c.error;
  if (c.args.cols == 0) return ffi::Error::Success();
  const int64_t grain = ceil_div(kTilesOfBlock, c.args.cols);  // rows of tiles
  parallel_for(pool, c.args.rows / 4, grain, [&](int64_t b, int64_t e) { kernels().transposable(c.args, b, e); });
  return ffi::Error::Success();
}

ffi::Error TransposableMask(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, TileCall::of("s24_transposable_mask", TileOp::kTransposableMask, w, *out));
}

ffi::Error DoublePrune(ffi::ThreadPool pool, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, TileCall::double_prune("s24_double_prune", first, w, *out));
}

S24_TARGET("s24_transposable_mask", TransposableMask, on_pool(takes<1>, gives<1>));
S24_TARGET("s24_double_prune", DoublePrune, on_pool(takes<1>, gives<1>, "first"));

}  // namespace
}  // namespace s24
