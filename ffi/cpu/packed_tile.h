// Packing along an axis that is not the last one is a transpose. A tile of groups x lanes of it stays in the first-level
// cache, so that memory is read and written in whole cache lines.
#pragma once
#include "lanes.h"
#include "vectors.h"

namespace s24 {
namespace S24_ISA {

// Where a unit of pack_units lies if the group axis is not the last one.
struct PackTile {
  int64_t outer, q0, q1, i0, n;
};

// Work unit -> tile.
S24_HD PackTile pack_tile(const Groups& g, int64_t unit) {
  const int64_t groups = g.len / 4, lane_blocks = ceil_div(g.inner, kPackTileLanes);
  const int64_t group_blocks = ceil_div(groups, kPackTileGroups);
  PackTile t;
  // Neighbours along inner come first: they continue the same rows of the dense array.
  t.q0 = unit / lane_blocks % group_blocks * kPackTileGroups;
  t.q1 = t.q0 + kPackTileGroups < groups ? t.q0 + kPackTileGroups : groups;
  t.i0 = unit % lane_blocks * kPackTileLanes;
  t.n = g.inner - t.i0 < kPackTileLanes ? g.inner - t.i0 : kPackTileLanes;
  t.outer = unit / lane_blocks / group_blocks;
  return t;
}

static_assert(kPackTileLanes == kLanes && kPackTileGroups == 16 && kPackGroups % kLanes == 0, "unit sizes");

// Asks for the cache lines of group k of tile t, in an array of elements of `size` bytes (for writing: kWrite). Rows are
// far apart, which hardware prefetchers do not follow.
template <bool kWrite>
S24_HD void prefetch_group(const void* dense, int64_t size, const Groups& g, const PackTile& t, int64_t k) {
  const int64_t row = (t.outer * (g.len / 4) + t.q0 + k) * 4;
  for (int j = 0; j < 4; ++j) {
    const char* p = static_cast<const char*>(dense) + ((row + j) * g.inner + t.i0) * size;
    for (int64_t b = 0; b < t.n * size; b += 64) __builtin_prefetch(p + b, kWrite);
  }
}

// The packed form of one tile, twice: rows of lanes, as kernels compute it, and one line per lane, as memory holds it.
template <class B>
struct PackedTile {
  static constexpr int kWords = kPackTileGroups * 2 * sizeof(B) / 4;
  alignas(64) uint32_t rows[kWords][kLanes];
  alignas(64) uint32_t lines[kLanes][kWords];
  alignas(64) uint32_t nibbles[2][kLanes];  // 16 groups, four bits each

  S24_HD void put(int64_t k, const B pairs[2][kLanes], const uint8_t nibble[kLanes]) {
    for (int l = 0; l < kLanes; ++l) {
      if (sizeof(B) == 2) {
        rows[k][l] = uint32_t(pairs[0][l]) | uint32_t(pairs[1][l]) << 16;
      } else {
        rows[2 * k][l] = pairs[0][l];
        rows[2 * k + 1][l] = pairs[1][l];
      }
    }
    const int shift = int(4 * (k % 8));
    for (int l = 0; l < kLanes; ++l) nibbles[k / 8][l] |= uint32_t(nibble[l]) << shift;
  }
  S24_HD void get(int64_t k, B pairs[2][kLanes]) const {
    for (int l = 0; l < kLanes; ++l) {
      if (sizeof(B) == 2) {
        pairs[0][l] = B(rows[k][l]);
        pairs[1][l] = B(rows[k][l] >> 16);
      } else {
        pairs[0][l] = B(rows[2 * k][l]);
        pairs[1][l] = B(rows[2 * k + 1][l]);
      }
    }
  }
  S24_HD void get_nibbles(int64_t k, uint8_t nibble[kLanes]) const {
    const int shift = int(4 * (k % 8));
    for (int l = 0; l < kLanes; ++l) nibble[l] = uint8_t((nibbles[k / 8][l] >> shift) & 0xf);
  }

  void rows_to_lines() {
    for (int w = 0; w < kWords; w += kWidth)
      for (int l = 0; l < kLanes; l += kWidth) transpose(&rows[w][l], kLanes, &lines[l][w], kWords);
  }
  void lines_to_rows() {
    for (int w = 0; w < kWords; w += kWidth)
      for (int l = 0; l < kLanes; l += kWidth) transpose(&lines[l][w], kWords, &rows[w][l], kLanes);
  }

  // Between lines and memory: `count` groups of n lanes; steps are elements and bytes from lane to lane.
  void store_values(B* v, int64_t step, int64_t n, int64_t count) const {
    if (count == kPackTileGroups) {
      for (int64_t l = 0; l < n; ++l) __builtin_memcpy(v + l * step, lines[l], sizeof lines[l]);
    } else {
      for (int64_t l = 0; l < n; ++l) __builtin_memcpy(v + l * step, lines[l], size_t(count) * 2 * sizeof(B));
    }
  }
  void load_values(const B* v, int64_t step, int64_t n, int64_t count) {
    if (count == kPackTileGroups) {
      for (int64_t l = 0; l < n; ++l) __builtin_memcpy(lines[l], v + l * step, sizeof lines[l]);
    } else {
      for (int64_t l = 0; l < n; ++l) __builtin_memcpy(lines[l], v + l * step, size_t(count) * 2 * sizeof(B));
    }
  }
  void store_metadata(uint8_t* m, int64_t step, int64_t n, int64_t count) const {
    for (int64_t l = 0; l < n; ++l) {
      const uint32_t words[2] = {nibbles[0][l], nibbles[1][l]};
      if (count == kPackTileGroups) {
        __builtin_memcpy(m + l * step, words, sizeof words);
      } else {
        __builtin_memcpy(m + l * step, words, size_t(ceil_div(count, 2)));
      }
    }
  }
  void load_metadata(const uint8_t* m, int64_t step, int64_t n, int64_t count) {
    for (int64_t l = 0; l < n; ++l) {
      uint32_t words[2] = {0, 0};
      if (count == kPackTileGroups) {
        __builtin_memcpy(words, m + l * step, sizeof words);
      } else {
        __builtin_memcpy(words, m + l * step, size_t(ceil_div(count, 2)));
      }
      nibbles[0][l] = words[0];
      nibbles[1][l] = words[1];
    }
  }
};

}  // namespace S24_ISA
}  // namespace s24
