// The kernels that are compiled once per instruction set, behind a table of function pointers.
//
// A kernel gets a range of work units. Any split of the units over threads gives the same bits.
#pragma once
#include "../call/arguments.h"

namespace s24 {

// Units of GroupwiseArgs and PruneCheckArgs are groups, and those of TileArgs are rows of tiles.

constexpr int64_t kPackGroups = 128;       // A unit of packing has so many groups when the group axis is contiguous.
constexpr int64_t kPackTileGroups = 32;    // Otherwise a unit is a tile of this many groups
constexpr int64_t kPackTileLanes = 1024;   // times this many neighbours along inner.

inline int64_t pack_units(const Groups& g) {
  if (g.inner == 1) return g.outer * ceil_div(g.len / 4, kPackGroups);
  return g.outer * ceil_div(g.inner, kPackTileLanes) * ceil_div(g.len / 4, kPackTileGroups);
}

constexpr int64_t kVnmGroups = 16;  // A unit of V:N:M packing has this many groups of columns
constexpr int64_t kVnmLeast = 128;  // of V rows, or of at least so many if rows are contiguous.

inline int64_t vnm_unit_rows(const PackVnmArgs& a) { return a.depth_last || a.v > kVnmLeast ? a.v : kVnmLeast; }

inline int64_t vnm_units(const PackVnmArgs& a) {
  return a.outer * ceil_div(a.rows, vnm_unit_rows(a)) * ceil_div(a.depth / a.m, kVnmGroups);
}

constexpr int64_t kMatmulRows = 384, kMatmulCols = 512;  // The largest block of a product's result.
constexpr size_t kMatmulScratch = 2 << 20;

struct MatmulBlock {
  int64_t row0, row1, col0, col1;
};

constexpr int64_t kVnmMatmulRows = 2048;  // The most rows of a block, whose first row starts a block of V.
constexpr int64_t kVnmMatmulDepth = 2048;  // of a panel; sums over more of them wait in the cache, those of fewer rows
constexpr int64_t kVnmMatmulCols = 64;

// values (R, 2N/M) of A(R, K) B(N, K)^T at the entries that metadata and columns name, in blocks of V rows x M columns.
struct SampledArgs {
  Dtype dtype;
  const void *a, *b;
  void* values;
  const uint8_t *metadata, *columns;
  int64_t rows, depth, cols;  // R, K, N
  int64_t v, m;
};

constexpr int64_t kSampledRows = 64;  // The most rows of a task, which all belong to one block of V.
constexpr int64_t kSampledGroups = 128;

// Every kernel once: X(name, parameters). Tables, declarations and their contents are made of this list.
//
// Kernels of products get one block of the result and kMatmulScratch bytes of scratch, aligned to 64.
#define S24_KERNELS(X)                                                                                                     \
  X(select, (const GroupwiseArgs&, int64_t begin, int64_t end))                                                             \
  X(soft, (const GroupwiseArgs&, int64_t begin, int64_t end))                                                               \
  X(mvue, (const GroupwiseArgs&, int64_t begin, int64_t end))                                                               \
  X(transposable, (const TileArgs&, int64_t begin, int64_t end))                                                            \
  X(packed24, (const PackArgs&, int64_t begin, int64_t end))                                                                \
  X(packed_vnm, (const PackVnmArgs&, int64_t begin, int64_t end))                                                           \
  X(matmul, (const MatmulArgs&, const MatmulBlock&, void* scratch))                                                         \
  X(matmul_vnm, (const MatmulVnmArgs&, const MatmulBlock&, void* scratch))                                                  \
  X(sampled, (const SampledArgs&, int64_t row0, int64_t row1, int64_t group0, int64_t group1, void* scratch))               \
  X(prune_check, (const PruneCheckArgs&, int64_t begin, int64_t end))

// The kernels of one instruction set.
struct Kernels {
  const char* isa;
#define S24_MEMBER(name, parameters) void(*name) parameters;
  S24_KERNELS(S24_MEMBER)
#undef S24_MEMBER
};

}  // namespace s24
