// The handler of soft thresholds.
#include "../call/groupwise.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error Soft(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  const GroupwiseCall c = GroupwiseCall::plain("s24_soft", GroupwiseOp::kSoft, trailing, x, *out);
  return launch_each(c, c.batch.count(), [&](int64_t b) { return launch_soft(c.at(b), stream); });
}

S24_TARGET("s24_soft", Soft, on_stream(takes<1>, gives<1>, "trailing"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
