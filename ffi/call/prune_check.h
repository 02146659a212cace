// The checked call that counts the groups of four with more than two non-zeros.
#pragma once
#include "shapes.h"

namespace s24 {

struct PruneCheckCall : Call {
  PruneCheckArgs first{};
  int64_t arrays = 0;
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
    c.arrays = product(batch, 0, rank);
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

}  // namespace s24
