// The handler of unbiased estimates.
#include "../call/groupwise.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error run(cudaStream_t stream, const GroupwiseCall& c) {
  if (c.error.failure()) return c.error;
  for (int64_t b = 0; b < c.batch.count(); ++b) {
    const cudaError_t e = launch_mvue(c.at(b), c.key(b), stream);
    if (e != cudaSuccess) return status(c.target, e);
  }
  return ffi::Error::Success();
}

ffi::Error Mvue(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  return run(stream, GroupwiseCall::mvue("s24_mvue", trailing, exact, key, x, *out));
}

S24_TARGET("s24_mvue", Mvue, on_stream(takes<2>, gives<1>, "trailing", "exact"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
