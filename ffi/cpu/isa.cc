// Picks the instruction set at run time. Compiled for the baseline of the platform.
#include "kernels.h"

namespace s24 {

namespace generic { extern const Kernels kKernels; }
#if defined(S24_X86_VARIANTS)
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
#endif

static const Kernels& choose() {
#if defined(S24_X86_VARIANTS)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (v4) return avx512::kKernels;
  if (v3) return avx2::kKernels;
#endif
  return generic::kKernels;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace s24
