// How the work of a call is split over threads.
//
// A kernel counts its work in units. Threads claim `grain` of them at a time. What a kernel needs to know of its units is here
// too, so that this header is compiled for every instruction set.
#pragma once
#include "../core/matmul_vnm.h"
#include "../core/packed24.h"
#include "../core/packed_vnm.h"
#include "../core/sampled.h"
#include "../core/saved.h"
#include "../core/transposable.h"
#include "kernels.h"

namespace s24 {

// `units` belong to one array of the batch.
struct Work {
  int64_t units, grain;
};

constexpr int64_t kLeastGroups = 4096;  // of a task, or tiles: they cost much more than to claim them

// Of `arrays` arrays of a batch. Units are groups of four, where nothing else is said.
template <class Args>
S24_HD Work work_of(const Args& a, int64_t, int64_t) {
  return {a.groups.count(), kLeastGroups};
}

// Units are rows of tiles.
S24_HD Work work_of(const TileArgs& a, int64_t, int64_t) {
  return a.cols == 0 ? Work{0, 1} : Work{a.rows / 4, ceil_div(kLeastGroups, a.cols)};
}

// Several tasks for each thread, of `least` to `most` units.
S24_HD int64_t task_of(int64_t units, int64_t threads, int64_t least, int64_t most) {
  const int64_t share = units / (8 * threads);
  return share < least ? least : share > most ? most : share;
}

constexpr int64_t kPackGroups = 128;       // A unit of packing has so many groups when the group axis is contiguous.
constexpr int64_t kPackTileGroups = 32;    // Otherwise a unit is a tile of this many groups
constexpr int64_t kPackTileLanes = 1024;   // times this many neighbours along inner.
constexpr int64_t kMostGroups = 32768;     // of a task: a kernel fetches ahead only within it

S24_HD int64_t pack_units(const Groups& g) {
  if (g.inner == 1) return g.outer * ceil_div(g.len / 4, kPackGroups);
  return g.outer * ceil_div(g.inner, kPackTileLanes) * ceil_div(g.len / 4, kPackTileGroups);
}

S24_HD Work work_of(const PackArgs& a, int64_t arrays, int64_t threads) {
  const int64_t units = pack_units(a.groups);
  const int64_t groups = a.groups.inner == 1 ? kPackGroups : kPackTileGroups * kPackTileLanes;  // of a unit
  return {units, task_of(arrays * units, threads, ceil_div(kLeastGroups, groups), ceil_div(kMostGroups, groups))};
}

constexpr int64_t kSavedLanes = 256;  // A unit is a tile of kPackTileGroups groups of tokens times so many features.

S24_HD Work work_of(const SavedArgs& a, int64_t, int64_t) {
  return {ceil_div(a.features, kSavedLanes) * ceil_div(a.tokens / 4, kPackTileGroups), 1};
}

constexpr int64_t kVnmGroups = 16;  // A unit of V:N:M packing has this many groups of columns
constexpr int64_t kVnmLeast = 128;  // of V rows, or of at least so many if rows are contiguous.
constexpr int64_t kVnmMostUnits = 32;  // of a task: several strips, of which each is fetched while its predecessor is packed

S24_HD int64_t vnm_unit_rows(const PackVnmArgs& a) { return a.depth_last || a.v > kVnmLeast ? a.v : kVnmLeast; }

S24_HD Work work_of(const PackVnmArgs& a, int64_t arrays, int64_t threads) {
  const int64_t units = a.outer * ceil_div(a.rows, vnm_unit_rows(a)) * ceil_div(a.depth / a.m, kVnmGroups);
  return {units, task_of(arrays * units, threads, 1, kVnmMostUnits)};
}

// A unit of a product is a block of its result, and a task is one unit: blocks small enough that every thread has work. The
// result does not depend on them. Blocks that follow each other share columns.
struct Grid {
  int64_t rows, cols;              // of the result
  int64_t block_rows, block_cols;  // of a block, but the last ones

  S24_HD int64_t units() const { return ceil_div(rows, block_rows) * ceil_div(cols, block_cols); }
  S24_HD Block block(int64_t unit) const {
    const int64_t down = ceil_div(rows, block_rows), row = unit % down * block_rows, col = unit / down * block_cols;
    return {row, rows - row < block_rows ? rows : row + block_rows, col, cols - col < block_cols ? cols : col + block_cols};
  }
};

// The largest block of a product's result. It has many rows, since each block fills its panels of D anew.
constexpr int64_t kMatmulRows = 768, kMatmulCols = 256;

// Blocks are of nearly equal size, so that all end together.
S24_HD Grid work_of(const MatmulArgs& a, int64_t arrays, int64_t threads) {
  constexpr int64_t kLeastRows = 48, kLeastCols = 128, kRowStep = 16, kColStep = 64;
  Grid g = {a.rows, a.cols, kMatmulRows, kMatmulCols};
  while (threads > 1 && arrays * g.units() < 4 * threads) {
    if (g.block_rows > kLeastRows && ceil_div(a.rows, g.block_rows) * g.block_rows >= kLeastRows * 2) {
      g.block_rows -= kLeastRows;
    } else if (g.block_cols > kLeastCols) {
      g.block_cols /= 2;
    } else {
      break;
    }
  }
  const int64_t down = ceil_div(a.rows, g.block_rows), across = ceil_div(a.cols, g.block_cols);
  g.block_rows = ceil_div(ceil_div(a.rows, down), kRowStep) * kRowStep;
  g.block_cols = ceil_div(ceil_div(a.cols, across), kColStep) * kColStep;
  return g;
}

constexpr int64_t kVnmMatmulRows = 2048;   // The most rows of a block, whose first row starts a block of V.
constexpr int64_t kVnmMatmulDepth = 2048;  // of a panel; sums over more of them wait in the cache, those of fewer rows
constexpr int64_t kVnmMatmulCols = 64;

// Many rows share a panel.
S24_HD Grid work_of(const MatmulVnmArgs& a, int64_t arrays, int64_t threads) {
  const MatmulArgs& p = a.product;
  const int64_t most = p.depth > kVnmMatmulDepth ? kVnmMatmulRows / 2 : kVnmMatmulRows;
  Grid g = {p.rows, p.cols, most / a.v * a.v, kVnmMatmulCols};
  while (g.block_rows > a.v && arrays * g.units() < 4 * threads) g.block_rows = ceil_div(g.block_rows / a.v, 2) * a.v;
  return g;
}

constexpr int64_t kSampledRows = 64;  // The most rows of a block, which all belong to one block of V.
constexpr int64_t kSampledGroups = 128;

// Columns of the result are groups. Blocks that follow each other need other rows of B, but of the same part of it.
S24_HD Grid work_of(const SampledArgs& a, int64_t, int64_t) {
  return {a.rows, a.cols / a.m, a.v < kSampledRows ? a.v : kSampledRows, kSampledGroups};
}

}  // namespace s24
