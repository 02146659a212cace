// Soft thresholds.
#include "../core/soft.h"

#include "groupwise.h"
#include "handler.h"

namespace s24 {
namespace {

ffi::Error Soft(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, GroupwiseCall<SoftArgs>::plain("s24_soft", GroupwiseOp::kSoft, trailing, x, *out));
}

S24_TARGET("s24_soft", Soft, "trailing");

}  // namespace
}  // namespace s24
