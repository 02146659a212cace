// Unbiased estimates.
#include "../core/mvue.h"

#include "groupwise.h"
#include "handler.h"

namespace s24 {
namespace {

ffi::Error Mvue(Device device, int64_t trailing, int64_t exact, ffi::AnyBuffer key, ffi::AnyBuffer x,
                ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, GroupwiseCall<MvueArgs>::mvue("s24_mvue", trailing, exact, key, x, *out));
}

S24_TARGET("s24_mvue", Mvue, "trailing", "exact");

}  // namespace
}  // namespace s24
