// A tile of groups that lie across rows: the packed form is the transpose, which passes through shared memory, so that both
// sides are read and written in 16-byte pieces of whole lines.
#pragma once
#include "simt/transposable_pairs.h"
#include "packed24.cuh"

namespace s24 {
namespace cuda {

constexpr int kTileGroups = 32;   // along the group axis: 128 rows
constexpr int kTileVectors = 8;   // of 16 bytes along inner: whole lines of 128 bytes
static_assert(kTileGroups * kTileVectors == kThreads, "a thread takes one group of one vector");

// What a block takes of a grid with a strip of columns for each x, and tiles of it along the group axis for each y.
struct PlaceInGrid {
  unsigned strip, tiles;
};

// kAcross: how many strips the blocks take that run at the same time. They write long runs of few packed rows. With 0 they are
// numbered as they are launched and write 128 bytes of many packed rows each, for which memory takes longer. Times are in
// experiments/benchmarks/results/probe/nvidia-h200_activation24_2026-11-28.md.
template <unsigned kAcross>
__device__ __forceinline__ PlaceInGrid place_in_grid() {
  if constexpr (kAcross == 0) {
    return {blockIdx.x, blockIdx.y};
  } else {
    const unsigned block = blockIdx.y * gridDim.x + blockIdx.x, first = block / (kAcross * gridDim.y) * kAcross;
    const unsigned across = min(kAcross, gridDim.x - first), rest = block - first * gridDim.y;
    return {first + rest % across, rest / across};
  }
}

// A thread's 16 bytes of the four rows of its groups, as words, which is what registers hold.
using FourRows = Vector<uint32_t, 4>[4];

template <class T>
__device__ __forceinline__ Group<T> group_of(const FourRows& rows, int lane) {
  if constexpr (sizeof(typename T::Bits) == 4) {
    return {{rows[0].at[lane], rows[1].at[lane], rows[2].at[lane], rows[3].at[lane]}};
  } else {
    const uint32_t halves = lane % 2 == 0 ? 0x5410u : 0x7632u;
    return {select_bytes(rows[0].at[lane / 2], rows[1].at[lane / 2], halves),
            select_bytes(rows[2].at[lane / 2], rows[3].at[lane / 2], halves)};
  }
}

// Packs a group by a mask that may not keep two of it. It is not inlined, because such masks are rare.
template <class T>
__device__ __noinline__ PackedGroup pack_by_any_mask(Words group, uint32_t mask) {
  return pack_by_mask<T>(group, mask);
}

// Packs the largest of a group with a NaN. It is not inlined, because such groups are rare.
template <PackOp op, class T>
__device__ __noinline__ PackedGroup pack_with_nan(Words group) {
  return op == PackOp::kSquaredRelu ? pack_squared_relu<T>(group) : pack_largest<T>(group);
}

template <class Bits>
struct Tile {
  static constexpr int kLanes = 16 / int(sizeof(Bits));
  static constexpr int kInner = kTileVectors * kLanes;
  static constexpr int kPairs = 8 / int(sizeof(Bits));   // of 16 bytes
  static constexpr int kChunks = kTileGroups / kPairs;   // of 16 bytes in a packed row
  Pair<Bits> pairs[kInner * kTileGroups];
  Vector<uint8_t, 16> nibbles[kInner];

  // Pairs of one packed row stand together, in an order that spreads the threads of a warp over all banks: blocks of four
  // are swapped by the number of the vector.
  static __device__ __forceinline__ unsigned place(unsigned vector, unsigned lane, unsigned group) {
    return (vector * kLanes + lane) * kTileGroups + (group ^ vector << 2);
  }
  static __device__ __forceinline__ unsigned place(unsigned i, unsigned group) { return place(i / kLanes, i % kLanes, group); }

  // Packs a thread's groups, whose numbers begin with those of `quartet`. with(lane), given(lane): what encode takes. made: the
  // nibbles of four lanes in the low halves of four bytes.
  template <PackOp op, class T, class M, class N>
  __device__ __forceinline__ void put(const FourRows& rows, unsigned vector, unsigned group, const Key& key, int64_t quartet,
                                      M with, N given, uint32_t (&made)[kLanes / 4]) {
    if constexpr (kLargest<op> && sizeof(Bits) == 2) return put_largest<op, T>(rows, vector, group, made);
    QuartetDraw<kDraws<op>> draws[kLanes / 4];
    S24_UNROLL
    for (int n = 0; n < kLanes / 4; ++n) draws[n] = QuartetDraw<kDraws<op>>::of(key, quartet + n);
    S24_UNROLL
    for (int n = 0; n < kLanes / 4; ++n) {
      Pair<Bits> made_pairs[4];
      if constexpr (kChoose<op, T>) {
        Numbers numbers[4];
        S24_UNROLL
        for (int l = 0; l < 4; l += 2) {
          const int word = 2 * n + l / 2;
          const uint32_t words[4] = {rows[0].at[word], rows[1].at[word], rows[2].at[word], rows[3].at[word]};
          numbers_of<T>(words, numbers[l], numbers[l + 1]);
        }
        made[n] = encode_four<T>(numbers, draws[n], [&](int l) { return group_of<T>(rows, 4 * n + l); }, made_pairs);
      } else {
        made[n] = 0;
        S24_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int l = 4 * n + i;
          made[n] |= encode<op, T>(group_of<T>(rows, l), with(l), given(l), draws[n].group[i], made_pairs[i]) << (8 * i);
        }
      }
      S24_UNROLL
      for (int i = 0; i < 4; ++i) pairs[place(vector, 4 * n + i, group)] = made_pairs[i];
    }
  }

  // The same for kPlain and kSquaredRelu of 16-bit floats, two groups at a time.
  template <PackOp op, class T>
  __device__ __forceinline__ void put_largest(const FourRows& rows, unsigned vector, unsigned group, uint32_t (&made)[kLanes / 4]) {
    const auto put_pair = [&](int lane, uint32_t bits) { __builtin_memcpy(&pairs[place(vector, lane, group)], &bits, sizeof bits); };
    uint32_t magnitude = 0;
    S24_UNROLL
    for (int n = 0; n < kLanes / 4; ++n) {
      uint32_t nibbles[2];
      S24_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int word = 2 * n + i;
        uint32_t x[4];
        S24_UNROLL
        for (int j = 0; j < 4; ++j) x[j] = op == PackOp::kSquaredRelu ? squared_relu_pair<T>(rows[j].at[word]) : rows[j].at[word];
        const TwoPacked two = two_largest_of_both<T>(x);
        put_pair(2 * word, two.bits[0]);
        put_pair(2 * word + 1, two.bits[1]);
        nibbles[i] = two.nibbles;
        magnitude = max_halves(magnitude, two.magnitude);
      }
      made[n] = select_bytes(nibbles[0], nibbles[1], 0x6420u);
    }
    if (!has_nan<T>(magnitude)) return;
    S24_UNROLL
    for (int n = 0; n < kLanes / 4; ++n) {
      made[n] = 0;
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        const PackedGroup kept = pack_with_nan<op, T>(group_of<T>(rows, 4 * n + i));
        put_pair(4 * n + i, kept.bits);
        made[n] |= kept.nibble << (8 * i);
      }
    }
  }

  // The same for kMasked of 16-bit floats: mask, bytes of a thread's lanes in the four rows.
  template <class T>
  __device__ __forceinline__ void put_masked(const FourRows& rows, const Vector<uint32_t, kLanes / 4> (&mask)[4], unsigned vector,
                                             unsigned group, uint32_t (&made)[kLanes / 4]) {
    S24_UNROLL
    for (int n = 0; n < kLanes / 4; ++n) {
      uint32_t by[4];
      Words groups[4];
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        by[i] = mask[i].at[n];
        groups[i] = group_of<T>(rows, 4 * n + i);
      }
      FourPairs taken;
      if (by[0] + by[1] + by[2] + by[3] == 0x02020202u) {
        taken = take_pairs(groups, pairs_of_columns(by));
      } else {
        taken.nibbles = 0;
        S24_UNROLL
        for (int i = 0; i < 4; ++i) {
          const PackedGroup kept = pack_by_any_mask<T>(groups[i], byte_of_each(by, i));
          taken.bits[i] = kept.bits;
          taken.nibbles |= kept.nibble << (8 * i);
        }
      }
      made[n] = taken.nibbles;
      S24_UNROLL
      for (int i = 0; i < 4; ++i)
        __builtin_memcpy(&pairs[place(vector, 4 * n + i, group)], &taken.bits[i], sizeof taken.bits[i]);
    }
  }

  // The metadata of all groups, from every thread what `put` has made.
  __device__ __forceinline__ void exchange(const uint32_t (&made)[kLanes / 4]) {
    // The four threads of a warp that share a vector hold four consecutive groups: 16 bits of each packed row. They
    // exchange halves twice, each with its neighbour and then with the next but one.
    const int lane = threadIdx.x % 32, vector = lane % kTileVectors, own = lane / kTileVectors;
    const bool odd = own % 2 != 0;
    const uint32_t kept = odd ? made[kLanes / 4 - 1] : made[0];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? made[0] : made[kLanes / 4 - 1], kTileVectors);
    const uint32_t bytes = odd ? got | kept << 4 : kept | got << 4;
    const uint32_t others = __shfl_xor_sync(0xffffffffu, bytes, 2 * kTileVectors);
    const uint32_t two = select_bytes(bytes, others, own < 2 ? 0x5140u : 0x3726u);
    const auto write = [&](int l, uint32_t bits) {
      reinterpret_cast<uint16_t*>(nibbles + vector * kLanes + l)[threadIdx.x / 32] = uint16_t(bits);
    };
    if constexpr (kLanes == 8) {
      write(own % 2 * 4 + own / 2 * 2, two);
      write(own % 2 * 4 + own / 2 * 2 + 1, two >> 16);
    } else {
      write(own, odd ? two >> 16 : two);
    }
  }

  // work(n, i) for a thread's pieces of 16 bytes: their pairs begin at n from the tile's first packed row and group, and at i of
  // `pairs`. len: elements of a dense row along the group axis; rows: packed ones that exist.
  template <class F>
  static __device__ __forceinline__ void for_pieces(unsigned len, unsigned rows, F work) {
    constexpr unsigned kRows = kThreads / kChunks;  // that are written at a time
    unsigned thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // what follows is computed again: held over a loop over tiles, it is spilled
    const unsigned row = thread / kChunks, first = thread % kChunks * kPairs;
    const uint64_t at = uint64_t(len / 4) * row + first;
    S24_UNROLL
    for (unsigned i = 0; i < kInner; i += kRows)
      if ((row | i) < rows) work(at + uint64_t(len / 4) * i, place(row | i, first));
  }

  __device__ __forceinline__ void store_piece(Pair<Bits>* to, unsigned i) const {
    store(to, *reinterpret_cast<const Vector<Pair<Bits>, kPairs>*>(pairs + i));
  }

  // to: the tile's first packed row and group.
  __device__ __forceinline__ void store_pairs(Pair<Bits>* to, unsigned len, unsigned rows) const {
    for_pieces(len, rows, [&](uint64_t n, unsigned i) { store_piece(to + n, i); });
  }

  __device__ __forceinline__ void store_nibbles(uint8_t* metadata, int64_t len, int rows) const {
    if (int(threadIdx.x) < rows) store(metadata + threadIdx.x * (len / 8), nibbles[threadIdx.x]);
  }
};

}  // namespace cuda
}  // namespace s24
