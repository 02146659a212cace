// Transposable 2:4 masks: the best of the 90 patterns of a 4x4 tile that have two kept per row and per column.
//
// A pattern is (p0, p1, p2, p3): for each row one of the six column pairs in the order of pair_columns. Patterns are numbered
// in lexicographic order; the first one with the largest score wins.
#pragma once
#include "arguments.h"
#include "select.h"

namespace s24 {

constexpr int kTilePatterns = 90;

// Column pairs (0,1) (0,2) (0,3) (1,2) (1,3) (2,3) as masks of columns.
constexpr uint32_t pair_columns(int p) {
  return p == 0 ? 0x3u : p == 1 ? 0x5u : p == 2 ? 0x9u : p == 3 ? 0x6u : p == 4 ? 0xau : 0xcu;
}

struct TilePattern {
  int p[4];
  uint32_t mask;  // bit 4 * row + column
};

struct TileTable {
  TilePattern at[kTilePatterns];
  int count;
};

// Column counts are added up in fields of four bits: a valid pattern has 2 in each.
constexpr uint32_t spread_columns(uint32_t m) {
  return (m & 1u) | ((m & 2u) << 3) | ((m & 4u) << 6) | ((m & 8u) << 9);
}

constexpr TileTable make_tile_table() {
  TileTable t{};
  for (int code = 0; code < 6 * 6 * 6 * 6; ++code) {
    const int p[4] = {code / 216, code / 36 % 6, code / 6 % 6, code % 6};
    uint32_t columns = 0, mask = 0;
    for (int r = 0; r < 4; ++r) {
      const uint32_t m = pair_columns(p[r]);
      columns += spread_columns(m);
      mask |= m << (4 * r);
    }
    if (columns != 0x2222u) continue;
    for (int r = 0; r < 4; ++r) t.at[t.count].p[r] = p[r];
    t.at[t.count].mask = mask;
    ++t.count;
  }
  return t;
}

constexpr TileTable kTiles = make_tile_table();
static_assert(kTiles.count == kTilePatterns, "a 4x4 tile has 90 transposable patterns");

// Scores are |w| times a power of two that is common to the tile, so that their sums, which are ordered like those of |w|, can
// neither overflow nor vanish. In a tile with entries that are not finite only these count, NaN more than infinity.
S24_HD void tile_scores(const uint32_t w[16], float b[16]) {
  uint32_t top = 0, a[16];
  S24_UNROLL
  for (int i = 0; i < 16; ++i) {
    a[i] = w[i] & kF32Magnitude;
    top = max_u32(top, a[i]);
  }
  const uint32_t finite = mask_if<uint32_t>(top < kF32Inf);
  S24_UNROLL
  for (int i = 0; i < 16; ++i) {
    const float scaled = scaled_magnitude(a[i], top);
    const float special = blend(mask_if<uint32_t>(a[i] > kF32Inf), 256.0f, 16.0f);
    b[i] = blend(finite, scaled, keep_if(mask_if<uint32_t>(a[i] >= kF32Inf), special));
  }
}

// The best of the patterns [kFirst, kFirst + kCount). Halves are compared as a tree, so that comparisons do not wait for each
// other; the second half wins only if it is better. It is a template and no loop, so that every index is a constant and the
// lanes of a caller's loop stay vectors.
template <int kFirst, int kCount>
struct TileSearch {
  static S24_HD void run(const float top[36], const float bottom[36], float& best, uint32_t& mask) {
    float other;
    uint32_t other_mask;
    TileSearch<kFirst, kCount / 2>::run(top, bottom, best, mask);
    TileSearch<kFirst + kCount / 2, kCount - kCount / 2>::run(top, bottom, other, other_mask);
    const uint32_t better = mask_if<uint32_t>(other > best);
    mask = blend(better, other_mask, mask);
    best = blend(better, other, best);
  }
};

template <int kFirst>
struct TileSearch<kFirst, 1> {
  static S24_HD void run(const float top[36], const float bottom[36], float& best, uint32_t& mask) {
    constexpr TilePattern t = kTiles.at[kFirst];
    best = top[6 * t.p[0] + t.p[1]] + bottom[6 * t.p[2] + t.p[3]];
    mask = t.mask;
  }
};

// The sums of the six pairs of columns in two rows each: the halves of a pattern's score.
S24_HD void tile_halves(const float b[16], float top[36], float bottom[36]) {
  float s[4][6];
  S24_UNROLL
  for (int r = 0; r < 4; ++r) {
    const float* v = b + 4 * r;
    s[r][0] = v[0] + v[1];
    s[r][1] = v[0] + v[2];
    s[r][2] = v[0] + v[3];
    s[r][3] = v[1] + v[2];
    s[r][4] = v[1] + v[3];
    s[r][5] = v[2] + v[3];
  }
  S24_UNROLL
  for (int i = 0; i < 6; ++i) {
    S24_UNROLL
    for (int j = 0; j < 6; ++j) {
      top[6 * i + j] = s[0][i] + s[1][j];
      bottom[6 * i + j] = s[2][i] + s[3][j];
    }
  }
}

// The winner's mask of 16 bits for a tile given as float32 bits, row by row.
S24_HD uint32_t best_tile_mask(const uint32_t w[16]) {
  float b[16], top[36], bottom[36], best;
  uint32_t mask;
  tile_scores(w, b);
  tile_halves(b, top, bottom);
  TileSearch<0, kTilePatterns>::run(top, bottom, best, mask);
  return mask;
}

// Two of four along one axis of the tile, then two of four of the result along the other.
template <class T, bool kColumnsFirst>
S24_HD void double_prune_tile(typename T::Bits w[16]) {
  S24_UNROLL
  for (int pass = 0; pass < 2; ++pass) {
    const bool down = (pass == 0) == kColumnsFirst;  // groups run down a column
    const int step = down ? 4 : 1, next = down ? 1 : 4;
    S24_UNROLL
    for (int i = 0; i < 4; ++i) {
      typename T::Bits x[4], y[4];
      S24_UNROLL
      for (int j = 0; j < 4; ++j) x[j] = w[i * next + j * step];
      prune24<T>(x, y);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) w[i * next + j * step] = y[j];
    }
  }
}

enum class TileOp : int32_t { kTransposableMask, kPruneColumnsFirst, kPruneRowsFirst };

// Tiles of 4x4 of w (rows, cols) -> an array of the same shape, of bytes for kTransposableMask.
struct TileArgs {
  TileOp op;
  Dtype dtype;
  const void* w;
  void* out;
  int64_t rows, cols;
};

}  // namespace s24
