// The FFI targets of ffi/cuda as a library without Python, their kernels run thread by thread on a CPU.
#include "../../ffi/call/target.h"
#include "../../ffi/cuda/cusparselt.h"

// f(name, handler) for each of them.
extern "C" __attribute__((visibility("default"))) void each_target(void (*f)(const char*, void*)) {
  for (const s24::Target& target : s24::targets()) f(target.name, reinterpret_cast<void*>(target.execute));
}

// The compute capability of the device that is emulated, 10 major + minor, and the architecture of the PTX of its kernels.
extern "C" __attribute__((visibility("default"))) void emulate(int capability, int ptx) {
  emulated::capability = capability;
  emulated::ptx = ptx;
}

// f(types of the parameters) for each kernel that was launched since the last call of this.
extern "C" __attribute__((visibility("default"))) void each_launched(void (*f)(const char*)) {
  for (const std::string& types : emulated::launched) f(types.c_str());
  emulated::launched.clear();
}

extern "C" __attribute__((visibility("default"))) bool open_cusparselt(const char* path) {
  return s24::cuda::load_cusparselt(path).empty();
}
