// A tile of a V:N:M array of bfloat16 or float16 in shared memory: V of 64, 128 or 256, M of 8, 16 or 32.
//
// A block of threads takes V rows x 128 columns, or several such tiles. It brings them to shared memory once and finds there
// what packed_vnm.cu reads twice: the sums of columns, the four columns of each group, two of four in every row. Sizes are powers
// of two, since a division would cost more than all that is done to an element.
#pragma once
#include "../core/packed_vnm.h"

#include "mma_sp.cuh"
#include "packed24.cuh"

namespace s24 {
namespace cuda {

constexpr int kWidth = 128;  // columns of a tile
constexpr int kAccess = 8;   // elements of an access to the dense array
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
  int log_v, log_m, log_many, x_bytes, work_bytes;
};

// What one block of kThreads threads works on, and where it is in shared memory: 1 << log_many tiles of the same columns.
template <class T, bool kDepthLast, int kThreads = cuda::kThreads>
struct Tile {
  const PackVnmArgs& a;
  int log_v, log_m, log_many, log_groups;  // of V, M, the tiles and the groups of a row of a tile
  int v, m, groups;
  int64_t row0, group0, all;  // rows count through all matrices; all: groups of a row
  int64_t first, line;        // of the dense array: where the tile begins, elements from one line to the next
  int stride;                 // of its lines in shared memory
  uint16_t* x;
  uint32_t* work;    // partial sums; the keys of columns; then of every row and group the pair, or its kept columns as bits
  uint8_t* nibbles;  // of every row and group
  uint8_t* slots;    // of every column: which of the four it is, or kNoSlot
  uint8_t* columns;  // of every group: four

  static int64_t line_stride(int64_t v) { return kDepthLast ? kWidth + kAccess : v + 2 * kAccess; }
  static int64_t x_bytes(int64_t v) { return 2 * (kDepthLast ? v : kWidth) * line_stride(v); }
  static int64_t work_bytes(int64_t v, int64_t m, int64_t many) {
    const int64_t sums = (kDepthLast ? kVnmLanes : many) * kWidth * 4, pairs = v * (kWidth / m + 1) * 4;
    return sums > pairs ? sums : pairs;
  }
  static Sizes sizes(int64_t v, int64_t m, int64_t many = 1) {
    return {log_of(v), log_of(m), log_of(many), int(many * x_bytes(v)), int(work_bytes(v, m, many))};
  }
  // Of shared memory.
  static int64_t bytes(int64_t v, int64_t m, int64_t many = 1) {
    return many * x_bytes(v) + work_bytes(v, m, many) + v * (kWidth / m) + many * (kWidth + 4 * (kWidth / m));
  }

  __device__ __forceinline__ Tile(const PackVnmArgs& a, Sizes s, unsigned row_tile, unsigned depth_tile, int64_t matrix)
      : a(a), log_v(s.log_v), log_m(s.log_m), log_many(s.log_many), log_groups(7 - log_m),
        v(1 << log_v), m(1 << log_m), groups(kWidth >> log_m) {
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
    columns = nibbles + (v << log_groups);
    slots = columns + (4 * groups << log_many);
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

  // f(tile, row, group) for two groups of a row at a time; neighbouring threads take what follows, and store whole lines.
  template <class F>
  __device__ __forceinline__ void for_pairs(F f) const {
    const int log_pairs = log_groups - 1;
    for (int i = threadIdx.x; i < 1 << (log_many + log_v + log_pairs); i += kThreads) {
      const int line = i >> log_pairs;
      f(line >> log_v, line & (v - 1), (i & ((1 << log_pairs) - 1)) * 2);
    }
  }

  __device__ __forceinline__ uint32_t* pair_at(int r, int g) const { return work + r * (groups + 1) + g; }
  // Of the V rows from row r on.
  __device__ __forceinline__ uint8_t* columns_at(int64_t r) const {
    return a.columns + (((row0 + r) >> log_v) * all + group0) * 4;
  }
  __device__ __forceinline__ uint32_t* values_at(int64_t r, int g) const {
    return static_cast<uint32_t*>(a.values) + (row0 + r) * all + group0 + g;
  }
  __device__ __forceinline__ uint8_t* metadata_at(int64_t r, int g) const {
    return a.metadata + (((row0 + r) * all + group0 + g) >> 1);
  }
};

// One byte of a word; i: below 4.
__device__ __forceinline__ uint32_t byte_of(uint32_t word, uint32_t i) { return select_bytes(word, 0, 0x4440u | i); }

// Adds the magnitudes of eight elements that follow each other, and their bits to `any`, two columns a word.
template <class T>
__device__ __forceinline__ void add_eight(float (&sum)[kAccess], uint32_t (&any)[kAccess / 2], const Vector<uint32_t, 4>& x) {
  S24_UNROLL
  for (int i = 0; i < kAccess / 2; ++i) {
    sum[2 * i] = add_magnitude(sum[2 * i], T::to_f32(uint16_t(x.at[i])));
    sum[2 * i + 1] = add_magnitude(sum[2 * i + 1], T::to_f32(uint16_t(x.at[i] >> 16)));
    any[i] |= x.at[i];
  }
}

// The squared ReLU of eight elements, with the bits of squared_relu.
template <class T>
__device__ __forceinline__ Vector<uint32_t, 4> squares(const Vector<uint32_t, 4>& x) {
  Vector<uint32_t, 4> y;
  uint32_t special = 0;
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    y.at[i] = squared_relu_pair<T>(x.at[i]);
    special |= y.at[i] + (0x8000u - T::kInf) * 0x00010001u;  // no square has a sign: from infinity on the top bit is set
  }
  if ((special & 0x80008000u) != 0) {  // a NaN keeps its bits
    S24_UNROLL
    for (int i = 0; i < 4; ++i)
      y.at[i] = uint32_t(squared_relu<T>(uint16_t(x.at[i]))) | uint32_t(squared_relu<T>(uint16_t(x.at[i] >> 16))) << 16;
  }
  return y;
}

// The key of a column. Subnormals, of which `search` tells that there may be some, decide only where it holds nothing else.
template <class T, class F>
__device__ __forceinline__ uint32_t key_of(int v, float sum, bool search, F element) {
  uint32_t largest = 0;
  if (sum == 0 && search)
#pragma unroll 1
    for (int r = 0; r < v; ++r) largest = max_u32(largest, T::to_f32(element(r)) & kF32Magnitude);
  return column_key(sum, largest);
}

// Leaves the keys of all columns in `work`; before, if kSquared, the elements' squared ReLU in their place.
template <bool kSquared, class T>
__device__ __forceinline__ void sum_columns(const Tile<T, true>& t) {
  constexpr int kAcross = kWidth / kAccess;
  static_assert(kThreads == kVnmLanes * kAcross, "a thread for each partial sum of eight columns");
  const int lane = threadIdx.x / kAcross, c0 = threadIdx.x % kAcross * kAccess;
  float sum[kAccess] = {};
  uint32_t any[kAccess / 2] = {};
  for (int r = lane; r < t.v; r += 4 * kVnmLanes) {  // V is a multiple of 64
    S24_UNROLL
    for (int i = 0; i < 4; ++i) {
      auto* const at = reinterpret_cast<uint32_t*>(t.x + (r + i * kVnmLanes) * t.stride + c0);
      auto x = load<uint32_t, 4>(at);
      if constexpr (kSquared) store(at, x = squares<T>(x));
      add_eight<T>(sum, any, x);
    }
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
  if (threadIdx.x >= kWidth) return;
  const float whole = add_lanes(sums + threadIdx.x, kWidth);
  t.work[threadIdx.x] = key_of<T>(t.v, whole, search, [&](int r) { return t.x[r * t.stride + int(threadIdx.x)]; });
}

template <bool kSquared, class T, int kThreads>
__device__ __forceinline__ void sum_columns(const Tile<T, false, kThreads>& t) {
  static_assert(!kSquared, "squares are packed along the last axis alone");
  static_assert(kVnmLanes == 2 * kAccess && kThreads % (2 * kWidth) == 0, "two threads share the partial sums of a column");
  const int half = threadIdx.x % 2;
  for (int c = threadIdx.x / 2; c < kWidth << t.log_many; c += kThreads / 2) {
    const uint16_t* const column = t.x + c * t.stride;
    float sum[kAccess] = {};
    uint32_t any[kAccess / 2] = {};
    for (int r = half * kAccess; r < t.v; r += 4 * kVnmLanes) {  // V is a multiple of 64
      S24_UNROLL
      for (int i = 0; i < 4; ++i)
        add_eight<T>(sum, any, load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(column + r + i * kVnmLanes)));
    }
    // The sums of add_lanes: l and l + 8, which neighbours hold, then 4, 2 and 1 apart.
    S24_UNROLL
    for (int i = 0; i < kAccess; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    uint32_t bits = any[0] | any[1] | any[2] | any[3];
    bits |= __shfl_xor_sync(0xffffffffu, bits, 1);
    S24_UNROLL
    for (int step = 1; step <= 3; ++step) {
      S24_UNROLL
      for (int i = 0; i < kAccess / 2; ++i)
        if (i < kAccess >> step) sum[i] += sum[i + (kAccess >> step)];
    }
    if (half == 0) t.work[c] = key_of<T>(t.v, sum[0], (bits & 0x7fff7fffu) != 0, [&](int r) { return column[r]; });
  }
}

// Finds the four columns of largest key in every group; of equal ones the lower. Whole warps call it.
template <class T, bool kDepthLast, int kThreads>
__device__ __forceinline__ void choose_columns(const Tile<T, kDepthLast, kThreads>& t) {
  const int lane = threadIdx.x % 32, of_group = lane & (t.m - 1), group_lane = lane - of_group;
  const uint32_t* const keys = t.work + (int(threadIdx.x) - of_group);
  const uint32_t key = keys[of_group];
  int larger = 0;
  for (int j = 0; j < t.m; j += 8) {  // M is a multiple of 8
    S24_UNROLL
    for (int h = 0; h < 8; h += 4) {
      const auto others = load<uint32_t, 4>(keys + j + h);
      S24_UNROLL
      for (int i = 0; i < 4; ++i) larger += int((key - others.at[i]) >> 31);  // the top bit of keys is free
    }
  }
  bool kept = larger < 4;
  uint32_t all = __ballot_sync(0xffffffffu, kept);
  if (__popc(all) != 128 >> t.log_m) {  // more than four of some group, of equal keys
    for (int j = 0; j < of_group; ++j) larger += keys[j] == key;
    kept = larger < 4;
    all = __ballot_sync(0xffffffffu, kept);
  }
  const uint32_t slot = uint32_t(__popc(all >> group_lane & ((1u << of_group) - 1u)));
  t.slots[threadIdx.x] = uint8_t(kept ? slot : kNoSlot);
  if (kept) t.columns[(threadIdx.x >> t.log_m) * 4 + slot] = uint8_t(of_group);
}

// Chooses the four columns of every group of the tiles in shared memory.
template <bool kSquared, class T, bool kDepthLast, int kThreads>
__device__ __forceinline__ void find_columns(const Tile<T, kDepthLast, kThreads>& t) {
  sum_columns<kSquared>(t);
  __syncthreads();
  if (int(threadIdx.x) < kWidth << t.log_many) choose_columns(t);
  __syncthreads();
}

// The elements of row r, of one tile, in the columns `four` of group g.
template <class T, bool kDepthLast, int kThreads>
__device__ __forceinline__ Group<T> in_columns(const Tile<T, kDepthLast, kThreads>& t, int r, int g, uint32_t four, int tile = 0) {
  uint16_t x[4];
  S24_UNROLL
  for (uint32_t k = 0; k < 4; ++k) {
    const int c = tile * kWidth + (g << t.log_m) + int(byte_of(four, k));
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

// Packs tiles that are in shared memory, the rows of each `apart` rows behind those of the one before.
template <bool kSquared, class T, bool kDepthLast, int kThreads>
__device__ __forceinline__ void pack_tile(const Tile<T, kDepthLast, kThreads>& t, int64_t apart = 0) {
  find_columns<kSquared>(t);
  const int log_columns = t.log_groups + 2;
  for (int i = threadIdx.x; i < 1 << (t.log_many + log_columns); i += kThreads)
    t.columns_at((i >> log_columns) * apart)[i & ((1 << log_columns) - 1)] = t.columns[i];
  t.for_pairs([&](int tile, int r, int g) {
    const auto fours = load<uint32_t, 2>(reinterpret_cast<const uint32_t*>(t.columns) + (tile << t.log_groups) + g);
    Pair<uint16_t> pairs[2];
    uint32_t nibbles[2];
    S24_UNROLL
    for (int n = 0; n < 2; ++n)
      nibbles[n] = encode<PackOp::kPlain, T>(in_columns(t, r, g + n, fours.at[n], tile), 0, 0, Draw<0>(), pairs[n]);
    const int64_t row = tile * apart + r;
    store(t.values_at(row, g), Vector<uint32_t, 2>{{word_of(pairs[0]), word_of(pairs[1])}});
    *t.metadata_at(row, g) = uint8_t(nibbles[0] | nibbles[1] << 4);
  });
}

}  // namespace cuda
}  // namespace s24
