// Launches, and the instructions of the sparse product, for kernels on a CPU: what the PTX manual says that they do.
#pragma once
#include <cstring>

#include "../../../ffi/core/floats.h"
#include "../../../ffi/cuda/sm90/barriers.cuh"
#include "../../../ffi/cuda/sm90/wgmma_sp.cuh"

namespace s24 {
namespace cuda {

// One warp's operands of a sparse product: its part of A in registers, 16 x 32 elements of which two of four are kept.
struct SparseLane {
  float* acc;
  const uint32_t *sparse, *dense;
  uint32_t words;
};

// Products that a thread has begun, or the end of a group of them. What they read and write, registers too, they read and write
// as late as they may: when the thread waits for them.
struct BegunProduct {
  void (*finish)(SparseLane, uint64_t dense, int more);
  SparseLane own;
  uint64_t dense;
  int more;
};
inline std::vector<BegunProduct> begun_products[1024];

template <class... P, class... A>
cudaError_t start(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t, A... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
  emulated::launched.insert(__PRETTY_FUNCTION__);
  emulated::dynamic.assign(shared + 1024, 0xcd);  // what nobody wrote is not zero
  auto body = [&] { kernel(args...); };
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        if (!emulated::run_block(threads, body)) return cudaErrorLaunchTimeout;
        for (int t = 0; t < threads; ++t)
          if (!begun_products[t].empty()) std::abort();  // nobody waited for them
      }
  return cudaSuccess;
}

inline unsigned char* launched_memory() {
  const auto at = reinterpret_cast<uintptr_t>(emulated::dynamic.data());
  return reinterpret_cast<unsigned char*>((at + 1023) / 1024 * 1024);
}

template <int n>
void copy_async(void* to, const void* from, bool valid) {
  if (reinterpret_cast<uintptr_t>(to) % n != 0 || (valid && reinterpret_cast<uintptr_t>(from) % n != 0))
    std::abort();  // a misaligned access, which the device would refuse
  if (valid)
    emulated::begin([](const emulated::Begun& copy) { std::memcpy(copy.to, copy.from, n); }, to, from);
  else
    emulated::begin([](const emulated::Begun& zeros) { std::memset(zeros.to, 0, n); }, to, nullptr);
}
inline void commit_copies() { emulated::begin(nullptr, nullptr, nullptr); }
template <int n>
void wait_copies() {
  emulated::Fiber& own = emulated::fibers[threadIdx.x];
  size_t end = own.begun.size();
  for (int groups = 0; end > 0; --end)
    if (own.begun[end - 1].finish == nullptr && groups++ == n) break;
  for (const size_t left = own.begun.size() - end; own.begun.size() > left;)
    emulated::finish(own, own.begun.size() - left);
}

template <bool kTranspose>
void load_matrices(const uint16_t* row, uint32_t m[4]) {
  struct Lane {
    const uint16_t* row;
    uint32_t* m;
  } own = {row, m};
  emulated::in_warp(own, [](Lane** all) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int first = lane % 4 * 2, other = lane / 4;
        const auto at = [&](int j) -> uint32_t {
          return kTranspose ? all[8 * i + first + j]->row[other] : all[8 * i + other]->row[first + j];
        };
        all[lane]->m[i] = at(0) | at(1) << 16;
      }
  });
}

template <class T>
float number(const uint32_t* words, int i) {
  return float_of(T::to_f32(uint16_t(words[i / 2] >> (i % 2 * 16))));
}

template <class T, int kSelector>
void unpack_sparse(SparseLane** all, float left[16][32]) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = g + i / 2 % 2 * 8, kept = 2 * t + i % 2 + i / 4 * 8;  // of 16 kept columns
      const int source = 4 * g + 2 * kSelector + kept / 8;
      const uint32_t word = all[source]->words >> (row >= 8 ? 16 : 0);
      const int group = kept % 8 / 2, index = word >> (4 * group + 2 * (kept % 2)) & 3;
      left[row][16 * (kept / 8) + 4 * group + index] = number<T>(all[lane]->sparse, i);
    }
  }
}

template <class T, int kSelector>
void mma_sp(float acc[4], const uint32_t sparse[4], const uint32_t dense[4], uint32_t words) {
  SparseLane own = {acc, sparse, dense, words};
  emulated::in_warp(own, [](SparseLane** all) {
    float left[16][32] = {}, right[32][8];
    unpack_sparse<T, kSelector>(all, left);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) right[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = number<T>(all[lane]->dense, i);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k)
          all[lane]->acc[i] += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
  });
}

// The tile's address stands for its descriptor.
inline uint64_t swizzled_tile(const uint16_t* tile) {
  if (reinterpret_cast<uintptr_t>(tile) % 1024 != 0) std::abort();
  return reinterpret_cast<uintptr_t>(tile);
}

// The rows of a warpgroup that one of its warps has.
template <class T, int kSelector>
void multiply_tile(SparseLane own, uint64_t dense, int more) {
  if (!more) std::memset(own.acc, 0, kWgmmaCols / 8 * 4 * sizeof(float));
  emulated::in_warp(own, [dense](SparseLane** all) {
    const auto* const tile = reinterpret_cast<const uint16_t*>(dense);
    float left[16][32] = {};
    unpack_sparse<T, kSelector>(all, left);
    for (int k = 0; k < kGatheredRows; ++k)
      for (int column = 0; column < kWgmmaCols; ++column) {
        const float right = float_of(T::to_f32(tile[swizzled(k, column / 8) + column % 8]));
        for (int row = 0; row < 16; ++row)
          all[row % 8 * 4 + column % 8 / 2]->acc[column / 8 * 4 + row / 8 * 2 + column % 2] += left[row][k] * right;
      }
  });
}

template <class T, int kSelector>
void wgmma_sp(float acc[32][4], const uint32_t sparse[4], uint64_t dense, uint32_t words, int more) {
  begun_products[threadIdx.x].push_back({multiply_tile<T, kSelector>, {acc[0], sparse, nullptr, words}, dense, more});
}

inline void commit_wgmma() { begun_products[threadIdx.x].push_back({}); }

template <int n>
void wait_wgmma() {
  std::vector<BegunProduct>& own = begun_products[threadIdx.x];
  size_t end = own.size();
  for (int groups = 0; end > 0; --end)
    if (own[end - 1].finish == nullptr && groups++ == n) break;
  const std::vector<BegunProduct> now(own.begin(), own.begin() + long(end));
  own.erase(own.begin(), own.begin() + long(end));
  if (!now.empty()) emulated::let_others_go();
  for (const BegunProduct& product : now)
    if (product.finish != nullptr) product.finish(product.own, product.dense, product.more);
}

// A barrier: arrivals of a phase, those that are missing, and the number of the phase.
struct EmulatedBarrier {
  uint16_t arrivals, missing;
  uint32_t phase;
};

inline void init_barrier(Barrier* b, int arrivals) {
  *reinterpret_cast<EmulatedBarrier*>(b) = {uint16_t(arrivals), uint16_t(arrivals), 0};
}

inline void arrive(Barrier* b) {
  auto& own = *reinterpret_cast<EmulatedBarrier*>(b);
  ++emulated::steps;
  if (--own.missing > 0) return;
  own.missing = own.arrivals;
  ++own.phase;
  ++emulated::phases;
}

inline void arrive_with_copies(Barrier* b) {
  emulated::begin([](const emulated::Begun& arrival) { arrive(static_cast<Barrier*>(arrival.to)); }, b, nullptr);
}

inline void wait_barrier(Barrier* b, int parity) {
  while (int(reinterpret_cast<const EmulatedBarrier*>(b)->phase % 2) == parity) emulated::yield();
}

}  // namespace cuda
}  // namespace s24
