// The handler of products at given entries.
#include <algorithm>

#include "../call/packed_vnm.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"
#include "scratch.h"

namespace s24 {
namespace {

// A (lead..., R, K) B (lead..., N, K)^T at entries.
struct SampledCall : Call {
  SampledArgs args{};  // of the first element
  VnmShape shape;
  using Call::Call;

  static SampledCall of(const char* target, int64_t v, int64_t m, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
                        const VnmParts& parts) {
    SampledCall c(target);
    Check check(target);
    SampledArgs& p = c.args;
    p.dtype = check.dtype("a", a);
    const Dims x = dims_of(a), y = dims_of(b);
    check.require(x.size() >= 2 && y.size() >= 2 && x.back() == y.back(), "a and b must be (..., R, K) and (..., N, K)");
    check.require(a.element_type() == b.element_type(), "a and b must have the same dtype");
    if (!check.ok()) return c.error = check.error(), c;
    p.rows = x[x.size() - 2];
    p.depth = x.back();
    p.cols = y[y.size() - 2];
    const VnmShape s = VnmShape::of(check, {p.rows, p.cols}, 0, v, m);
    const Dims a_lead = leading(x, 2), b_lead = leading(y, 2), m_lead = parts.metadata_lead(), c_lead = parts.columns_lead();
    const Dims lead = check.broadcast("operands and places", check.broadcast("a and b", a_lead, b_lead),
                                      check.broadcast("metadata and columns", m_lead, c_lead));
    if (check.ok()) parts.check(check, s, lead, m_lead, c_lead, a.element_type());
    if (!check.ok()) return c.error = check.error(), c;
    c.batch = Batch(lead, {a_lead, b_lead, m_lead, c_lead}, lead.size());
    c.shape = s;
    p.v = v;
    p.m = m;
    p.a = a.untyped_data();
    p.b = b.untyped_data();
    p.values = parts.values.untyped_data();
    p.metadata = static_cast<const uint8_t*>(parts.metadata.untyped_data());
    p.columns = static_cast<const uint8_t*>(parts.columns.untyped_data());
    return c;
  }

  SampledArgs at(int64_t n) const {
    SampledArgs p = args;
    const int64_t size = size_of(p.dtype);
    p.a = at_bytes(p.a, batch.index(0, n) * p.rows * p.depth * size);
    p.b = at_bytes(p.b, batch.index(1, n) * p.cols * p.depth * size);
    p.metadata += batch.index(2, n) * shape.metadata_size();
    p.columns += batch.index(3, n) * shape.columns_size();
    p.values = at_bytes(p.values, n * shape.values_size() * size);
    return p;
  }
};

ffi::Error VnmSampled(ffi::ThreadPool pool, int64_t v, int64_t m, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer metadata,
                      ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  const SampledCall c = SampledCall::of("s24_vnm_sampled", v, m, a, b, {*values, metadata, columns});
  if (c.error.failure()) return c.error;
  const SampledArgs& p = c.args;
  const int64_t height = std::min(v, kSampledRows), per_block = ceil_div(v, height), strips = p.rows / v * per_block;
  const int64_t groups = p.cols / m, tasks = strips * ceil_div(groups, kSampledGroups);
  if (tasks == 0) return ffi::Error::Success();
  return parallel_for_with_scratch(c.target, pool, c.batch.count() * tasks, [&](int64_t begin, int64_t end, void* scratch) {
    for_each_batch(begin, end, tasks, [&](int64_t n, int64_t task0, int64_t task1) {
      const SampledArgs one = c.at(n);
      for (int64_t t = task0; t < task1; ++t) {
        // Strips that follow each other need other rows of B, but of the same part of it.
        const int64_t strip = t % strips, block = strip / per_block * v, row0 = block + strip % per_block * height;
        const int64_t group0 = t / strips * kSampledGroups;
        kernels().sampled(one, row0, std::min(block + v, row0 + height), group0, std::min(groups, group0 + kSampledGroups),
                          scratch);
      }
    });
  });
}

S24_TARGET("s24_vnm_sampled", VnmSampled, on_pool(takes<4>, gives<1>, "v", "m"));

}  // namespace
}  // namespace s24
