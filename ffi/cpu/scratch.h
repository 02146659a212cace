// Scratch of the products, and the loop over tasks that need it.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>

#include "kernels.h"
#include "parallel.h"

namespace s24 {

// kMatmulScratch bytes, or null if there is no memory. They belong to the thread and are kept: mapping a megabyte anew for
// each task costs more than a task.
inline void* thread_scratch() {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> scratch;
  if (scratch == nullptr) scratch.reset(std::aligned_alloc(64, kMatmulScratch));
  return scratch.get();
}

// f(begin, end, scratch) over [0, n). Without memory for the scratch of a thread, an error; the result is then not whole.
template <class F>
xla::ffi::Error parallel_for_with_scratch(const char* target, xla::ffi::ThreadPool& pool, int64_t n, F f) {
  std::atomic<bool> failed{false};
  parallel_for(pool, n, 1, [&failed, &f](int64_t begin, int64_t end) {
    void* const scratch = thread_scratch();
    if (scratch == nullptr) {
      failed = true;
    } else {
      f(begin, end, scratch);
    }
  });
  if (!failed) return xla::ffi::Error::Success();
  return xla::ffi::Error(xla::ffi::ErrorCode::kResourceExhausted,
                         std::string(target) + ": no memory for " + std::to_string(kMatmulScratch) +
                             " bytes of scratch per thread; use smaller arrays or fewer threads");
}

}  // namespace s24
