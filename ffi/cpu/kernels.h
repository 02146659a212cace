// The kernels that are compiled once per instruction set, behind a table of function pointers.
//
// Kernels see plain contiguous memory and a range of work units; they know neither XLA nor threads. Any split of the
// units over threads gives the same bits.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../core/base.h"

namespace s24 {

enum class Dtype : int32_t { kF32, kBF16, kF16 };

// An array seen as (outer, len, inner), with groups of four along len.
struct Groups {
  int64_t outer, len, inner;
  S24_HD int64_t count() const { return outer * (len / 4) * inner; }
};

struct Key {
  uint32_t k0, k1;
};

enum class MapOp : int32_t { kMask, kPrune, kSoft, kMvueExact, kMvueSequential };

// x -> an array of the same shape (bytes for kMask). Units are groups, in row-major order; random words belong to the
// unit by its index.
struct MapArgs {
  MapOp op;
  Dtype dtype;
  const void* x;
  void* out;
  Groups groups;
  Key key;
};

enum class TileOp : int32_t { kTransposableMask, kPruneColumnsFirst, kPruneRowsFirst };

// w (rows, cols) -> the same shape, by tiles of 4x4. Units are rows of tiles.
struct TileArgs {
  TileOp op;
  Dtype dtype;
  const void* w;
  void* out;
  int64_t rows, cols;
};

enum class PackOp : int32_t { kPlain, kMasked, kSquaredRelu, kMvueExact, kMvueSequential, kGather, kUnpack };

// dense (outer, len, inner) <-> values (outer, inner, len/2), metadata (outer, inner, ceil(len/8)).
// kUnpack writes dense; kGather reads metadata; the others write metadata. Units: see pack_units.
struct PackArgs {
  PackOp op;
  Dtype dtype;
  void* dense;
  const uint8_t* mask;
  void* values;
  uint8_t* metadata;
  Groups groups;
  Key key;
  bool strided = false;  // members of a group are a quarter of the axis apart; only CUDA's kernels read this
};

constexpr int64_t kPackGroups = 128;       // groups of one unit when the group axis is contiguous
constexpr int64_t kPackTileGroups = 32;    // otherwise a unit is a tile of this many groups
constexpr int64_t kPackTileLanes = 1024;   // times this many neighbours along inner

S24_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

S24_HD int64_t pack_units(const Groups& g) {
  if (g.inner == 1) return g.outer * ceil_div(g.len / 4, kPackGroups);
  return g.outer * ceil_div(g.inner, kPackTileLanes) * ceil_div(g.len / 4, kPackTileGroups);
}

enum class VnmOp : int32_t { kMask, kPack, kPackMasked, kGather, kUnpack };

// dense (outer, R, K), or (outer, K, R) if not depth_last <-> values (outer, R, 2K/M), metadata (outer, R,
// ceil(K/2M)), columns (outer, R/V, K/M, 4). kMask writes mask, of the shape of dense, and nothing else; kUnpack writes
// dense; kGather reads metadata and columns. Units: see vnm_units.
struct VnmArgs {
  VnmOp op;
  Dtype dtype;
  bool exact, depth_last;
  void* dense;
  uint8_t* mask;
  void* values;
  uint8_t* metadata;
  uint8_t* columns;
  int64_t outer, rows, depth, v, m;
};

constexpr int64_t kVnmGroups = 16;  // a unit is this many groups of columns
constexpr int64_t kVnmLeast = 128;  // of V rows, or of at least so many if rows are contiguous

S24_HD int64_t vnm_unit_rows(const VnmArgs& a) { return a.depth_last || a.v > kVnmLeast ? a.v : kVnmLeast; }

S24_HD int64_t vnm_units(const VnmArgs& a) {
  return a.outer * ceil_div(a.rows, vnm_unit_rows(a)) * ceil_div(a.depth / a.m, kVnmGroups);
}

// out(R, N) = P(R, K) D(K, N), or the transposes; P is packed along K.
struct MatmulArgs {
  Dtype in, out_dtype;
  const void* values;
  const uint8_t* metadata;
  const void* dense;
  void* out;
  int64_t rows, depth, cols;  // R, K, N
  bool dense_k_last, out_packed_last;
};

constexpr int64_t kMatmulRows = 384, kMatmulCols = 512;  // of a block, at most
constexpr size_t kMatmulScratch = 2 << 20;

struct MatmulBlock {
  int64_t row0, row1, col0, col1;
};

// The same with P in blocks of V rows x M columns.
struct VnmMatmulArgs {
  MatmulArgs product;
  const uint8_t* columns;
  int64_t v, m;
};

constexpr int64_t kVnmMatmulRows = 2048;  // of a block, at most; its first row starts a block of V
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

constexpr int64_t kSampledRows = 64;  // of a task, at most, all of one block of V
constexpr int64_t kSampledGroups = 128;

struct Kernels {
  const char* isa;
  void (*map)(const MapArgs&, int64_t begin, int64_t end);
  void (*tile)(const TileArgs&, int64_t begin, int64_t end);
  void (*pack)(const PackArgs&, int64_t begin, int64_t end);
  // One block of the output; scratch is kMatmulScratch bytes, aligned to 64.
  void (*matmul)(const MatmulArgs&, const MatmulBlock&, void* scratch);
  void (*vnm)(const VnmArgs&, int64_t begin, int64_t end);
  void (*vnm_matmul)(const VnmMatmulArgs&, const MatmulBlock&, void* scratch);
  void (*sampled)(const SampledArgs&, int64_t row0, int64_t row1, int64_t group0, int64_t group1, void* scratch);
};

}  // namespace s24
