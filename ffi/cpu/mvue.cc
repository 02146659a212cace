// The handler of unbiased estimates.
#include "groupwise_run.h"

namespace s24 {
namespace {

ffi::Error Mvue(ffi::ThreadPool pool, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  return run(pool, GroupwiseCall::mvue("s24_mvue", trailing, exact, key, x, *out), kernels().mvue);
}

S24_TARGET("s24_mvue", Mvue, on_pool(takes<2>, gives<1>, "trailing", "exact"));

}  // namespace
}  // namespace s24
