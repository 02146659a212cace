// Barriers in shared memory, and signals in the memory of the device, on Hopper.
#pragma once
#include "../mma_sp.cuh"

namespace s24 {
namespace cuda {

// A phase of a barrier ends when its number of arrivals is complete. It begins in phase 0.
using Barrier = uint64_t;

#if defined(__CUDACC__)
__device__ __forceinline__ void init_barrier(Barrier* b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

// Arrives once all copies that this thread has begun are in shared memory; the thread goes on.
__device__ __forceinline__ void arrive_with_copies(Barrier* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait_barrier(Barrier* b, int parity) {
  asm volatile(
      "{.reg .pred ended; again: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1; @!ended bra again;}" ::"r"(
          shared_address(b)),
      "r"(parity)
      : "memory");
}

// Another block that sees the signal sees what this warp has written. The signal is zero before.
__device__ __forceinline__ void send_signal(uint32_t* signal) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(signal) : "memory");
}

__device__ __forceinline__ void wait_signal(const uint32_t* signal) {
  uint32_t sent;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(sent) : "l"(signal) : "memory");
  while (sent == 0);
  __syncwarp();
}
#else  // the tests give them a meaning on a CPU
void send_signal(uint32_t* signal);
void wait_signal(const uint32_t* signal);
void init_barrier(Barrier* b, int arrivals);
void arrive(Barrier* b);
void arrive_with_copies(Barrier* b);
void wait_barrier(Barrier* b, int parity);
#endif

}  // namespace cuda
}  // namespace s24
