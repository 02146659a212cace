// The handler that counts the groups of four with more than two non-zeros.
#include "../call/prune_check.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error PruneCheck(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> found) {
  const PruneCheckCall c = PruneCheckCall::of("s24_prune_check", trailing, x, *found);
  return launch_each(c, c.arrays, [&](int64_t b) { return launch_prune_check(c.at(b), stream); });
}

S24_TARGET("s24_prune_check", PruneCheck, on_stream(takes<1>, gives<1>, "trailing"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
