// Soft thresholds.
#include "../core/soft.h"

#include "groupwise.h"
#include "packed24.h"

namespace s24 {
namespace {

ffi::Error Soft(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, GroupwiseCall<SoftArgs>::scaled("s24_soft", GroupwiseOp::kSoft, trailing, x, scale, *out));
}

ffi::Error SoftPack(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(device, PackCall::soft("s24_soft_pack", trailing, x, scale, *values, *metadata));
}

S24_TARGET("s24_soft", Soft, "trailing");
S24_TARGET("s24_soft_pack", SoftPack, "trailing");

}  // namespace
}  // namespace s24
