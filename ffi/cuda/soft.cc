// The handler of soft thresholds.
#include "../call/groupwise.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const GroupwiseCall& c) {
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const cudaError_t e = launch_soft(c.at(b), stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

ffi::Error Soft(cudaStream_t stream, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::plain("s24_soft", GroupwiseOp::kSoft, trailing, x, *out));
}

S24_TARGET("s24_soft", Soft, on_stream(takes<1>, gives<1>, "trailing"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
