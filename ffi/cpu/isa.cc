// Picks the instruction set at run time. Compiled for the baseline of the platform.
#include "isa.h"

#include <atomic>
#include <iterator>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace s24 {

#define S24_NAME(isa) #isa,
static const char* const kNames[] = {S24_ISAS(S24_NAME)};
#undef S24_NAME

// Whether the processor multiplies tiles of bfloat16 (and expands 16-bit elements, which fills them), and the system lets
// this process, once and for all, use them.
static bool tiles() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d = 0;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kExpand = 1u << 6;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBf16) || !(d & kTiles) || !(c & kExpand)) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, for all threads
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

static bool supported(const std::string& isa) {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (isa == "avx2") return v3;
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == "avx512") return v4;
  if (isa == "amx") return v4 && tiles();
#endif
  return isa == "generic";
}

static std::vector<int> find_supported() {
  std::vector<int> found;
  for (size_t i = std::size(kNames); i-- > 0;)  // ffi/build_modules.py lists the best last
    if (supported(kNames[i])) found.push_back(int(i));
  return found;
}

const char* isa_name(int isa) { return kNames[isa]; }

const std::vector<int>& supported_isas() {
  static const std::vector<int> found = find_supported();
  return found;
}

static std::atomic<int> asked{-1};

int isa() {
  const int isa = asked.load(std::memory_order_relaxed);
  return isa >= 0 ? isa : supported_isas().front();
}

void use_isa(int isa) { asked.store(isa, std::memory_order_relaxed); }

}  // namespace s24
