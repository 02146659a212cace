// The handler that counts the groups of four with more than two non-zeros.
#include "../call/prune_check.h"

#include <algorithm>

#include "groupwise_run.h"

namespace s24 {
namespace {

ffi::Error PruneCheck(ffi::ThreadPool pool, int64_t trailing, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> found) {
  const PruneCheckCall c = PruneCheckCall::of("s24_prune_check", trailing, x, *found);
  if (c.error.failure()) return c.error;
  std::fill_n(c.first.found, c.arrays, 0);
  const int64_t units = c.first.groups.count();
  parallel_for(pool, c.arrays * units, kGroupsOfBlock, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units,
                   [&](int64_t b, int64_t unit0, int64_t unit1) { kernels().prune_check(c.at(b), unit0, unit1); });
  });
  return ffi::Error::Success();
}

S24_TARGET("s24_prune_check", PruneCheck, on_pool(takes<1>, gives<1>, "trailing"));

}  // namespace
}  // namespace s24
