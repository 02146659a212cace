// Launches, and the instructions of the sparse product, for kernels on a CPU: what the PTX manual says that they do.
#pragma once
#include <cstring>

#include "../../../ffi/core/floats.h"
#include "../../../ffi/cuda/sm90/boxes.cuh"
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
  void (*finish)(const BegunProduct&);
  SparseLane own;
  uint64_t sparse, dense;  // where they lie in shared memory
  int more;
};
inline std::vector<BegunProduct> begun_products[1024];

// Bytes of shared memory from one block of a cluster to the next.
inline size_t block_bytes;

// Runs the blocks, so many at a time along x: the last ones first where `last_first`, since a GPU promises no order.
template <class F>
cudaError_t run_grid(const char* types, dim3 grid, int blocks, int threads, size_t shared, bool last_first, F body) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) return cudaErrorInvalidConfiguration;
  emulated::launched.insert(types);
  gridDim = grid;
  block_bytes = (shared + 1023) / 1024 * 1024;
  emulated::dynamic.assign(size_t(blocks) * block_bytes + 1024, 0xcd);  // what nobody wrote is not zero
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += unsigned(blocks)) {
        blockIdx = dim3(last_first ? grid.x - unsigned(blocks) - x : x, y, z);
        if (!emulated::run_block(threads, body, blocks)) return cudaErrorLaunchTimeout;
        for (int t = 0; t < blocks * threads; ++t)
          if (!begun_products[t].empty()) std::abort();  // nobody waited for them
      }
  return cudaSuccess;
}

template <class... P, class... A>
cudaError_t start(void (*kernel)(P...), dim3 grid, int threads, size_t shared, cudaStream_t, A... args) {
  return run_grid(__PRETTY_FUNCTION__, grid, 1, threads, shared, false, [&] { kernel(args...); });
}

// One, so that it has many tiles; but several of the kernel whose blocks have nine warps, which divide tiles.
template <class... P>
cudaError_t clusters_at_a_time(void (*)(P...), int, int threads, size_t, int* clusters) {
  return *clusters = threads == 288 ? 5 : 1, cudaSuccess;
}

template <class... P, class... A>
cudaError_t start_clusters(void (*kernel)(P...), int clusters, int blocks, int threads, size_t shared, cudaStream_t,
                           const A&... args) {
  if (blocks > 2 || blocks * threads > 1024) return cudaErrorInvalidConfiguration;  // as many as there are meetings for
  return run_grid(__PRETTY_FUNCTION__, dim3(unsigned(clusters * blocks)), blocks, threads, shared, true, [&] { kernel(args...); });
}

inline int block_of_cluster() { return emulated::first / emulated::threads; }

inline void sync_cluster() {
  emulated::cluster_meeting.meet(emulated::own_number(), emulated::all_threads, nullptr, [](void**) {});
}

inline unsigned char* launched_memory() {
  const auto at = reinterpret_cast<uintptr_t>(emulated::dynamic.data());
  return reinterpret_cast<unsigned char*>((at + 1023) / 1024 * 1024) + size_t(block_of_cluster()) * block_bytes;
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
  emulated::Fiber& own = emulated::own_fiber();
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

// A row of A: the 16 kept elements, and the columns among 32 that they are of.
struct Kept {
  float values[16];
  int columns[16];
};

template <class T, int kSelector>
void unpack_sparse(SparseLane** all, Kept left[16]) {
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = g + i / 2 % 2 * 8, kept = 2 * t + i % 2 + i / 4 * 8;
      const int source = 4 * g + 2 * kSelector + kept / 8;
      const uint32_t word = all[source]->words >> (row >= 8 ? 16 : 0);
      const int group = kept % 8 / 2, index = word >> (4 * group + 2 * (kept % 2)) & 3;
      left[row].values[kept] = number<T>(all[lane]->sparse, i);
      left[row].columns[kept] = 16 * (kept / 8) + 4 * group + index;
    }
  }
}

template <class T, int kSelector>
void mma_sp(float acc[4], const uint32_t sparse[4], const uint32_t dense[4], uint32_t words) {
  SparseLane own = {acc, sparse, dense, words};
  emulated::in_warp(own, [](SparseLane** all) {
    Kept left[16];
    float right[32][8];
    unpack_sparse<T, kSelector>(all, left);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) right[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = number<T>(all[lane]->dense, i);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        for (int k = 0; k < 16; ++k)
          all[lane]->acc[i] += left[row].values[k] * right[left[row].columns[k]][lane % 4 * 2 + i % 2];
      }
  });
}

// The place of a byte in memory of rows of 64 or 128 bytes as the hardware swizzles it: by its address.
inline uintptr_t swizzled_byte(uintptr_t at, int row_bytes) {
  return row_bytes == 128 ? at ^ (at >> 7 & 7) << 4 : row_bytes == 64 ? at ^ (at >> 7 & 3) << 4 : at;
}

// An address in units of 16 bytes, the rows of the tile in units of 32, and the layout.
template <int kRows>
uint64_t swizzled_columns(const uint16_t* first) {
  const auto at = reinterpret_cast<uintptr_t>(first);
  if (at % 1024 != 0) std::abort();
  return at / 16 | uint64_t(kRows / 32) << 56 | uint64_t(1) << 62;
}

// Number k of column `column` of an operand, by what swizzled_columns gave.
template <class T>
float number_of_column(uint64_t columns, int column, int k) {
  const uintptr_t first = uintptr_t(columns << 8 >> 8) * 16, rows = uintptr_t(columns >> 56 & 0x3f) * 32;
  const uintptr_t at = first + (uintptr_t(column) / 64 * rows + uintptr_t(k)) * 128 + uintptr_t(column) % 64 * 2;
  return float_of(T::to_f32(*reinterpret_cast<const uint16_t*>(swizzled_byte(at, 128))));
}

// Adds what a kept row multiplies to the sums of four lanes, each of which has the first or the second of two such rows.
inline void add_row(SparseLane** lanes, int second, const Kept& left, const float (*right)[kWgmmaCols]) {
  const auto sum = [&](int column) -> float& { return lanes[column % 8 / 2]->acc[column / 8 * 4 + second * 2 + column % 2]; };
  float sums[kWgmmaCols];
  for (int column = 0; column < kWgmmaCols; ++column) sums[column] = sum(column);
  for (int k = 0; k < 16; ++k) {
    const float value = left.values[k], *const line = right[left.columns[k]];
    for (int column = 0; column < kWgmmaCols; ++column) sums[column] += value * line[column];
  }
  for (int column = 0; column < kWgmmaCols; ++column) sum(column) = sums[column];
}

// The rows of a warpgroup that one of its warps has.
template <class T, int kSelector>
void multiply_tile(const BegunProduct& product) {
  SparseLane own = product.own;
  if (!product.more) std::memset(own.acc, 0, kWgmmaCols / 8 * 4 * sizeof(float));
  emulated::in_warp(own, [&](SparseLane** all) {
    Kept left[16];
    static float right[kGatheredRows][kWgmmaCols];
    unpack_sparse<T, kSelector>(all, left);
    for (int k = 0; k < kGatheredRows; ++k)
      for (int column = 0; column < kWgmmaCols; ++column)
        right[k][column] = number_of_column<T>(product.dense, column, k);
    for (int row = 0; row < 16; ++row) add_row(all + row % 8 * 4, row / 8, left[row], right);
  });
}

template <class T, int kSelector>
void wgmma_sp(float acc[32][4], const uint32_t sparse[4], uint64_t dense, uint32_t words, int more) {
  begun_products[emulated::own_number()].push_back({multiply_tile<T, kSelector>, {acc[0], sparse, nullptr, words}, 0, dense, more});
}

// An address in units of 16 bytes, and the layout.
template <int kBytes>
uint64_t swizzled_rows(const uint16_t* first) {
  const auto at = reinterpret_cast<uintptr_t>(first);
  if (at % 1024 != 0) std::abort();
  return at / 16 | uint64_t(kBytes == 128 ? 1 : 2) << 62;
}

// Number k of row `row` of an operand, by what swizzled_rows gave.
template <class T>
float number_of_row(uint64_t rows, int row, int k) {
  const uintptr_t first = uintptr_t(rows << 2 >> 2) * 16;
  const int bytes = rows >> 62 == 1 ? 128 : 64;
  return float_of(T::to_f32(*reinterpret_cast<const uint16_t*>(swizzled_byte(first + uintptr_t(row * bytes + 2 * k), bytes))));
}

// What a warpgroup has: 64 rows.
template <class T, int kSelector, bool kColumns>
void multiply_rows(const BegunProduct& product) {
  SparseLane own = product.own;
  if (!product.more) std::memset(own.acc, 0, kWgmmaCols / 8 * 4 * sizeof(float));
  emulated::in_group(own, [&](SparseLane** all) {
    static float right[32][kWgmmaCols];
    for (int column = 0; column < kWgmmaCols; ++column)
      for (int k = 0; k < 32; ++k)
        right[k][column] = kColumns ? number_of_column<T>(product.dense, column, k) : number_of_row<T>(product.dense, column, k);
    for (int row = 0; row < 64; ++row) {
      const int quartet = row / 16 * 32 + row % 8 * 4;
      Kept left;
      for (int kept = 0; kept < 16; ++kept) {
        const int source = quartet + 2 * kSelector + kept / 8;
        const int group = kept % 8 / 2, shift = row / 8 % 2 * 16 + 4 * group + 2 * (kept % 2);
        left.values[kept] = number_of_row<T>(product.sparse, row, kept);
        left.columns[kept] = 16 * (kept / 8) + 4 * group + int(all[source]->words >> shift & 3);
      }
      add_row(all + quartet, row / 8 % 2, left, right);
    }
  });
}

template <class T, int kSelector, bool kColumns>
void wgmma_sp_memory(float acc[32][4], uint64_t sparse, uint64_t dense, uint32_t words, int more) {
  begun_products[emulated::own_number()].push_back(
      {multiply_rows<T, kSelector, kColumns>, {acc[0], nullptr, nullptr, words}, sparse, dense, more});
}

// What a warpgroup has of a dense product: 64 rows.
template <class T>
void multiply_dense_rows(const BegunProduct& product) {
  SparseLane own = product.own;
  if (!product.more) std::memset(own.acc, 0, kWgmmaCols / 8 * 4 * sizeof(float));
  emulated::in_group(own, [&](SparseLane** all) {
    static float right[16][kWgmmaCols];
    for (int column = 0; column < kWgmmaCols; ++column)
      for (int k = 0; k < 16; ++k) right[k][column] = number_of_row<T>(product.dense, column, k);
    for (int row = 0; row < 64; ++row) {
      Kept left;
      for (int k = 0; k < 16; ++k) left.values[k] = number_of_row<T>(product.sparse, row, k), left.columns[k] = k;
      add_row(all + row / 16 * 32 + row % 8 * 4, row / 8 % 2, left, right);
    }
  });
}

template <class T>
void wgmma_rows(float acc[32][4], uint64_t a, uint64_t b, int more) {
  begun_products[emulated::own_number()].push_back({multiply_dense_rows<T>, {acc[0], nullptr, nullptr, 0}, a, b, more});
}

inline void store_matrices_transposed(uint16_t* row, const uint32_t (&m)[4]) {
  struct Lane {
    uint16_t* row;
    const uint32_t* m;
  } own = {row, m};
  emulated::in_warp(own, [](Lane** all) {
    for (int lane = 0; lane < 32; ++lane)  // gives row lane % 8 of matrix lane / 8
      for (int other = 0; other < 8; ++other)
        all[lane]->row[other] = uint16_t(all[other * 4 + lane % 8 / 2]->m[lane / 8] >> (lane % 2 * 16));
  });
}

inline void commit_wgmma() { begun_products[emulated::own_number()].push_back({}); }

template <int n>
void wait_wgmma() {
  std::vector<BegunProduct>& own = begun_products[emulated::own_number()];
  size_t end = own.size();
  for (int groups = 0; end > 0; --end)
    if (own[end - 1].finish == nullptr && groups++ == n) break;
  const std::vector<BegunProduct> now(own.begin(), own.begin() + long(end));
  own.erase(own.begin(), own.begin() + long(end));
  if (!now.empty()) emulated::let_others_go();
  for (const BegunProduct& product : now)
    if (product.finish != nullptr) product.finish(product);
}

// A barrier: arrivals of a phase, those that are missing, the number of the phase modulo 2^16, and bytes that are yet to come.
struct EmulatedBarrier {
  uint8_t arrivals, missing;
  uint16_t phase;
  int32_t bytes;

  static EmulatedBarrier& of(Barrier* b) { return *reinterpret_cast<EmulatedBarrier*>(b); }
  void end_if_complete() {
    if (missing > 0 || bytes != 0) return;
    missing = arrivals;
    ++phase;
    ++emulated::phases;
  }
};

inline void init_barrier(Barrier* b, int arrivals) {
  if (arrivals < 1 || arrivals > 255) std::abort();
  EmulatedBarrier::of(b) = {uint8_t(arrivals), uint8_t(arrivals), 0, 0};
}

inline void arrive_expecting(Barrier* b, int bytes) {
  EmulatedBarrier& own = EmulatedBarrier::of(b);
  ++emulated::steps;
  if (own.missing == 0) std::abort();  // more arrivals than the phase has
  own.bytes += bytes, --own.missing;
  own.end_if_complete();
}

inline void arrive(Barrier* b) { arrive_expecting(b, 0); }

// A place in this block's memory in that of another one of the cluster.
template <class T>
T* at_block(T* own, int block) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(own) + (block - block_of_cluster()) * int64_t(block_bytes));
}

// Clusters run one after the other, those of lower numbers first.
inline void send_signal(uint32_t* signal) {
  __syncwarp();
  *signal = 1;
}

inline void wait_signal(const uint32_t* signal) {
  if (*signal != 1) std::abort();  // of a cluster that has yet to begin
  __syncwarp();
}

inline void arrive_at(Barrier* b, int block) { arrive(at_block(b, block)); }

// A box on its way into so many blocks of a cluster from the first one on.
struct Box {
  CUtensorMap map;
  int x, y, blocks;
  uint8_t* to;
  Barrier* barrier;

  static void finish(const emulated::Begun& begun) {
    auto* const box = static_cast<Box*>(begun.to);
    const CUtensorMap& m = box->map;
    const int64_t row = m.box_inner * m.element, width = m.inner * m.element;
    for (int block = 0; block < box->blocks; ++block) {
      const auto to = reinterpret_cast<uintptr_t>(box->to) + size_t(block) * block_bytes;
      for (int64_t r = 0; r < m.box_outer * m.parts; ++r)
        for (int64_t b = 0; b < row; ++b) {
          const int64_t line = box->y + r / m.parts, byte = box->x * m.element + b;
          const bool inside = line >= 0 && line < m.outer && byte >= 0 && byte < width;
          *reinterpret_cast<uint8_t*>(swizzled_byte(to + uintptr_t(r * row + b), m.swizzled)) =
              inside ? m.data[r % m.parts * m.part_bytes + line * m.row_bytes + byte] : uint8_t(0);
        }
      EmulatedBarrier& barrier = EmulatedBarrier::of(box->barrier + block * int64_t(block_bytes / sizeof(Barrier)));
      barrier.bytes -= int32_t(row * m.box_outer * m.parts);
      barrier.end_if_complete();
    }
    delete box;
  }

  static void begin(void* to, const CUtensorMap* map, int x, int y, Barrier* b, int first, int blocks) {
    if (reinterpret_cast<uintptr_t>(to) % 128 != 0) std::abort();
    auto* const box = new Box{*map, x, y, blocks, static_cast<uint8_t*>(at_block(static_cast<void*>(to), first)), at_block(b, first)};
    emulated::begin(finish, box, nullptr);
  }
};

inline void copy_box(void* to, const CUtensorMap* map, int x, int y, Barrier* b) {
  Box::begin(to, map, x, y, b, block_of_cluster(), 1);
}
template <int kBlocks>
void copy_box_for_all(void* to, const CUtensorMap* map, int x, int y, Barrier* b) {
  Box::begin(to, map, x, y, b, 0, kBlocks);
}

inline void arrive_with_copies(Barrier* b) {
  emulated::begin([](const emulated::Begun& arrival) { arrive(static_cast<Barrier*>(arrival.to)); }, b, nullptr);
}

// Every second thread goes on as late as it may, which shows whether others wait for it.
inline void wait_barrier(Barrier* b, int parity) {
  EmulatedBarrier& own = EmulatedBarrier::of(b);
  while (int(own.phase % 2) == parity) emulated::yield();
  const int number = emulated::own_number();
  if ((number + number / 32 + own.phase) % 2 == 0) emulated::let_others_go();
}

}  // namespace cuda
}  // namespace s24

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult*) {
  if (std::string(name) != "cuTensorMapEncodeTiled") return cudaErrorInvalidValue;
  return *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled), cudaSuccess;
}
