// Packing along an axis that is not the last one is a transpose. A tile of groups x lanes of it stays in cache: rows are
// read in runs long enough for the hardware's prefetchers, and packed lines are written in whole cache lines.
#pragma once
#include "../core/packed24.h"
#include "lanes.h"
#include "vectors.h"
#include "work.h"

namespace s24 {
namespace S24_ISA {

// Where a unit of pack_units lies if the group axis is not the last one.
struct PackTile {
  int64_t outer, q0, q1, i0, n;
};

// Work unit -> tile.
template <int64_t kTileLanes = kPackTileLanes>
S24_HD PackTile pack_tile(const Groups& g, int64_t unit) {
  const int64_t groups = g.len / 4, lane_blocks = ceil_div(g.inner, kTileLanes);
  const int64_t group_blocks = ceil_div(groups, kPackTileGroups);
  PackTile t;
  // Neighbours along inner come first: they continue the same rows of the dense array.
  t.q0 = unit / lane_blocks % group_blocks * kPackTileGroups;
  t.q1 = t.q0 + kPackTileGroups < groups ? t.q0 + kPackTileGroups : groups;
  t.i0 = unit % lane_blocks * kTileLanes;
  t.n = g.inner - t.i0 < kTileLanes ? g.inner - t.i0 : kTileLanes;
  t.outer = unit / lane_blocks / group_blocks;
  return t;
}

static_assert(kPackTileLanes % (2 * kWidth) == 0, "unit sizes");

// Arrays of values of at least so many bytes are written past the caches: their lines lie in many rows, which no prefetcher
// follows, and an ordinary store would wait for the line that it overwrites.
constexpr int64_t kStreamBytes = 1 << 20;

// The packed form of one tile as kernels compute it: rows of kTile lanes, given and taken in runs of any length. It is larger
// than many arrays and therefore not initialised; lanes that nobody has put are never stored.
template <class B, int kTile = int(kPackTileLanes), int kGroups = int(kPackTileGroups)>
struct PackedTile {
  static_assert(kGroups % 16 == 0 && kTile % kWidth == 0, "whole lines and vectors");
  static constexpr int kWords = kGroups * 2 * sizeof(B) / 4;
  alignas(64) uint32_t rows[kWords][kTile];
  static constexpr int kNibbleWords = kGroups / 8;
  alignas(64) uint32_t nibbles[kNibbleWords][kTile];  // four bits for each group

  // Group k of the lanes from `first` on.
  template <int kRun>
  S24_HD void put(int64_t k, int64_t first, const B (&pairs)[2][kRun]) {
    if (sizeof(B) == 4) {
      for (int i = 0; i < 2; ++i) __builtin_memcpy(rows[2 * k + i] + first, pairs[i], sizeof pairs[i]);
    } else {
      for (int l = 0; l < kRun; l += 2 * kWidth) {
        HalfVec a, b, words[2];
        __builtin_memcpy(&a, pairs[0] + l, sizeof a);
        __builtin_memcpy(&b, pairs[1] + l, sizeof b);
        interleave_halves(a, b, words);
        __builtin_memcpy(rows[k] + first + l, words, sizeof words);
      }
    }
  }
  template <int kRun>
  S24_HD void get(int64_t k, int64_t first, B (&pairs)[2][kRun]) const {
    if (sizeof(B) == 4) {
      for (int i = 0; i < 2; ++i) __builtin_memcpy(pairs[i], rows[2 * k + i] + first, sizeof pairs[i]);
      return;
    }
    for (int l = 0; l < kRun; ++l) {
      pairs[0][l] = B(rows[k][first + l]);
      pairs[1][l] = B(rows[k][first + l] >> 16);
    }
  }
  // Before the first put_nibbles of a tile of `count` groups.
  S24_HD void clear_nibbles(int64_t count) {
    // The group after the last of an odd number.
    const uint32_t empty = count % 2 ? uint32_t(kEmptyNibble) << (4 * (count % 8)) : 0u;
    for (int h = 0; h < kNibbleWords; ++h)
      for (int l = 0; l < kTile; ++l) nibbles[h][l] = h == count / 8 ? empty : 0u;
  }
  template <class N, int kRun>
  S24_HD void put_nibbles(int64_t k, int64_t first, const N (&nibble)[kRun]) {
    const int shift = int(4 * (k % 8));
    uint32_t* to = nibbles[k / 8] + first;
    S24_LOOP
    for (int l = 0; l < kRun; ++l) to[l] |= uint32_t(nibble[l]) << shift;
  }
  template <class N, int kRun>
  S24_HD void get_nibbles(int64_t k, int64_t first, N (&nibble)[kRun]) const {
    const int shift = int(4 * (k % 8));
    for (int l = 0; l < kRun; ++l) nibble[l] = N((nibbles[k / 8][first + l] >> shift) & 0xf);
  }

  // Between rows and memory, which holds one line per lane: `count` groups of n lanes; steps are elements and bytes from
  // lane to lane; `total` elements are those of the whole array.
  void store_values(B* v, int64_t step, int64_t n, int64_t count, int64_t total) const {
    alignas(64) uint32_t lines[kWidth][kWords];
    const bool lined = (reinterpret_cast<uintptr_t>(v) | size_t(step) * sizeof(B)) % 64 == 0;
    const bool streams = count == kGroups && lined && total * int64_t(sizeof(B)) > kStreamBytes;
    const int64_t words = count * 2 * int64_t(sizeof(B)) / 4;
    for (int64_t first = 0; first < n; first += kWidth) {
      for (int64_t w = 0; w < words; w += kWidth) transpose(&rows[w][first], kTile, &lines[0][w], kWords);
      const int64_t lanes = n - first < kWidth ? n - first : int64_t{kWidth};
      B* to = v + first * step;
      if (streams) {
        for (int64_t l = 0; l < lanes; ++l) stream_words<kWords>(lines[l], to + l * step);
      } else if (count == kGroups) {
        for (int64_t l = 0; l < lanes; ++l) __builtin_memcpy(to + l * step, lines[l], sizeof lines[l]);
      } else {
        for (int64_t l = 0; l < lanes; ++l) __builtin_memcpy(to + l * step, lines[l], size_t(count) * 2 * sizeof(B));
      }
    }
    if (streams) end_streams();
  }
  void load_values(const B* v, int64_t step, int64_t n, int64_t count) {
    alignas(64) uint32_t lines[kWidth][kWords];
    for (int64_t first = 0; first < n; first += kWidth) {
      const int64_t lanes = n - first < kWidth ? n - first : int64_t{kWidth};
      const B* from = v + first * step;
      if (count == kGroups) {
        for (int64_t l = 0; l < lanes; ++l) __builtin_memcpy(lines[l], from + l * step, sizeof lines[l]);
      } else {
        for (int64_t l = 0; l < lanes; ++l) __builtin_memcpy(lines[l], from + l * step, size_t(count) * 2 * sizeof(B));
      }
      for (int w = 0; w < kWords; w += kWidth) transpose(&lines[0][w], kWords, &rows[w][first], kTile);
    }
  }
  void store_metadata(uint8_t* m, int64_t step, int64_t n, int64_t count) const {
    for (int64_t l = 0; l < n; ++l) {
      uint32_t words[kNibbleWords];
      for (int h = 0; h < kNibbleWords; ++h) words[h] = nibbles[h][l];
      if (count == kGroups) {
        __builtin_memcpy(m + l * step, words, sizeof words);
      } else {
        __builtin_memcpy(m + l * step, words, size_t(ceil_div(count, 2)));
      }
    }
  }
  void load_metadata(const uint8_t* m, int64_t step, int64_t n, int64_t count) {
    for (int64_t l = 0; l < n; ++l) {
      uint32_t words[kNibbleWords] = {};
      if (count == kGroups) {
        __builtin_memcpy(words, m + l * step, sizeof words);
      } else {
        __builtin_memcpy(words, m + l * step, size_t(ceil_div(count, 2)));
      }
      for (int h = 0; h < kNibbleWords; ++h) nibbles[h][l] = words[h];
    }
  }
};

}  // namespace S24_ISA
}  // namespace s24
