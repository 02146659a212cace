// A tile of groups that lie across rows: the packed form is the transpose, which passes through shared memory, so that both
// sides are read and written in 16-byte pieces of whole lines.
#pragma once
#include "pack_groups.cuh"

namespace s24 {
namespace cuda {

constexpr int kTileGroups = 32;   // along the group axis: 128 rows
constexpr int kTileVectors = 8;   // of 16 bytes along inner: whole lines of 128 bytes
static_assert(kTileGroups * kTileVectors == kThreads, "a thread takes one group of one vector");

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
  static __device__ __forceinline__ int place(int i, int group) {
    return i * kTileGroups + (group ^ (i / kLanes << 2));
  }

  // The metadata of all groups, from every thread the nibbles of its lanes.
  __device__ __forceinline__ void gather_nibbles(uint32_t own) {
    // The four threads of a warp that share a vector hold four consecutive groups: 16 bits of each packed row.
    uint32_t four[4];
    const int lane = threadIdx.x % 32, vector = lane % kTileVectors;
    S24_UNROLL
    for (int k = 0; k < 4; ++k) four[k] = __shfl_sync(0xffffffffu, own, vector + k * kTileVectors);
    S24_UNROLL
    for (int n = 0; n < kLanes / 4; ++n) {
      const int l = lane / kTileVectors * (kLanes / 4) + n;
      uint32_t bits = 0;
      S24_UNROLL
      for (int k = 0; k < 4; ++k) bits |= (four[k] >> (4 * l) & 15) << (4 * k);
      reinterpret_cast<uint16_t*>(nibbles + vector * kLanes + l)[threadIdx.x / 32] = uint16_t(bits);
    }
  }

  // values: of the tile's first packed row and group; len: groups along the axis, times four.
  __device__ __forceinline__ void store_pairs(Bits* values, int64_t len, int rows) const {
    for (int c = threadIdx.x; c < rows * kChunks; c += kThreads) {
      const int i = c / kChunks, first = c % kChunks * kPairs;
      store(reinterpret_cast<Pair<Bits>*>(values + i * len / 2) + first,
            *reinterpret_cast<const Vector<Pair<Bits>, kPairs>*>(pairs + place(i, first)));
    }
  }

  __device__ __forceinline__ void store_nibbles(uint8_t* metadata, int64_t len, int rows) const {
    if (int(threadIdx.x) < rows) store(metadata + threadIdx.x * len / 8, nibbles[threadIdx.x]);
  }
};

}  // namespace cuda
}  // namespace s24
