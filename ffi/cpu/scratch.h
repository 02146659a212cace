// Scratch of the products.
#pragma once
#include <cstdlib>
#include <memory>

#include "kernels.h"

namespace s24 {

// kMatmulScratch bytes. They belong to the thread and are kept: mapping a megabyte anew for each task costs more than a
// task.
inline void* thread_scratch() {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<void, Free> scratch(std::aligned_alloc(64, kMatmulScratch));
  return scratch.get();
}

}  // namespace s24
