// CUDA on a CPU, as far as our kernels use it: they are compiled by the C++ compiler against this header instead of the
// toolkit's, and every thread of a block is a fiber. It shows what kernels compute from which indices, in any order of
// blocks; nothing about speed, races or the memory model.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static  // one block runs at a time
#define __launch_bounds__(...)
#define __grid_constant__

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int bytes) {
  return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}

inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorInvalidConfiguration ? "invalid configuration" : "invalid value"; }

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

namespace emulated {
inline int capability = 90;  // 10 major + minor
inline thread_local bool has_context = false;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
}  // namespace emulated

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool major = attribute == cudaDevAttrComputeCapabilityMajor;
  return *value = major ? emulated::capability / 10 : emulated::capability % 10, cudaSuccess;
}

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, emulated::capture_mode), cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  emulated::has_context = true;
  return device == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t n, cudaStream_t) { return std::memset(to, byte, n), cudaSuccess; }

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, n), cudaSuccess;
}

namespace emulated {

struct Fiber {
  jmp_buf place;  // where it goes on
  std::vector<char> stack = std::vector<char>(96 << 10);
  bool started = false, done = false;
};

inline dim3 thread, block;
inline jmp_buf scheduler;
inline std::vector<Fiber> fibers;  // of the largest block so far
inline int threads;                // of this block
inline void (*body)(void*);
inline void* body_arguments;

inline void yield() {
  if (_setjmp(fibers[thread.x].place) == 0) _longjmp(scheduler, 1);
}

// The thread of one block after another.
inline void enter() {
  for (;;) {
    body(body_arguments);
    fibers[thread.x].done = true;
    yield();
  }
}

// Lets the current thread go on until it yields. Jumps are between stacks that are all whole, and save no signals: unlike
// swapcontext they call no kernel of the operating system.
inline void resume() {
  Fiber& own = fibers[thread.x];
  if (_setjmp(scheduler) != 0) return;
  if (own.started) _longjmp(own.place, 1);
  own.started = true;
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = own.stack.data();
  first.uc_stack.ss_size = own.stack.size();
  makecontext(&first, enter, 0);
  setcontext(&first);
}

// Runs f(arguments) in every thread of a block, each as far as it goes before it waits, in turn.
template <class F>
void run_block(int count, F& f) {
  threads = count;
  if (fibers.size() < size_t(count)) fibers.resize(size_t(count));
  body = [](void* p) { (*static_cast<F*>(p))(); };
  body_arguments = &f;
  for (int t = 0; t < count; ++t) fibers[size_t(t)].done = false;
  for (bool alive = true; alive;) {
    alive = false;
    for (int t = 0; t < count; ++t) {
      if (fibers[size_t(t)].done) continue;
      thread = dim3(unsigned(t));
      resume();
      alive |= !fibers[size_t(t)].done;
    }
  }
}

// Where `count` threads meet; the last one to come calls act(what they brought).
struct Meeting {
  int arrived = 0;
  long round = 0;
  void* brought[1024];

  template <class F>
  void meet(int index, int count, void* own, F act) {
    brought[index] = own;
    if (++arrived == count) {
      arrived = 0;
      ++round;
      act(brought);
      return;
    }
    for (const long now = round; round == now;) yield();
  }
};

inline Meeting block_meeting, warp_meetings[32];

template <class P, class F>
void in_warp(P& own, F act) {
  warp_meetings[thread.x / 32].meet(int(thread.x % 32), 32, &own, [&](void** all) { act(reinterpret_cast<P**>(all)); });
}

inline std::vector<unsigned char> dynamic;

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block

inline void __syncthreads() {
  emulated::block_meeting.meet(int(threadIdx.x), emulated::threads, nullptr, [](void**) {});
}

inline int __syncthreads_or(int vote) {
  struct Thread {
    int vote, any;
  } own = {vote, 0};
  emulated::block_meeting.meet(int(threadIdx.x), emulated::threads, &own, [](void** all) {
    int any = 0;
    for (int t = 0; t < emulated::threads; ++t) any |= static_cast<Thread*>(all[t])->vote;
    for (int t = 0; t < emulated::threads; ++t) static_cast<Thread*>(all[t])->any = any;
  });
  return own.any;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  struct Lane {
    T in, out;
  } own = {value, value};
  emulated::in_warp(own, [mask](Lane** all) {
    for (int l = 0; l < 32; ++l) all[l]->out = all[l ^ mask]->in;
  });
  return own.out;
}

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  struct Lane {
    T in, out;
    int from;
  } own = {value, value, from};
  emulated::in_warp(own, [](Lane** all) {
    for (int l = 0; l < 32; ++l) all[l]->out = all[all[l]->from]->in;
  });
  return own.out;
}

inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  struct Lane {
    uint32_t in, sum;
  } own = {value, 0};
  emulated::in_warp(own, [](Lane** all) {
    uint32_t sum = 0;
    for (int l = 0; l < 32; ++l) sum += all[l]->in;
    for (int l = 0; l < 32; ++l) all[l]->sum = sum;
  });
  return own.sum;
}

inline int atomicAdd(int* at, int value) { return *at += value, *at - value; }  // threads take turns

inline uint32_t __ballot_sync(unsigned, bool vote) {
  struct Lane {
    bool vote;
    uint32_t all;
  } own = {vote, 0};
  emulated::in_warp(own, [](Lane** all) {
    uint32_t bits = 0;
    for (int l = 0; l < 32; ++l) bits |= uint32_t(all[l]->vote) << l;
    for (int l = 0; l < 32; ++l) all[l]->all = bits;
  });
  return own.all;
}

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }

template <class T>
T __ldg(const T* p) {
  return *p;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}

template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
