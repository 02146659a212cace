// How many groups of four have more than two non-zeros.
#include "../core/prune_check.h"

#include "handler.h"

namespace s24 {
namespace {

struct PruneCheckCall : Call {
  PruneCheckArgs first{};
  using Call::Call;

  // x (batch..., shape), found (batch...): how many batch dimensions there are, the result says.
  static PruneCheckCall of(const char* target, int64_t trailing, const ffi::AnyBuffer& x, const ffi::AnyBuffer& found) {
    PruneCheckCall c(target);
    Check check(target);
    const bool is_bool = x.element_type() == ffi::DataType::PRED;
    const int64_t width = is_bool ? 1 : size_of(check.dtype("x, unless it is bool,", x));
    check.type("the result", found, ffi::DataType::S32, "int32");
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
    const Dims batch = dims_of(found);
    const size_t rank = batch.size() < g.lead.size() ? batch.size() : g.lead.size();
    check.shape("the result", batch, Dims(g.lead.begin(), g.lead.begin() + int64_t(rank)));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(batch, {}, rank);
    c.first = {width, x.untyped_data(), static_cast<int32_t*>(found.untyped_data()),
               {product(g.lead, rank, g.lead.size()), g.len, g.inner_size()}};
    return c;
  }

  PruneCheckArgs at(int64_t b) const {
    PruneCheckArgs a = first;
    a.x = at_bytes(first.x, b * first.groups.count() * 4 * first.width);
    a.found += b;
    return a;
  }
};

ffi::Error PruneCheck(Device device, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> found) {
  const PruneCheckCall c = PruneCheckCall::of("s24_prune_check", trailing, x, *found);
  if (c.error.failure()) return c.error;
  const ffi::Error error = clear(c.target, device, c.first.found, int64_t(found->size_bytes()));
  return error.failure() ? error : compute(device, c);
}

S24_TARGET("s24_prune_check", PruneCheck, "trailing");

}  // namespace
}  // namespace s24
