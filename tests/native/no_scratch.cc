// Loaded before a process: no memory for what has the size and the alignment of the products' scratch.
#include <dlfcn.h>

#include <cstddef>

extern "C" __attribute__((visibility("default"))) void* aligned_alloc(size_t alignment, size_t bytes) {
  static const auto real = reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(RTLD_NEXT, "aligned_alloc"));
  return alignment == 64 && bytes == size_t{2} << 20 ? nullptr : real(alignment, bytes);
}
