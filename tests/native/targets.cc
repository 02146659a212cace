// The FFI targets of ffi/cuda as a library without Python, their kernels run thread by thread on a CPU.
#include "../../ffi/cuda/cusparselt.h"
#include "../../ffi/cuda/handlers.h"

using namespace s24::cuda;

// f(name, handler) for each of them.
extern "C" __attribute__((visibility("default"))) void each_target(void (*f)(const char*, void*)) {
  for (const Target* t : {kProducerTargets, kPackTargets, kKeptTargets, kPackBothTargets, kGatedTargets, kMatmulTargets,
                          kVnmTargets, kCusparseltTargets})
    for (; t->name != nullptr; ++t) f(t->name, reinterpret_cast<void*>(t->execute));
}

extern "C" __attribute__((visibility("default"))) bool open_cusparselt(const char* path) {
  return s24::cuda::load_cusparselt(path).empty();
}
