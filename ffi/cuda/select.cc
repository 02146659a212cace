// Handlers of masks and pruned arrays.
#include "../call/groupwise.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const GroupwiseCall& c) {
  return launch_each(c, c.batch.count(), [&](int64_t b) { return launch_select(c.at(b), stream); });
}

ffi::Error Mask(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::plain("s24_mask", GroupwiseOp::kMask, trailing, x, *out));
}

ffi::Error Prune(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::plain("s24_prune", GroupwiseOp::kPrune, trailing, x, *out));
}

S24_TARGET("s24_mask", Mask, on_stream(takes<1>, gives<1>, "trailing"), kInGraphs);
S24_TARGET("s24_prune", Prune, on_stream(takes<1>, gives<1>, "trailing"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
