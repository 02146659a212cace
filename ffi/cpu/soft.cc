// The handler of soft thresholds.
#include "groupwise_run.h"

namespace s24 {
namespace {

ffi::Error Soft(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::plain("s24_soft", GroupwiseOp::kSoft, trailing, x, *out), kernels().soft);
}

S24_TARGET("s24_soft", Soft, on_pool(takes<1>, gives<1>, "trailing"));

}  // namespace
}  // namespace s24
