// Soft thresholds.
#include "../core/soft.h"

#include "groupwise.h"
#include "packed24.h"

namespace s24 {
namespace {

// scale (batch...), x (batch..., shape).
struct SoftCall : GroupwiseCall<SoftArgs> {
  Operand scale;
  using GroupwiseCall::GroupwiseCall;

  static SoftCall of(const char* target, int64_t trailing, const ffi::AnyBuffer& x, const ffi::AnyBuffer& scale,
                     const ffi::AnyBuffer& out) {
    SoftCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    check.require(scale.element_type() == x.element_type(), "scale must have the dtype of x");
    check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
    const EntryBatch all = EntryBatch::of(check, "scale", dims_of(scale), x, trailing);
    check.shape("the result", out, all.group.array(all.lead));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = all.batch;
    c.scale = {scale.untyped_data(), 0};
    c.x = {x.untyped_data(), 1};
    c.first = {{GroupwiseOp::kSoft, dtype, nullptr, out.untyped_data(),
                {all.batch.rest(), all.group.len, all.group.inner_size()}}};
    return c;
  }

  SoftArgs at(int64_t b) const {
    SoftArgs a = GroupwiseCall::at(b);
    a.scale = scale.at(batch, b, size_of(a.dtype));
    return a;
  }
};

ffi::Error Soft(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out) {
  return compute(device, SoftCall::of("s24_soft", trailing, x, scale, *out));
}

ffi::Error SoftPack(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                    ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata) {
  return compute(device, PackCall::soft("s24_soft_pack", trailing, x, scale, *values, *metadata));
}

S24_TARGET("s24_soft", Soft, "trailing");
S24_TARGET("s24_soft_pack", SoftPack, "trailing");

}  // namespace
}  // namespace s24
