// The CPU as handlers see it: XLA's thread pool, and the kernels of the instruction set in use.
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "../call/shapes.h"
#include "isa.h"
#include "parallel.h"
#include "work.h"

namespace s24 {

using Context = ffi::ThreadPool;  // what XLA is asked for, and what it gives
using Device = ffi::ThreadPool;

constexpr std::initializer_list<ffi::Traits> kTraits = {};
constexpr size_t kAlignment = 1;  // arrays begin anywhere
constexpr SavedSizes kSavedSizes = {4, 4, true, INT64_MAX};
constexpr int64_t metadata_rows() { return 0; }  // cuSPARSELt is of CUDA alone

inline ffi::Error clear(const char*, Device&, void* p, int64_t bytes) {
  std::memset(p, 0, size_t(bytes));
  return ffi::Error::Success();
}

// kScratch bytes, or null if there is no memory. They belong to the thread and are kept: mapping a megabyte anew for each task
// costs more than a task.
inline void* thread_scratch() {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> scratch;
  if (scratch == nullptr) scratch.reset(std::aligned_alloc(64, kScratch));
  return scratch.get();
}

// f(arguments of an array, first unit, end unit) for the units of all arrays of a call.
template <class Call, class F>
void for_units(Device& pool, const Call& call, int64_t units, int64_t grain, F f) {
  parallel_for(pool, call.batch.count() * units, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t array = begin / units, first = begin - array * units;
      const int64_t last = end - array * units < units ? end - array * units : units;
      f(call.at(array), first, last);
      begin = array * units + last;
    }
  });
}

template <class Call>
ffi::Error compute_units(Device& pool, const Call& call, const Work& work) {
  using Args = decltype(call.at(0));
  const auto run = kOfUnits<Args>[isa()];
  for_units(pool, call, work.units, work.grain, run);
  return ffi::Error::Success();
}

// Without memory for the scratch of a thread, an error; the result is then not whole.
template <class Call>
ffi::Error compute_units(Device& pool, const Call& call, const Grid& grid) {
  using Args = decltype(call.at(0));
  const auto run = kOfBlocks<Args>[isa()];
  std::atomic<bool> failed{false};
  for_units(pool, call, grid.units(), 1, [&](const Args& args, int64_t first, int64_t last) {
    void* const scratch = thread_scratch();
    if (scratch == nullptr) failed = true;
    for (int64_t unit = first; unit < last && scratch != nullptr; ++unit) run(args, grid.block(unit), scratch);
  });
  if (!failed) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(call.target) + ": no memory for " + std::to_string(kScratch) +
                                                            " bytes of scratch per thread; use smaller arrays or fewer threads");
}

// Runs the kernel on each array of a call.
template <class Call>
ffi::Error compute(Device& pool, const Call& call) {
  if (call.error.failure() || call.batch.count() == 0) return call.error;
  return compute_units(pool, call, work_of(call.at(0), call.batch.count(), pool.num_threads()));
}

}  // namespace s24
