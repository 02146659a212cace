// Handlers of V:N:M masks, packing, unpacking and gathering.
#include <algorithm>

#include "../call/packed_vnm.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"

namespace s24 {
namespace {

constexpr int64_t kMostUnits = 32;  // of a task: several strips, of which each is fetched while its predecessor is packed

ffi::Error run(ffi::ThreadPool& pool, const PackVnmCall& c) {
  if (c.error.failure()) return c.error;
  const int64_t units = vnm_units(c.shared);
  if (units == 0) return ffi::Error::Success();
  const int64_t all = c.batch.count() * units;
  const int64_t grain = std::clamp<int64_t>(all / (8 * pool.num_threads()), 1, kMostUnits);
  parallel_for(pool, all, grain, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units,
                   [&](int64_t b, int64_t unit0, int64_t unit1) { kernels().packed_vnm(c.at(b), unit0, unit1); });
  });
  return ffi::Error::Success();
}

ffi::Error VnmMask(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> mask) {
  return run(pool, PackVnmCall::select("s24_vnm_mask", trailing, v, m, exact, x, *mask));
}

ffi::Error VnmPack(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, int64_t exact, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                   ffi::Result<ffi::AnyBuffer> columns) {
  return run(pool, PackVnmCall::pack("s24_vnm_pack", trailing, v, m, exact, x, {*values, *metadata, *columns}));
}

ffi::Error VnmPackMasked(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                         ffi::AnyBuffer mask, ffi::Result<ffi::AnyBuffer> values, ffi::Result<ffi::AnyBuffer> metadata,
                         ffi::Result<ffi::AnyBuffer> columns) {
  return run(pool, PackVnmCall::pack_masked("s24_vnm_pack_masked", trailing, v, m, x, mask, {*values, *metadata, *columns}));
}

ffi::Error VnmGather(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer x,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> values) {
  return run(pool, PackVnmCall::gather("s24_vnm_gather", trailing, v, m, x, {*values, metadata, columns}));
}

ffi::Error VnmUnpack(ffi::ThreadPool pool, int64_t trailing, int64_t v, int64_t m, ffi::AnyBuffer values,
                     ffi::AnyBuffer metadata, ffi::AnyBuffer columns, ffi::Result<ffi::AnyBuffer> dense) {
  return run(pool, PackVnmCall::unpack("s24_vnm_unpack", trailing, v, m, {values, metadata, columns}, *dense));
}

S24_TARGET("s24_vnm_mask", VnmMask, on_pool(takes<1>, gives<1>, "trailing", "v", "m", "exact"));
S24_TARGET("s24_vnm_pack", VnmPack, on_pool(takes<1>, gives<3>, "trailing", "v", "m", "exact"));
S24_TARGET("s24_vnm_pack_masked", VnmPackMasked, on_pool(takes<2>, gives<3>, "trailing", "v", "m"));
S24_TARGET("s24_vnm_gather", VnmGather, on_pool(takes<3>, gives<1>, "trailing", "v", "m"));
S24_TARGET("s24_vnm_unpack", VnmUnpack, on_pool(takes<3>, gives<1>, "trailing", "v", "m"));

}  // namespace
}  // namespace s24
