// Handlers of operations on tiles of 4x4: transposable masks, and pruning along both axes.
#include "../call/transposable.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const TileCall& c) {
  return c.error.failure() ? c.error : status(c.target, launch_transposable(c.args, stream));
}

ffi::Error TransposableMask(cudaStream_t stream, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, TileCall::of("s24_transposable_mask", TileOp::kTransposableMask, w, *out));
}

ffi::Error DoublePrune(cudaStream_t stream, int64_t first, ffi::AnyBuffer w, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, TileCall::double_prune("s24_double_prune", first, w, *out));
}

S24_TARGET("s24_transposable_mask", TransposableMask, on_stream(takes<1>, gives<1>), kInGraphs);
S24_TARGET("s24_double_prune", DoublePrune, on_stream(takes<1>, gives<1>, "first"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
