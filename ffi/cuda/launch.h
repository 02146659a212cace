// Launches of the kernels, as handlers see them. This header needs neither XLA nor the CUDA language.
//
// Arguments are in device memory. Launches never wait, allocate or copy to the host, so they can be captured into a graph.
#pragma once
#include <cuda_runtime_api.h>

#include "../core/packed24.h"
#include "../core/packed_vnm.h"
#include "../core/sampled.h"
#include "../core/saved.h"

namespace s24 {
namespace cuda {

// A kernel is the specialisation of `run` for its arguments. Kernels with several arguments, and steps of one, are below.
template <class Args>
cudaError_t run(const Args& args, cudaStream_t stream);

enum class Activation : int32_t { kSilu, kGelu };

// Computes z = act(gate) up or, if dz is given, dgate and dup. gate and up are (rows, cols), or (cols, rows) if transposed; dz
// has a flag of its own; results are (rows, cols).
struct GatedArgs {
  Dtype dtype;
  Activation activation;
  bool transposed, dz_transposed;
  const void *gate, *up, *dz;
  void *z, *dgate, *dup;
  int64_t rows, cols;
};

// Estimates of the results of a pass, dgate and dup or dY1 alone, packed along rows by op (kMvueExact, kMvueSequential). Each
// has a key of its own.
struct PackedResults {
  PackOp op;
  void* values[2];
  uint8_t* metadata[2];
  Draws draws[2];
};

// Saved activations are 16-bit floats in whole tiles: tokens a multiple of kSavedTokens, features of 8.
constexpr int64_t kSavedTokens = 128;
constexpr int64_t kSavedLimit = int64_t{8} << 32;  // of elements: eights of features are counted in 32 bits

// Packs Y2 (tokens, features) along features (kPlain, kSquaredRelu) and counts the kept non-zeros of each feature in every
// kSavedTokens tokens: counts (tokens / kSavedTokens, features). `args` describes the matrix flattened to one row.
cudaError_t launch_pack_counted(const PackArgs& args, int64_t features, uint8_t* counts, cudaStream_t stream);

// Writes the places of the n highest of `count` scores, in ascending order; of equal scores the first ones. Scores are from 0
// to 2^bits - 1, and others count as the nearest of these.
cudaError_t launch_features(const int32_t* scores, int32_t* places, int64_t count, int64_t n, int bits, cudaStream_t stream);

// Packs V:N:M activations (tokens, features), which are packed along features, to the same pattern along tokens. Tokens of a
// group are neighbours or, if strided, an M-th of all tokens apart. Features stay in place or, if collected, features i, i + M,
// i + 2M, ... are moved next to each other.
struct RepackArgs {
  Dtype dtype;
  bool strided, collected;
  int64_t tokens, features, v, m;
  const void* values;
  const uint8_t* metadata;
  const uint8_t* columns;
  void* along_values;
  uint8_t* along_metadata;
  uint8_t* along_columns;
};

// Whether launch_repack_vnm takes the call: 16-bit floats in whole tiles of sizes that are powers of two.
bool fits_repack_vnm(const RepackArgs& args);
cudaError_t launch_repack_vnm(const RepackArgs& args, cudaStream_t stream);

// dY1 (rows, cols) of what an activation saved and of dY2, see core/slope.h, and its estimate packed along rows. Elements have 16
// bits; rows is a multiple of kSavedTokens, at most kMostTiles of these, and cols of 8.
struct SlopeArgs {
  Dtype dtype;
  Slope slope;
  const void *saved, *dy2;
  void* dy1;
  int64_t rows, cols;
  PackedResults packed;
};
constexpr int64_t kMostTiles = 65535;

// Products by our kernels for Hopper, of a matrix (rows, depth) that is compressed for cuSPARSELt: of which rows and depth are multiples,
// and the most that each size may be.
constexpr int64_t kHopperRows = 64, kHopperDepth = 128, kHopperMost = 1 << 30;

// A product and an elementwise operation on it, in bfloat16: out (cols, rows) of D P^T, of P (rows, depth) that is compressed for
// cuSPARSELt, with metadata behind it, and D (cols, depth). Squares are max(D P^T, 0)^2; slopes take what an activation saved,
// (cols, rows), and D P^T for dY2, see core/slope.h. None of the sizes is zero.
enum class Pointwise : int32_t { kSquaredRelu, kSlopeOfRelu, kSlopeOfSquaredRelu };
struct MatmulPointwiseArgs {
  Pointwise op;
  const void *compressed, *dense, *saved;  // saved: null for squares
  void* out;
  int64_t rows, depth, cols;
};
// Whether this device has the kernel.
bool has_matmul_pointwise();

// A product of 16-bit floats: out (cols, rows), or (rows, cols) unless rows_last, of P (rows, depth), compressed as above, and D (depth,
// cols), or (cols, depth) if dense_k_last, and a bias (rows). strided: D's rows are taken as `pack24_strided` takes those of P's matrix,
// of D (depth, cols). None of the sizes is zero.
struct MatmulCompressed24Args {
  Dtype dtype;
  const void *compressed, *dense, *bias;  // bias: null if there is none
  void *out, *workspace;
  int64_t rows, depth, cols;
  bool dense_k_last, rows_last, strided;
};
constexpr int64_t kMatmulCompressed24Cols = 8;  // of which cols is a multiple
// The most clusters of blocks, and the bytes of the workspace, which depend on it.
constexpr int kMatmulCompressed24Clusters = 72;
constexpr int64_t kMatmulCompressed24Workspace = int64_t(2 * kMatmulCompressed24Clusters) * 4 * (1 + 16 * (1 + 16 * 256));
// Whether this device has the kernel.
bool has_matmul_compressed24();

// What the kernel of SampledArgs takes: 16-bit floats, sizes of which these are divisors, and so many elements of b.
constexpr int64_t kSampledV = 64, kSampledDepth = 64, kSampledGroups = 32, kSampledMost = (int64_t(1) << 32) - 1;
// Whether this device has the kernel.
bool has_sampled();

// One pass if all falls into whole tiles.
cudaError_t launch_gated_pack(const GatedArgs& args, const PackedResults& packed, cudaStream_t stream);

// kSquaredRelu of one array along its rows and its columns; one pass if both fall into whole tiles.
cudaError_t launch_squared_relu_both(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream);
// kMasked of one array along its rows and its columns, by one mask: given, or the best transposable one, which is written
// to `mask`, where rows and columns have theirs; one pass as above.
cudaError_t launch_pack_masked_both(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream);
cudaError_t launch_transposable_pack(const PackArgs& rows, const PackArgs& columns, uint8_t* mask, cudaStream_t stream);

// 16-bit floats in whole tiles of sizes that are powers of two: whether launch_pack_vnm_tiles takes the call.
bool fits_pack_vnm_tiles(const PackVnmArgs& args);
cudaError_t launch_pack_vnm_tiles(const PackVnmArgs& args, cudaStream_t stream);
// kPack along the last axis of such an array, of max(x, 0)^2.
cudaError_t launch_squared_relu_vnm(const PackVnmArgs& args, cudaStream_t stream);

// To a multiple of how many rows the current device's cuSPARSELt pads metadata.
int64_t metadata_rows();
// The metadata of a packed (rows, depth) matrix, whose values have one byte or two, in the library's order.
cudaError_t launch_metadata(const uint8_t* metadata, uint8_t* out, int64_t rows, int64_t depth, int64_t value_bytes,
                            cudaStream_t stream);

// Of what was packed, where the arguments say so.
inline cudaError_t append_metadata(const PackArgs& a, cudaStream_t stream) {
  return a.behind == nullptr ? cudaSuccess : launch_metadata(a.metadata, a.behind, a.rows, a.depth, 2, stream);
}

}  // namespace cuda
}  // namespace s24
