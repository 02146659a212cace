// Checked calls of operations on groups of four whose result has the shape of x: masks, pruned and estimated arrays.
#pragma once
#include "shapes.h"

namespace s24 {

template <class Args>
struct GroupwiseCall : Call {
  Args first{};
  Operand x, keys, scale;
  using Call::Call;

  static GroupwiseCall plain(const char* target, GroupwiseOp op, int64_t trailing, const ffi::AnyBuffer& x,
                             const ffi::AnyBuffer& out) {
    GroupwiseCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const GroupShape g = GroupShape::of(check, dims_of(x), trailing);
    check.shape("the result", out, dims_of(x));
    if (op == GroupwiseOp::kMask)
      check.type("the result", out, ffi::DataType::PRED, "bool");
    else
      check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
    if (!check.ok()) return c.error = check.error(), c;
    c.x = {x.untyped_data()};
    c.first = {{op, dtype, nullptr, out.untyped_data(), {product(g.lead, 0, g.lead.size()), g.len, g.inner_size()}}};
    return c;
  }

  // key (batch..., 2 or 5), x (batch..., shape): the group counter restarts for every batch element.
  static GroupwiseCall mvue(const char* target, int64_t trailing, int64_t exact, const ffi::AnyBuffer& key,
                            const ffi::AnyBuffer& x, const ffi::AnyBuffer& out) {
    GroupwiseCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    const bool best = check.flag("exact", exact);
    check.type("key", key, ffi::DataType::U32, "uint32");
    check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
    const KeyedBatch keyed = KeyedBatch::of(check, key, x, trailing);
    check.shape("the result", out, keyed.group.array(keyed.lead));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = keyed.batch;
    c.keys = {key.untyped_data(), 0};
    c.x = {x.untyped_data(), 1};
    c.first = {{best ? GroupwiseOp::kMvueExact : GroupwiseOp::kMvueSequential, dtype, nullptr, out.untyped_data(),
                {keyed.batch.rest(), keyed.group.len, keyed.group.inner_size()}, keyed.draws}};
    return c;
  }

  // scale (batch...), x (batch..., shape).
  static GroupwiseCall scaled(const char* target, GroupwiseOp op, int64_t trailing, const ffi::AnyBuffer& x,
                              const ffi::AnyBuffer& scale, const ffi::AnyBuffer& out) {
    GroupwiseCall c(target);
    Check check(target);
    const Dtype dtype = check.dtype("x", x);
    check.require(out.element_type() == x.element_type(), "the result must have the dtype of x");
    const EntryBatch all = EntryBatch::scaled(check, scale, x, trailing);
    check.shape("the result", out, all.group.array(all.lead));
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = all.batch;
    c.scale = {scale.untyped_data(), 0};
    c.x = {x.untyped_data(), 1};
    c.first = {{op, dtype, nullptr, out.untyped_data(), {all.batch.rest(), all.group.len, all.group.inner_size()}}};
    return c;
  }

  Args at(int64_t b) const {
    const int64_t size = size_of(first.dtype), bytes = first.groups.count() * 4 * size;
    Args a = first;
    a.x = x.at(batch, b, bytes);
    a.out = at_bytes(first.out, b * bytes);
    a.draws.words = keys.words(batch, b, first.draws);
    a.scale = scale.at(batch, b, size);
    return a;
  }
};

}  // namespace s24
