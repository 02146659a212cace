// CUDA on a CPU, as far as our kernels use it: they are compiled by the C++ compiler against this header instead of the
// toolkit's, and every thread of a block, or of a cluster of blocks, is a fiber. It shows what kernels compute from which indices, in any order of
// blocks, asynchronous copies as late as they may come, and threads that wait for ever; nothing about speed, other races or
// the memory model.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
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

#define CUDART_VERSION 13000

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchTimeout = 702
};
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline void __trap() { std::abort(); }

struct cudaFuncAttributes {
  int ptxVersion;
};

template <class F>
cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute, int bytes) {
  return bytes <= 227 * 1024 ? cudaSuccess : cudaErrorInvalidValue;
}

inline const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorInvalidConfiguration ? "invalid configuration"
         : e == cudaErrorLaunchTimeout      ? "the threads of a block wait for each other"
                                            : "invalid value";
}

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

namespace emulated {
inline int capability = 90;  // 10 major + minor
inline int ptx = 90;         // the architecture of the PTX that kernels come from
inline thread_local bool has_context = false;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
}  // namespace emulated

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute == cudaDevAttrMultiProcessorCount) return *value = 2, cudaSuccess;
  const bool major = attribute == cudaDevAttrComputeCapabilityMajor;
  return *value = major ? emulated::capability / 10 : emulated::capability % 10, cudaSuccess;
}

template <class F>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, F) {
  return attributes->ptxVersion = emulated::ptx, cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, int flags,
                                             cudaDriverEntryPointQueryResult* result);

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

// What a thread has begun and what is finished later: a copy, or an arrival behind copies; without `finish` the end of a group.
struct Begun {
  void (*finish)(const Begun&);
  void* to;
  const void* from;
};

struct Fiber {
  std::vector<Begun> begun;
  jmp_buf place;  // where it goes on
  std::vector<char> stack = std::vector<char>(96 << 10);
  bool started = false, done = false;
};

inline dim3 thread, block, grid;
inline int first;  // of this block, among the threads of its cluster
inline jmp_buf scheduler;
inline std::vector<Fiber> fibers;  // of the largest cluster so far
inline int threads;                // of a block
inline int all_threads;            // of its cluster
inline void (*body)(void*);
inline void* body_arguments;
inline long steps;   // that brought a block nearer to its end: a thread came to a meeting or a barrier, or to its own end
inline long phases;  // of barriers that have ended
inline long stops;   // all threads waited, some of them in let_others_go
inline int letting_others_go;
inline std::set<std::string> launched;  // the types of the parameters of kernels

// The number of this thread in its cluster.
inline int own_number() { return first + int(thread.x); }
inline Fiber& own_fiber() { return fibers[size_t(own_number())]; }

inline void yield() {
  if (_setjmp(own_fiber().place) == 0) _longjmp(scheduler, 1);
}

// Waits until the other threads can do no more without this one.
inline void let_others_go() {
  ++letting_others_go;
  for (const long now = stops; stops == now;) yield();
  --letting_others_go;
}

// The thread of one block after another.
inline void enter() {
  for (;;) {
    body(body_arguments);
    own_fiber().done = true;
    yield();
  }
}

// Lets the current thread go on until it yields. Jumps are between stacks that are all whole, and save no signals: unlike
// swapcontext they call no kernel of the operating system.
inline void resume() {
  Fiber& own = own_fiber();
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

// Where `count` threads meet; the last one to come calls act(what they brought).
struct Meeting {
  int arrived = 0;
  long round = 0;
  void* brought[1024];

  template <class F>
  void meet(int index, int count, void* own, F act) {
    brought[index] = own;
    ++steps;
    if (++arrived == count) {
      arrived = 0;
      ++round;
      act(brought);
      return;
    }
    for (const long now = round; round == now;) yield();
  }
};

inline Meeting cluster_meeting, block_meetings[2], group_meetings[8], warp_meetings[32];

// Blocks in turn finish what they begin as late as it may be, which shows whether a thread waits for it, and at once, which shows
// whether another still reads what is written over.
inline void begin(void (*finish)(const Begun&), void* to, const void* from) {
  const Begun own = {finish, to, from};
  if ((block.x + block.y + block.z) % 2 == 0)
    own_fiber().begun.push_back(own);
  else if (finish != nullptr)
    finish(own);
}

// Finishes the first n things that a thread has begun, or fewer: all up to the one that ends a phase of a barrier.
inline void finish(Fiber& fiber, size_t n) {
  const long before = phases;
  size_t i = 0;
  for (; i < n && phases == before; ++i)
    if (fiber.begun[i].finish != nullptr) fiber.begun[i].finish(fiber.begun[i]);
  fiber.begun.erase(fiber.begun.begin(), fiber.begun.begin() + long(i));
}

// Runs f(arguments) in every thread of a block, or of the blocks of a cluster, each as far as it goes before it waits, in turn: from the first to the last and
// back. What they have begun and do not wait for is finished when all of them wait, and no more of it than lets one go on.
// Whether they came to their ends.
template <class F>
bool run_block(int threads_of_block, F& f, int blocks = 1) {
  const int count = blocks * threads_of_block;
  const unsigned first_block = block.x;
  threads = threads_of_block, all_threads = count;
  if (fibers.size() < size_t(count)) fibers.resize(size_t(count));
  body = [](void* p) { (*static_cast<F*>(p))(); };
  body_arguments = &f;
  for (int t = 0; t < count; ++t) fibers[size_t(t)].done = false;
  bool back = false;
  for (int left = count; left > 0; back = !back) {
    const long before = steps, ended = phases;
    for (int i = 0; i < count; ++i) {
      const int t = back ? count - 1 - i : i;
      if (fibers[size_t(t)].done) continue;
      thread = dim3(unsigned(t % threads));
      first = t - int(thread.x);
      block.x = first_block + unsigned(t / threads);
      resume();
      if (fibers[size_t(t)].done) --left, ++steps;
    }
    if (steps > before) continue;
    if (letting_others_go > 0) {
      ++stops;
      continue;
    }
    for (int t = 0; t < count && phases == ended; ++t) finish(fibers[size_t(t)], fibers[size_t(t)].begun.size());
    if (phases > ended) continue;
    fibers.clear();
    letting_others_go = 0;
    cluster_meeting = {};
    for (Meeting& meeting : block_meetings) meeting = {};
    for (Meeting& meeting : group_meetings) meeting = {};
    for (Meeting& meeting : warp_meetings) meeting = {};
    return false;
  }
  for (int t = 0; t < count; ++t) fibers[size_t(t)].begun.clear();
  return true;
}

template <class P, class F>
void in_warp(P& own, F act) {
  warp_meetings[own_number() / 32].meet(int(thread.x % 32), 32, &own, [&](void** all) { act(reinterpret_cast<P**>(all)); });
}

// Four warps of a block, whose other ones may be fewer.
template <class P, class F>
void in_group(P& own, F act) {
  group_meetings[first / threads * 4 + int(thread.x) / 128].meet(int(thread.x % 128), 128, &own, [&](void** all) { act(reinterpret_cast<P**>(all)); });
}

template <class F>
void in_block(void* own, F act) {
  block_meetings[first / threads].meet(int(thread.x), threads, own, act);
}

inline std::vector<unsigned char> dynamic;

}  // namespace emulated

#define threadIdx emulated::thread
#define blockIdx emulated::block
#define gridDim emulated::grid

inline void __syncthreads() {
  emulated::in_block(nullptr, [](void**) {});
}

inline int __syncthreads_or(int vote) {
  struct Thread {
    int vote, any;
  } own = {vote, 0};
  emulated::in_block(&own, [](void** all) {
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

inline void __syncwarp() { __ballot_sync(0xffffffffu, false); }

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
