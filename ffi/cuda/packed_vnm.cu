// V:N:M arrays: masks, packing, unpacking and gathering.
//
// Operands: dense (outer, R, K), or (outer, K, R); values (outer, R, 2K/M), metadata (outer, R, ceil(K/2M)) and columns
// (outer, R/V, K/M, 4); a mask of the shape of dense, as a result or an operand.
// Steps: a block of threads takes whole blocks of V rows, times some groups of M columns. It chooses the columns of each, which
// reads everything once, then two of four in every row, from what is still in cache; what is packed passes through shared
// memory, so that whole lines are written whichever way the dense array lies.
// Constraints: V of 16 to 256, a power of two; M from 4 to kVnmMaxM. Calls that fits_pack_vnm_tiles takes go to
// packed_vnm_tiles.cu.
#include "../core/packed_vnm.h"

#include "packed24.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kStrip = 128;  // columns of a tile, at most
constexpr int64_t kVnmGroups = 16;  // a tile has at most this many groups of columns
constexpr int64_t kVnmLeast = 128;  // of V rows, or of at least so many if rows are contiguous
S24_HD int64_t vnm_unit_rows(const PackVnmArgs& a) { return a.depth_last || a.v > kVnmLeast ? a.v : kVnmLeast; }
constexpr int kMostBlocks = int(kVnmLeast) / kVnmLanes;
constexpr int kAccess = 8;  // elements of an access
constexpr uint8_t kNoSlot = 4;

// The number of groups is even, so that each byte of metadata has one writer.
S24_HD int64_t tile_groups(int64_t m) { return kStrip / m / 2 * 2 < kVnmGroups ? kStrip / m / 2 * 2 : kVnmGroups; }

template <PackVnmOp op>
constexpr bool kReadsColumns = op == PackVnmOp::kGather || op == PackVnmOp::kUnpack;
template <PackVnmOp op>
constexpr bool kPacks = op == PackVnmOp::kPack || op == PackVnmOp::kPackMasked;

template <PackVnmOp op>
constexpr PackOp kTwoOfFour = op == PackVnmOp::kPackMasked ? PackOp::kMasked
                              : op == PackVnmOp::kGather   ? PackOp::kGather
                                                       : PackOp::kPlain;

struct ColumnSums {
  float sums[kVnmLanes][kStrip];
  uint32_t largest[kVnmLanes][kStrip];
};

struct Search {
  float scores[kVnmMaxExactM][kVnmMaxV + 1];
  uint64_t best[kThreads];
};

template <class Bits>
struct Tile {
  union {
    ColumnSums chosen;
    Search search;
    Pair<Bits> pairs[kVnmMaxV][kVnmGroups + 1];
  };
  uint32_t keys[kMostBlocks][kStrip];
  uint8_t columns[kMostBlocks][kVnmGroups][4];
  uint8_t slots[kMostBlocks][kStrip];  // which of the four a column is, or kNoSlot
  uint8_t nibbles[kVnmMaxV][kVnmGroups];
};

// What one block of threads works on.
struct Place {
  int64_t row0, group0;  // rows count through all matrices
  int rows, groups, blocks, width;
  int64_t first, row_step, column_step;  // in the dense array

  __device__ static Place of(const PackVnmArgs& a) {
    const int64_t height = vnm_unit_rows(a), row_tiles = ceil_div(a.rows, height), all = a.depth / a.m;
    const int64_t per_tile = tile_groups(a.m), group_tiles = ceil_div(all, per_tile);
    int64_t within, r, g;
    const int64_t outer = divide(blockIdx.x, row_tiles * group_tiles, &within);
    if (a.depth_last)  // neighbours in memory come first
      r = divide(within, group_tiles, &g);
    else
      g = divide(within, row_tiles, &r);
    Place p;
    p.row0 = outer * a.rows + r * height;
    p.group0 = g * per_tile;
    p.rows = int(min(height, a.rows - r * height));
    p.groups = int(min(per_tile, all - p.group0));
    p.blocks = p.rows / int(a.v);
    p.width = p.groups * int(a.m);
    p.row_step = a.depth_last ? a.depth : 1;
    p.column_step = a.depth_last ? 1 : a.rows;
    p.first = outer * a.rows * a.depth + r * height * p.row_step + p.group0 * a.m * p.column_step;
    return p;
  }
};

// Elements of which `left` exist; zeros for the others.
template <class B>
__device__ __forceinline__ void load_some(const B* from, int left, bool whole, B to[kAccess]) {
  if (whole && left >= kAccess) {
    constexpr int n = sizeof(B) == 4 ? 4 : kAccess;
    S24_UNROLL
    for (int i = 0; i < kAccess; i += n) {
      const Vector<B, n> v = load<B, n>(from + i);
      S24_UNROLL
      for (int j = 0; j < n; ++j) to[i + j] = v.at[j];
    }
  } else {
    S24_UNROLL
    for (int i = 0; i < kAccess; ++i) to[i] = i < left ? from[i] : B(0);
  }
}

template <class B>
__device__ __forceinline__ void store_some(B* to, int left, bool whole, const B from[kAccess]) {
  if (whole && left >= kAccess) {
    constexpr int n = sizeof(B) == 4 ? 4 : kAccess;
    S24_UNROLL
    for (int i = 0; i < kAccess; i += n) {
      Vector<B, n> v;
      S24_UNROLL
      for (int j = 0; j < n; ++j) v.at[j] = from[i + j];
      store(to + i, v);
    }
  } else {
    S24_UNROLL
    for (int i = 0; i < kAccess; ++i)
      if (i < left) to[i] = from[i];
  }
}

// Columns are contiguous: a thread adds one partial sum of eight columns.
template <class T, bool kMasked>
__device__ __forceinline__ void sum_along_rows(const PackVnmArgs& a, const Place& p, bool whole, Tile<typename T::Bits>& tile) {
  using Bits = typename T::Bits;
  static_assert(kThreads / kVnmLanes * kAccess == kStrip, "a thread for each partial sum of eight columns");
  const int lane = threadIdx.x / (kThreads / kVnmLanes), c0 = threadIdx.x % (kThreads / kVnmLanes) * kAccess;
  float sum[kAccess] = {};
  uint32_t most[kAccess] = {};
  for (int r = lane; r < a.v && c0 < p.width; r += kVnmLanes) {
    const int64_t at = p.first + r * a.depth + c0;
    Bits x[kAccess];
    uint8_t allowed[kAccess] = {};
    load_some(static_cast<const Bits*>(a.dense) + at, p.width - c0, whole, x);
    if constexpr (kMasked) load_some<uint8_t>(a.mask + at, p.width - c0, whole, allowed);
    S24_UNROLL
    for (int i = 0; i < kAccess; ++i) {
      float addend;
      uint32_t magnitude;
      count_element<T, kMasked>(x[i], allowed + i, addend, magnitude);
      sum[i] += addend;
      most[i] = max_u32(most[i], magnitude);
    }
  }
  S24_UNROLL
  for (int i = 0; i < kAccess; ++i) {
    tile.chosen.sums[lane][c0 + i] = sum[i];
    tile.chosen.largest[lane][c0 + i] = most[i];
  }
  __syncthreads();
  const int c = threadIdx.x;
  if (c < p.width) {
    uint32_t largest = 0;
    S24_UNROLL
    for (int l = 0; l < kVnmLanes; ++l) largest = max_u32(largest, tile.chosen.largest[l][c]);
    tile.keys[0][c] = allowed_first(add_lanes(&tile.chosen.sums[0][c], kStrip), largest);
  }
}

// Rows are contiguous: a thread adds half of the partial sums of a column of one block, its neighbour the other half.
template <class T, bool kMasked>
__device__ __forceinline__ void sum_along_columns(const PackVnmArgs& a, const Place& p, bool whole,
                                                  Tile<typename T::Bits>& tile) {
  using Bits = typename T::Bits;
  static_assert(kVnmLanes == 2 * kAccess, "two threads share the partial sums");
  const int units = p.width * p.blocks * 2;
  for (int unit0 = 0; unit0 < units; unit0 += kThreads) {
    const int unit = unit0 + int(threadIdx.x), half = unit % 2, b = unit / 2 % p.blocks, c = unit / 2 / p.blocks;
    float sum[kAccess] = {};
    uint32_t most = 0;
    for (int64_t r = 0; r < a.v && unit < units; r += kVnmLanes) {
      const int64_t at = p.first + c * a.rows + b * a.v + r + half * kAccess;
      Bits x[kAccess];
      uint8_t allowed[kAccess] = {};
      load_some(static_cast<const Bits*>(a.dense) + at, kAccess, whole, x);
      if constexpr (kMasked) load_some<uint8_t>(a.mask + at, kAccess, whole, allowed);
      S24_UNROLL
      for (int i = 0; i < kAccess; ++i) {
        float addend;
        uint32_t magnitude;
        count_element<T, kMasked>(x[i], allowed + i, addend, magnitude);
        sum[i] += addend;
        most = max_u32(most, magnitude);
      }
    }
    // The sums of add_lanes: l and l + 8, which neighbours hold, then 4, 2 and 1 apart.
    S24_UNROLL
    for (int i = 0; i < kAccess; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    most = max_u32(most, __shfl_xor_sync(0xffffffffu, most, 1));
    S24_UNROLL
    for (int step = 1; step <= 3; ++step) {
      S24_UNROLL
      for (int i = 0; i < kAccess / 2; ++i)
        if (i < kAccess >> step) sum[i] += sum[i + (kAccess >> step)];
    }
    if (unit < units && half == 0) tile.keys[b][c] = allowed_first(sum[0], most);
  }
}

__device__ __forceinline__ uint64_t block_max(uint64_t value, uint64_t* all) {
  all[threadIdx.x] = value;
  __syncthreads();
  for (int apart = kThreads / 2; apart > 0; apart /= 2) {
    if (int(threadIdx.x) < apart && all[threadIdx.x + apart] > all[threadIdx.x]) all[threadIdx.x] = all[threadIdx.x + apart];
    __syncthreads();
  }
  const uint64_t most = all[0];
  __syncthreads();
  return most;
}

// Every set of four columns is tried by one thread, which adds as the CPU does.
template <class T>
__device__ __forceinline__ void search_columns(const PackVnmArgs& a, const Place& p, int b, int g, Search& s,
                                               uint8_t columns[4]) {
  const auto* x = static_cast<const typename T::Bits*>(a.dense) + p.first + b * a.v * p.row_step + g * a.m * p.column_step;
  const int m = int(a.m), v = int(a.v);
  const auto element = [&](int e) { return T::to_f32(x[e / m * p.row_step + e % m * p.column_step]); };
  uint32_t top = 0;
  for (int e = threadIdx.x; e < m * v; e += kThreads) top = max_u32(top, element(e) & kF32Magnitude);
  top = uint32_t(block_max(top, s.best));
  for (int e = threadIdx.x; e < m * v; e += kThreads) s.scores[e % m][e / m] = search_score(element(e), top);
  __syncthreads();
  uint64_t best = 0;
  for (int number = threadIdx.x; number < sets_of(m, 4); number += kThreads) {
    int set[4];
    set_of_four(number, m, set);
    float sums[kVnmLanes] = {};
    for (int r = 0; r < v; r += kVnmLanes) {
      S24_UNROLL
      for (int l = 0; l < kVnmLanes; ++l) {
        const float c0 = s.scores[set[0]][r + l], c1 = s.scores[set[1]][r + l];
        const float c2 = s.scores[set[2]][r + l], c3 = s.scores[set[3]][r + l];
        sums[l] += largest_two(c0 > c1 ? c0 : c1, c0 > c1 ? c1 : c0, c2 > c3 ? c2 : c3, c2 > c3 ? c3 : c2);
      }
    }
    // Sums are not negative: their bits order them. Of equal ones the lower number is the larger.
    const uint64_t mine = uint64_t(bits_of(add_lanes(sums, 1))) << 32 | (0xffffffffu - uint32_t(number));
    best = mine > best ? mine : best;
  }
  best = block_max(best, s.best);
  if (threadIdx.x == 0) {
    int set[4];
    set_of_four(int(0xffffffffu - uint32_t(best)), m, set);
    S24_UNROLL
    for (int k = 0; k < 4; ++k) columns[k] = uint8_t(set[k]);
  }
  __syncthreads();
}

// f(row, group) for the rows and groups of the tile; neighbouring threads are neighbours along groups, or along rows.
template <class F>
__device__ __forceinline__ void for_groups(const Place& p, int groups, bool along_groups, F f) {
  for (int i = threadIdx.x; i < p.rows * groups; i += kThreads)
    along_groups ? f(i / groups, i % groups) : f(i % p.rows, i / p.rows);
}

// Writes a dense array that holds the kept elements and zeros, or a mask, in accesses of eight elements along the contiguous
// axis.
template <PackVnmOp op, class T>
__device__ __forceinline__ void spread(const PackVnmArgs& a, const Place& p, bool whole, const Tile<typename T::Bits>& tile) {
  using Bits = typename T::Bits;
  using Out = std::conditional_t<op == PackVnmOp::kMask, uint8_t, Bits>;
  Out* out;
  if constexpr (op == PackVnmOp::kMask)
    out = a.mask;
  else
    out = static_cast<Bits*>(a.dense);
  const int lines = a.depth_last ? p.rows : p.width, length = a.depth_last ? p.width : p.rows;
  const int accesses = int(ceil_div(length, kAccess)), v = int(a.v), m = int(a.m);
  for (int i = threadIdx.x; i < lines * accesses; i += kThreads) {
    const int line = i / accesses, at0 = i % accesses * kAccess;
    Out made[kAccess] = {};
    S24_UNROLL
    for (int j = 0; j < kAccess; ++j) {
      if (at0 + j >= length) break;
      const int r = a.depth_last ? line : at0 + j, c = a.depth_last ? at0 + j : line;
      const uint32_t slot = tile.slots[r / v][c], nibble = tile.nibbles[r][c / m];
      const bool first = slot == (nibble & 3u), second = slot == nibble >> 2;
      if constexpr (op == PackVnmOp::kMask)
        made[j] = first || second;
      else if (first || second)
        made[j] = tile.pairs[r][c / m].at[second];
    }
    store_some(out + p.first + line * (a.depth_last ? a.depth : a.rows) + at0, length - at0, whole, made);
  }
}

template <PackVnmOp op, bool kExact, class T>
__global__ void __launch_bounds__(kThreads) vnm(PackVnmArgs a, bool whole) {
  using Bits = typename T::Bits;
  constexpr bool kMasked = op == PackVnmOp::kPackMasked;
  __shared__ Tile<Bits> tile;
  const Place p = Place::of(a);
  const int64_t all = a.depth / a.m, bytes = ceil_div(all, 2);
  auto* const values = static_cast<Pair<Bits>*>(a.values) + p.row0 * all + p.group0;
  uint8_t* const metadata = a.metadata + p.row0 * bytes + p.group0 / 2;
  const int m = int(a.m), v = int(a.v), own_bytes = int(ceil_div(p.groups, 2));
  const auto for_columns = [&](auto f) {
    for (int i = threadIdx.x; i < p.blocks * p.groups; i += kThreads) {
      const int b = i / p.groups, g = i % p.groups;
      f(b, g, a.columns + ((p.row0 / a.v + b) * all + p.group0 + g) * 4);
    }
  };

  if constexpr (kReadsColumns<op>) {
    for_columns([&](int b, int g, const uint8_t* given) {
      for (int k = 0; k < 4; ++k) tile.columns[b][g][k] = uint8_t(min_u32(given[k], uint32_t(m) - 1u));
    });
    for_groups(p, own_bytes, true, [&](int r, int byte) {
      const uint32_t two = metadata[r * bytes + byte];
      tile.nibbles[r][2 * byte] = two & 15u;
      tile.nibbles[r][2 * byte + 1] = two >> 4;
    });
    if constexpr (op == PackVnmOp::kUnpack)
      for_groups(p, p.groups, true, [&](int r, int g) { tile.pairs[r][g] = values[r * all + g]; });
  } else {
    if constexpr (kExact) {
      for (int b = 0; b < p.blocks; ++b)
        for (int g = 0; g < p.groups; ++g) search_columns<T>(a, p, b, g, tile.search, tile.columns[b][g]);
    } else {
      a.depth_last ? sum_along_rows<T, kMasked>(a, p, whole, tile) : sum_along_columns<T, kMasked>(a, p, whole, tile);
      __syncthreads();
      for_columns([&](int b, int g, uint8_t*) { best_columns(&tile.keys[b][g * m], m, tile.columns[b][g]); });
      __syncthreads();
    }
    if constexpr (kPacks<op>)
      for_columns([&](int b, int g, uint8_t* out) {
        for (int k = 0; k < 4; ++k) out[k] = tile.columns[b][g][k];
      });
  }
  __syncthreads();

  if constexpr (op == PackVnmOp::kMask || op == PackVnmOp::kUnpack) {
    for_columns([&](int b, int g, const uint8_t*) {
      for (int i = 0; i < m; ++i) tile.slots[b][g * m + i] = kNoSlot;
      for (int k = 0; k < 4; ++k) tile.slots[b][g * m + tile.columns[b][g][k]] = uint8_t(k);
    });
  }
  if constexpr (op != PackVnmOp::kUnpack) {
    for_groups(p, p.groups, a.depth_last, [&](int r, int g) {
      Bits x[4];
      uint32_t allowed = 0;
      S24_UNROLL
      for (int k = 0; k < 4; ++k) {
        const int64_t at = p.first + r * p.row_step + (g * m + tile.columns[r / v][g][k]) * p.column_step;
        x[k] = static_cast<const Bits*>(a.dense)[at];
        if constexpr (kMasked) allowed |= uint32_t(a.mask[at]) << (8 * k);
      }
      Pair<Bits> pair;
      tile.nibbles[r][g] =
          uint8_t(encode<kTwoOfFour<op>, T>(Group<T>::of(x), allowed, tile.nibbles[r][g], Draw<0>(), pair));
      tile.pairs[r][g] = pair;
    });
  }
  __syncthreads();

  if constexpr (op == PackVnmOp::kMask || op == PackVnmOp::kUnpack) {
    spread<op, T>(a, p, whole, tile);
  } else {
    for_groups(p, p.groups, true, [&](int r, int g) { values[r * all + g] = tile.pairs[r][g]; });
    if constexpr (kPacks<op>) {
      for_groups(p, own_bytes, true, [&](int r, int byte) {
        const uint32_t high = 2 * byte + 1 < p.groups ? tile.nibbles[r][2 * byte + 1] : kEmptyNibble;
        metadata[r * bytes + byte] = uint8_t(tile.nibbles[r][2 * byte] | high << 4);
      });
    }
  }
}

template <class T>
cudaError_t launch(const PackVnmArgs& a, cudaStream_t stream) {
  const int64_t tiles = a.outer * ceil_div(a.rows, vnm_unit_rows(a)) * ceil_div(a.depth / a.m, tile_groups(a.m));
  const bool lines = !a.depth_last || (a.depth % kAccess == 0 && tile_groups(a.m) * a.m % kAccess == 0);
  const bool whole = lines && aligned(a.dense, 16) && aligned(a.mask, kAccess);
  const auto run = [&](auto kernel) { return start(kernel, dim3(unsigned(tiles)), kThreads, 0, stream, a, whole); };
  switch (a.op) {
    case PackVnmOp::kMask: return a.exact ? run(vnm<PackVnmOp::kMask, true, T>) : run(vnm<PackVnmOp::kMask, false, T>);
    case PackVnmOp::kPack: return a.exact ? run(vnm<PackVnmOp::kPack, true, T>) : run(vnm<PackVnmOp::kPack, false, T>);
    case PackVnmOp::kPackMasked: return run(vnm<PackVnmOp::kPackMasked, false, T>);
    case PackVnmOp::kGather: return run(vnm<PackVnmOp::kGather, false, T>);
    case PackVnmOp::kUnpack: return run(vnm<PackVnmOp::kUnpack, false, T>);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

template <>
cudaError_t run(const PackVnmArgs& a, cudaStream_t stream) {
  if (a.outer * a.rows * (a.depth / a.m) == 0) return cudaSuccess;
  if (fits_pack_vnm_tiles(a)) return launch_pack_vnm_tiles(a, stream);
  return for_dtype(a.dtype, [&](auto type) { return launch<decltype(type)>(a, stream); });
}

}  // namespace cuda
}  // namespace s24
