// A tile of a V:N:M array of bfloat16 or float16 in shared memory: V of 64, 128 or 256, M of 8, 16 or 32.
//
// A block of threads takes V rows x 128 columns. It copies them to shared memory, once and in whole lines, and finds there
// what packed_vnm.cu reads twice: the sums of columns, the four columns of each group, two of four in every row. Sizes are powers
// of two, since a division would cost more than all that is done to an element.
#pragma once
#include "../core/packed_vnm.h"

#include "mma_sp.cuh"
#include "packed24.cuh"

namespace s24 {
namespace cuda {

constexpr int kWidth = 128;   // columns of a tile
constexpr int kAccess = 8;    // elements of an access to the dense array
constexpr int kMostGroups = kWidth / 8;
constexpr uint32_t kNoSlot = 4;
constexpr unsigned kMostAlongY = 65535;  // blocks of a grid, and along z

inline int log_of(int64_t power) {
  int log = 0;
  while (int64_t(1) << log < power) ++log;
  return log;
}

inline bool fits_a_tile(int64_t v, int64_t m) {
  return (v == 64 || v == 128 || v == 256) && (m == 8 || m == 16 || m == 32);
}

struct Sizes {
  int log_v, log_m, x_bytes, work_bytes;
};

// What one block of threads works on, and where it is in shared memory.
template <class T, bool kDepthLast>
struct Tile {
  const PackVnmArgs& a;
  int log_v, log_m, log_groups;  // of V, M and the groups of a row of the tile
  int v, m, groups;
  int64_t row0, group0, all;  // rows count through all matrices; all: groups of a row
  int64_t first, line;        // of the dense array: where the tile begins, elements from one line to the next
  int stride;                 // of its lines in shared memory
  uint16_t* x;
  uint32_t* work;    // partial sums; then of every row and group the pair, or its kept columns as bits
  uint8_t* nibbles;  // of every row and group
  uint8_t* slots;    // of every column: which of the four it is, or kNoSlot
  uint8_t* columns;  // of every group: four

  // Bytes of shared memory, with room for the elements of so many tiles.
  static int64_t line_stride(int64_t v) { return kDepthLast ? kWidth + kAccess : v + 2 * kAccess; }
  static int64_t x_bytes(int64_t v) { return 2 * (kDepthLast ? v : kWidth) * line_stride(v); }
  static int64_t work_bytes(int64_t v, int64_t m) {
    const int64_t sums = kVnmLanes * kWidth * 4, pairs = v * (kWidth / m + 1) * 4;
    return sums > pairs ? sums : pairs;
  }
  static Sizes sizes(int64_t v, int64_t m, int many = 1) {
    return {log_of(v), log_of(m), many * int(x_bytes(v)), int(work_bytes(v, m))};
  }
  static int64_t bytes(int64_t v, int64_t m, int many = 1) {
    return many * x_bytes(v) + work_bytes(v, m) + v * (kWidth / m) + kWidth + 4 * kMostGroups;
  }

  __device__ __forceinline__ Tile(const PackVnmArgs& a, Sizes s, unsigned row_tile, unsigned depth_tile, int64_t matrix)
      : a(a), log_v(s.log_v), log_m(s.log_m), log_groups(7 - log_m), v(1 << log_v), m(1 << log_m), groups(kWidth >> log_m) {
    const int64_t r = int64_t(row_tile) * v, c = int64_t(depth_tile) * kWidth;
    all = a.depth >> log_m;
    row0 = matrix * a.rows + r;
    group0 = c >> log_m;
    line = kDepthLast ? a.depth : a.rows;
    first = matrix * a.rows * a.depth + (kDepthLast ? r * a.depth + c : c * a.rows + r);
    stride = kDepthLast ? kWidth + kAccess : v + 2 * kAccess;
    unsigned char* const memory = launched_memory();
    x = reinterpret_cast<uint16_t*>(memory);
    work = reinterpret_cast<uint32_t*>(memory + s.x_bytes);
    nibbles = memory + s.x_bytes + s.work_bytes;
    slots = nibbles + (v << log_groups);
    columns = slots + kWidth;
  }

  // f(line, element of it) for the accesses of the dense tile, kElements each.
  template <int kElements, class F>
  __device__ __forceinline__ void for_accesses(F f) const {
    const int log_accesses = (kDepthLast ? 7 : log_v) - (kElements == 16 ? 4 : 3);
    for (int i = threadIdx.x; i < v * kWidth / kElements; i += kThreads)
      f(i >> log_accesses, (i & ((1 << log_accesses) - 1)) * kElements);
  }

  // f(row, group); neighbouring threads are neighbours along groups, or along rows.
  template <class F>
  __device__ __forceinline__ void for_groups(bool along_groups, F f) const {
    for (int i = threadIdx.x; i < v << log_groups; i += kThreads)
      along_groups ? f(i >> log_groups, i & (groups - 1)) : f(i & (v - 1), i >> log_v);
  }

  __device__ __forceinline__ uint32_t* pair_at(int r, int g) const { return work + r * (groups + 1) + g; }
  __device__ __forceinline__ const uint8_t* given_columns() const {
    return a.columns + ((row0 >> log_v) * all + group0) * 4;
  }
  __device__ __forceinline__ uint32_t* values_at(int r, int g) const {
    return static_cast<uint32_t*>(a.values) + (row0 + r) * all + group0 + g;
  }
  __device__ __forceinline__ uint8_t* metadata_at(int r, int g) const {
    return a.metadata + (((row0 + r) * all + group0 + g) >> 1);
  }
};

__device__ __forceinline__ uint32_t byte_of(uint32_t word, uint32_t i) { return word >> (8 * i) & 0xffu; }

template <class T>
__device__ __forceinline__ void add_two(float sum[2], uint32_t& any, uint32_t word) {
  sum[0] = add_magnitude(sum[0], T::to_f32(uint16_t(word)));
  sum[1] = add_magnitude(sum[1], T::to_f32(uint16_t(word >> 16)));
  any |= word;
}

// Subnormals decide only in columns that hold nothing else.
template <class T, bool kDepthLast>
__device__ __forceinline__ uint32_t key_of(const Tile<T, kDepthLast>& t, int c, float sum, bool search) {
  uint32_t largest = 0;
  if (sum == 0 && search)
    for (int r = 0; r < t.v; ++r)
      largest = max_u32(largest, T::to_f32(t.x[kDepthLast ? r * t.stride + c : c * t.stride + r]) & kF32Magnitude);
  return column_key(sum, largest);
}

// The key of column threadIdx.x, in the first kWidth threads.
template <class T>
__device__ __forceinline__ uint32_t sum_columns(const Tile<T, true>& t) {
  constexpr int kAcross = kWidth / kAccess;
  static_assert(kThreads == kVnmLanes * kAcross, "a thread for each partial sum of eight columns");
  const int lane = threadIdx.x / kAcross, c0 = threadIdx.x % kAcross * kAccess;
  float sum[kAccess] = {};
  uint32_t any[kAccess / 2] = {};
#pragma unroll 4
  for (int r = lane; r < t.v; r += kVnmLanes) {
    const Vector<uint32_t, 4> eight = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(t.x + r * t.stride + c0));
    S24_UNROLL
    for (int i = 0; i < 4; ++i) add_two<T>(sum + 2 * i, any[i], eight.at[i]);
  }
  auto* const sums = reinterpret_cast<float*>(t.work);
  S24_UNROLL
  for (int i = 0; i < kAccess; i += 4)
    store(sums + lane * kWidth + c0 + i, Vector<float, 4>{{sum[i], sum[i + 1], sum[i + 2], sum[i + 3]}});
  bool subnormal = false;  // nothing else in one of these columns, as far as this thread sees
  S24_UNROLL
  for (int i = 0; i < kAccess; ++i) {
    const uint32_t bits = any[i / 2] >> (i % 2 * 16) & T::kMagnitude;
    subnormal |= bits != 0 && T::to_f32(uint16_t(bits)) < kF32MinNormal;
  }
  const bool search = __syncthreads_or(subnormal);
  return threadIdx.x < kWidth ? key_of(t, threadIdx.x, add_lanes(sums + threadIdx.x, kWidth), search) : 0;
}

template <class T>
__device__ __forceinline__ uint32_t sum_columns(const Tile<T, false>& t) {
  static_assert(kThreads == 2 * kWidth && kVnmLanes == 2 * kAccess, "two threads share the partial sums of a column");
  const int half = threadIdx.x % 2, c = threadIdx.x / 2;
  float sum[kAccess] = {};
  uint32_t any = 0;
#pragma unroll 4
  for (int r = 0; r < t.v; r += kVnmLanes) {
    const auto* const from = reinterpret_cast<const uint32_t*>(t.x + c * t.stride + r + half * kAccess);
    const Vector<uint32_t, 4> eight = load<uint32_t, 4>(from);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) add_two<T>(sum + 2 * i, any, eight.at[i]);
  }
  // The sums of add_lanes: l and l + 8, which neighbours hold, then 4, 2 and 1 apart.
  S24_UNROLL
  for (int i = 0; i < kAccess; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
  any |= __shfl_xor_sync(0xffffffffu, any, 1);
  S24_UNROLL
  for (int step = 1; step <= 3; ++step) {
    S24_UNROLL
    for (int i = 0; i < kAccess / 2; ++i)
      if (i < kAccess >> step) sum[i] += sum[i + (kAccess >> step)];
  }
  if (half == 0) t.work[c] = key_of(t, c, sum[0], (any & 0x7fff7fffu) != 0);
  __syncthreads();
  return threadIdx.x < kWidth ? t.work[threadIdx.x] : 0;
}

// Finds the four columns of largest key in every group; of equal ones the lower. Whole warps call it.
template <class T, bool kDepthLast>
__device__ __forceinline__ void choose_columns(const Tile<T, kDepthLast>& t, uint32_t key) {
  const int lane = threadIdx.x % 32, of_group = lane & (t.m - 1), group_lane = lane - of_group;
  uint32_t before = 0;
  for (int j = 0; j < t.m; ++j) {
    const uint32_t other = __shfl_sync(0xffffffffu, key, group_lane + j);
    before += other > key || (other == key && j < of_group);
  }
  const bool kept = before < 4;
  const uint32_t slot = uint32_t(__popc(__ballot_sync(0xffffffffu, kept) >> group_lane & ((1u << of_group) - 1u)));
  t.slots[threadIdx.x] = uint8_t(kept ? slot : kNoSlot);
  if (kept) t.columns[(threadIdx.x >> t.log_m) * 4 + slot] = uint8_t(of_group);
}

// Chooses the four columns of every group of a tile in shared memory. stored: whether the packed array gets them, too.
template <bool stored, class T, bool kDepthLast>
__device__ __forceinline__ void find_columns(const Tile<T, kDepthLast>& t) {
  const uint32_t key = sum_columns(t);
  if (threadIdx.x < kWidth) choose_columns(t, key);
  __syncthreads();
  if (stored && int(threadIdx.x) < 4 * t.groups)
    const_cast<uint8_t*>(t.given_columns())[threadIdx.x] = t.columns[threadIdx.x];
}

// The elements of row r in the columns `four` of group g.
template <class T, bool kDepthLast>
__device__ __forceinline__ Group<T> in_columns(const Tile<T, kDepthLast>& t, int r, int g, uint32_t four) {
  uint16_t x[4];
  S24_UNROLL
  for (uint32_t k = 0; k < 4; ++k) {
    const int c = (g << t.log_m) + int(byte_of(four, k));
    x[k] = t.x[kDepthLast ? r * t.stride + c : c * t.stride + r];
  }
  return Group<T>::of(x);
}

template <class T, bool kDepthLast>
__device__ __forceinline__ uint32_t columns_of(const Tile<T, kDepthLast>& t, int g) {
  return *reinterpret_cast<const uint32_t*>(t.columns + 4 * g);
}

__device__ __forceinline__ uint32_t word_of(const Pair<uint16_t>& pair) {
  return uint32_t(pair.at[0]) | uint32_t(pair.at[1]) << 16;
}

template <class T, bool kDepthLast>
__device__ __forceinline__ void store_values(const Tile<T, kDepthLast>& t) {
  t.for_groups(true, [&](int r, int g) { *t.values_at(r, g) = *t.pair_at(r, g); });
}

// Packs a tile that is in shared memory.
template <class T, bool kDepthLast>
__device__ __forceinline__ void pack_tile(const Tile<T, kDepthLast>& t) {
  find_columns<true>(t);
  t.for_groups(kDepthLast, [&](int r, int g) {
    Pair<uint16_t> pair;
    const uint32_t nibble = encode<PackOp::kPlain, T>(in_columns(t, r, g, columns_of(t, g)), 0, 0, Draw<0>(), pair);
    t.nibbles[(r << t.log_groups) + g] = uint8_t(nibble);
    *t.pair_at(r, g) = word_of(pair);
  });
  __syncthreads();
  store_values(t);
  for (int i = threadIdx.x; i < t.v << t.log_groups >> 2; i += kThreads) {
    const uint32_t four = reinterpret_cast<const uint32_t*>(t.nibbles)[i], two = four | four >> 4;
    *reinterpret_cast<uint16_t*>(t.metadata_at(i >> (t.log_groups - 2), i << 2 & (t.groups - 1))) =
        uint16_t((two & 0xffu) | (two >> 8 & 0xff00u));
  }
}

}  // namespace cuda
}  // namespace s24
