// A parallel loop on XLA's intra-op thread pool.
//
// The caller takes part and waits only for blocks that somebody has claimed, so the loop ends even if the pool never
// runs one of its tasks; a late task finds nothing to do. Handlers of several programs may run at once.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace s24 {

// Subnormal operands and results count as zero, as on XLA:CPU's own threads: the caller may be such a thread, a pool
// thread may not, and results must not depend on who worked.
class FlushSubnormals {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Tens of microseconds: to sleep and be woken takes as long as most blocks.
constexpr int kSpins = 1000;

inline void pause_thread() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// f(begin, end) over [0, n) in blocks of `grain`.
template <class F>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t n, int64_t grain, F f) {
  if (n <= 0) return;
  struct State {
    State(F g, int64_t n, int64_t grain) : f(std::move(g)), n(n), grain(grain), blocks((n + grain - 1) / grain) {}
    void work() {
      FlushSubnormals flush;
      for (int64_t b; (b = next.fetch_add(1)) < blocks;) {
        const int64_t end = (b + 1) * grain;
        f(b * grain, end < n ? end : n);
        if (done.fetch_add(1) + 1 == blocks) {
          std::lock_guard<std::mutex> lock(mutex);
          finished.notify_all();
        }
      }
    }
    F f;
    const int64_t n, grain, blocks;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  const int64_t blocks = (n + grain - 1) / grain;
  const int64_t threads = blocks > 1 ? pool.num_threads() : 1;
  if (threads <= 1) {
    FlushSubnormals flush;
    f(int64_t{0}, n);
    return;
  }
  auto state = std::make_shared<State>(std::move(f), n, grain);
  for (int64_t i = 1; i < threads && i < blocks; ++i) pool.Schedule([state] { state->work(); });
  state->work();
  for (int i = 0; i < kSpins; ++i) {
    if (state->done.load() == blocks) return;
    pause_thread();
  }
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done.load() == state->blocks; });
}

}  // namespace s24
