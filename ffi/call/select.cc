// Masks and pruned arrays.
#include "../core/select.h"

#include "groupwise.h"
#include "handler.h"

namespace s24 {
namespace {

using SelectCall = GroupwiseCall<SelectArgs>;

ffi::Error Mask(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, SelectCall::plain("s24_mask", GroupwiseOp::kMask, trailing, x, *out));
}

ffi::Error Prune(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, SelectCall::plain("s24_prune", GroupwiseOp::kPrune, trailing, x, *out));
}

S24_TARGET("s24_mask", Mask, "trailing");
S24_TARGET("s24_prune", Prune, "trailing");

}  // namespace
}  // namespace s24
