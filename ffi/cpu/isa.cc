// Picks the instruction set at run time. Compiled for the baseline of the platform.
#include <atomic>

#include "isa.h"

namespace s24 {

namespace generic { extern const Kernels kKernels; }
#if defined(S24_X86_VARIANTS)
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
#endif

// Best first.
static std::vector<const Kernels*> find_supported() {
  std::vector<const Kernels*> found;
#if defined(S24_X86_VARIANTS)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (v4) found.push_back(&avx512::kKernels);
  if (v3) found.push_back(&avx2::kKernels);
#endif
  found.push_back(&generic::kKernels);
  return found;
}

const std::vector<const Kernels*>& supported_kernels() {
  static const std::vector<const Kernels*> found = find_supported();
  return found;
}

static std::atomic<const Kernels*> current{nullptr};

const Kernels& kernels() {
  const Kernels* k = current.load(std::memory_order_relaxed);
  return k != nullptr ? *k : *supported_kernels().front();
}

void use_kernels(const Kernels& k) { current.store(&k, std::memory_order_relaxed); }

}  // namespace s24
