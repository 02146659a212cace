// The loop over groups that the handlers of masks, pruned arrays, soft thresholds and estimates share.
#pragma once
#include "../call/groupwise.h"
#include "handlers.h"
#include "isa.h"
#include "parallel.h"

namespace s24 {

// Threads claim blocks of so many groups, which cost much more than to claim them.
constexpr int64_t kGroupsOfBlock = 4096;

using GroupwiseKernel = void (*)(const GroupwiseArgs&, int64_t begin, int64_t end);

inline ffi::Error run(ffi::ThreadPool& pool, const GroupwiseCall& c, GroupwiseKernel kernel) {
  if (c.error.failure()) return c.error;
  const int64_t units = c.first.groups.count();
  parallel_for(pool, c.batch.count() * units, kGroupsOfBlock, [&](int64_t begin, int64_t end) {
    for_each_batch(begin, end, units, [&](int64_t b, int64_t unit0, int64_t unit1) {
      GroupwiseArgs args = c.at(b);
      if (const uint32_t* key = c.key(b)) args.key = {key[0], key[1]};
      kernel(args, unit0, unit1);
    });
  });
  return ffi::Error::Success();
}

}  // namespace s24
