// The handler of unbiased estimates.
#include "../call/groupwise.h"
#include "handlers.h"

namespace s24 {
namespace cuda {
namespace {

ffi::Error Mvue(cudaStream_t stream, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  const GroupwiseCall c = GroupwiseCall::mvue("s24_mvue", trailing, exact, key, x, *out);
  return launch_each(c, c.batch.count(), [&](int64_t b) { return launch_mvue(c.at(b), c.key(b), stream); });
}

S24_TARGET("s24_mvue", Mvue, on_stream(takes<2>, gives<1>, "trailing", "exact"), kInGraphs);

}  // namespace
}  // namespace cuda
}  // namespace s24
