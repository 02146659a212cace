// Handlers of masks and pruned arrays.
#include "groupwise_run.h"

namespace s24 {
namespace {

ffi::Error Mask(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::plain("s24_mask", GroupwiseOp::kMask, trailing, x, *out), kernels().select);
}

ffi::Error Prune(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::plain("s24_prune", GroupwiseOp::kPrune, trailing, x, *out), kernels().select);
}

S24_TARGET("s24_mask", Mask, on_pool(takes<1>, gives<1>, "trailing"));
S24_TARGET("s24_prune", Prune, on_pool(takes<1>, gives<1>, "trailing"));

}  // namespace
}  // namespace s24
