// Arguments of the kernels that the CPU and CUDA both have.
//
// A kernel sees contiguous memory of its own device. It knows nothing of XLA, of threads or of streams, so this header needs
// neither XLA nor CUDA. Handlers make these structs from checked buffers (the other headers of this folder).
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../core/base.h"

namespace s24 {

S24_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Dtype : int32_t { kF32, kBF16, kF16 };

S24_HD int64_t size_of(Dtype d) { return d == Dtype::kF32 ? 4 : 2; }

// An array seen as (outer, len, inner), with groups of four along len.
struct Groups {
  int64_t outer, len, inner;
  S24_HD int64_t count() const { return outer * (len / 4) * inner; }
};

// The two words of a random key.
struct Key {
  uint32_t k0, k1;
};

enum class GroupwiseOp : int32_t { kMask, kPrune, kSoft, kMvueExact, kMvueSequential };

// Groups of x -> groups of an array of the same shape, of bytes for kMask. Groups are counted in row-major order; a group
// draws the random words of its number.
struct GroupwiseArgs {
  GroupwiseOp op;
  Dtype dtype;
  const void* x;
  void* out;
  Groups groups;
  Key key;
};

// Adds to `found` how many groups of x have more than two non-zeros.
struct PruneCheckArgs {
  int64_t width;  // of an element, in bytes: 4, 2, or 1 for bool
  const void* x;
  int32_t* found;
  Groups groups;
};

enum class TileOp : int32_t { kTransposableMask, kPruneColumnsFirst, kPruneRowsFirst };

// Tiles of 4x4 of w (rows, cols) -> an array of the same shape, of bytes for kTransposableMask.
struct TileArgs {
  TileOp op;
  Dtype dtype;
  const void* w;
  void* out;
  int64_t rows, cols;
};

enum class PackOp : int32_t { kPlain, kMasked, kSquaredRelu, kMvueExact, kMvueSequential, kGather, kUnpack };

// dense (outer, len, inner) <-> values (outer, inner, len/2), metadata (outer, inner, ceil(len/8)). kUnpack writes dense and
// reads both others; kGather reads dense and metadata and writes values; the other operations write values and metadata.
struct PackArgs {
  PackOp op;
  Dtype dtype;
  void* dense;
  const uint8_t* mask;
  void* values;
  uint8_t* metadata;
  Groups groups;
  Key key;
};

enum class PackVnmOp : int32_t { kMask, kPack, kPackMasked, kGather, kUnpack };

// dense (outer, R, K), or (outer, K, R) if not depth_last <-> values (outer, R, 2K/M), metadata (outer, R, ceil(K/2M)),
// columns (outer, R/V, K/M, 4). kMask writes mask, of the shape of dense, and nothing else; kUnpack writes dense; kGather
// reads metadata and columns.
struct PackVnmArgs {
  PackVnmOp op;
  Dtype dtype;
  bool exact, depth_last;
  void* dense;
  uint8_t* mask;
  void* values;
  uint8_t* metadata;
  uint8_t* columns;
  int64_t outer, rows, depth, v, m;
};

// out(R, N) = P(R, K) D(K, N), or out^T or D^T as the flags say; P is packed along K.
struct MatmulArgs {
  Dtype in, out_dtype;
  const void* values;
  const uint8_t* metadata;
  const void* dense;
  void* out;
  int64_t rows, depth, cols;  // R, K, N
  bool dense_k_last, out_packed_last;
};

// The same product with P packed in blocks of V rows and M columns.
struct MatmulVnmArgs {
  MatmulArgs product;
  const uint8_t* columns;
  int64_t v, m;
};

}  // namespace s24
