// The product of a 2:4 matrix and a dense one on Hopper, of 16-bit floats.
//
// Operands: P (R, K), compressed as cuSPARSELt has it here; D, (N, K) or (K, N), of the latter rows are taken in their order or,
// strided, one of every quarter after the other; a bias (R), which is added to the sums, or none. Result: (N, R), or (R, N) as the flag
// says. Where tiles are few, as those of a small weight's gradient are, their sums are divided, and lie in the workspace meanwhile.
// Steps: one thread of a block copies stages of 64 of the contracted axis by boxes; two blocks of a cluster, above each other,
// each copy half of D for both. Two warpgroups multiply 64 x 256 each. Blocks stay for their share of all tiles, see division.h.
// Constraints: R is a multiple of 64, K of 128, N of 8, and none is zero.
//
// What it gains, and what else was tried, is in experiments/benchmarks/results/probe/nvidia-h200_wgrad_2026-11-29.md.
#include "compressed.cuh"
#include "division.h"

namespace s24 {
namespace cuda {
namespace {

constexpr int kChunkCols = 32;

// The tile of a cluster: that of its blocks, above each other.
struct Shape {
  static constexpr int kBlocks = 2, kGroups = 2, kStages = 5;
  static constexpr int kBlockRows = 64 * kGroups, kRows = kBlocks * kBlockRows, kCols = kWgmmaCols;
  static constexpr int kWarps = 4 * kGroups, kThreads = 32 * (kWarps + 1);
};

// Pieces of a block that are there at a time: the one that is being finished, and those that begin in the stages behind it. Every
// piece has at least two stages.
constexpr int kPieces = 1 + (Shape::kStages + 1) / 2;

struct Stages {
  alignas(1024) uint16_t dense[Shape::kStages][Shape::kCols * kStageDepth];
  uint16_t values[Shape::kStages][Shape::kBlockRows * kStageDepth / 2];
  uint16_t chunks[Shape::kWarps][16 * kChunkCols];  // of results
  uint8_t metadata[Shape::kStages][Shape::kBlockRows * kStageDepth / 8];
  Piece pieces[kPieces];
  int now[Shape::kWarps];  // which piece a warp has: registers are all taken
  Barrier full[Shape::kStages], empty[Shape::kStages];
};
constexpr int kStageBytes = sizeof(Stages::dense[0]) + sizeof(Stages::values[0]) + sizeof(Stages::metadata[0]);

// The workspace: a signal of each warp for each place, the order of clusters, then the sums of each place, in the order of warps and
// lanes.
constexpr int kWarpsOfPlace = Shape::kBlocks * Shape::kWarps, kSumsOfWarp = 16 * kWgmmaCols;
constexpr int64_t kPlaces = 2 * kMatmulCompressed24Clusters, kSignals = kPlaces * kWarpsOfPlace, kOrder = kPlaces;
constexpr int64_t kSums = kPlaces * kWarpsOfPlace * kSumsOfWarp;
static_assert(kMatmulCompressed24Workspace == 4 * (kSignals + kOrder + kSums) && (kSignals + kOrder) % 4 == 0, "what handlers ask for");

struct Operands {
  CUtensorMap values, metadata, dense;
};

struct Product {
  const uint16_t* bias;  // null if there is none
  uint16_t* out;
  uint32_t* signals;
  int* order;  // how many clusters have begun, and which number each of them got
  float* sums;
  int rows, cols;
  bool rows_last;
  int rows_of_part;  // of each part of D in a stage
  Tiles<Shape> tiles;
  Division division;
};

// A piece is there with its first stage; behind the last one there is an empty piece.
template <bool kColumns>
__device__ __forceinline__ void copy_tiles(const Operands& from, const Product& p, int cluster, int block, Stages& shared) {
  constexpr int kOwnCols = Shape::kCols / Shape::kBlocks;
  StagePlace<Shape::kStages> place;
  StagePlace<kPieces> number;
  Piece piece = {};
  bool more = true;
  for (int step = 0; more; ++step, number.advance()) {
    more = p.division.piece(cluster, step, &piece);
    if (!more) piece.end = piece.begin;
    wait_barrier(&shared.empty[place.stage], place.round ^ 1);
    shared.pieces[number.stage] = piece;
    if (!more) arrive(&shared.full[place.stage]);
    int64_t row, column;
    p.tiles.at(piece.tile, &row, &column);
    row += block * Shape::kBlockRows, column += block * kOwnCols;
#pragma unroll 1
    for (int k = 2 * piece.begin; k < 2 * piece.end; ++k, place.advance()) {
      const int stage = place.stage;
      Barrier* const full = &shared.full[stage];
      uint16_t* const dense = shared.dense[stage] + block * kOwnCols * kStageDepth;
      wait_barrier(&shared.empty[stage], place.round ^ 1);
      arrive_expecting(full, kStageBytes);
      if (!kColumns) copy_box_for_all<Shape::kBlocks>(dense, &from.dense, k * kStageDepth, int(column), full);
      S24_UNROLL
      for (int c = 0; kColumns && c < kOwnCols; c += kSwizzledCols)
        copy_box_for_all<Shape::kBlocks>(dense + c * kStageDepth, &from.dense, int(column) + c, k * p.rows_of_part, full);
      copy_box(shared.values[stage], &from.values, k * (kStageDepth / 2), int(row), full);
      copy_box(shared.metadata[stage], &from.metadata, k * 2 * kStageDepth, int(row) / 64, full);
    }
  }
}

// Where a lane's sums of a place lie.
__device__ __forceinline__ float* sums_of(const Product& p, int place, int own_warp) {
  return p.sums + (int64_t(place) * kWarpsOfPlace + own_warp) * kSumsOfWarp + threadIdx.x % 32 * 4;
}

// 16 rows and 32 columns of a warp's results, rounded, and written by way of shared memory in accesses of 16 bytes.
template <class T>
__device__ __forceinline__ void write_chunk(const Product& p, const float acc[4][4], uint16_t* chunk, int64_t row, int64_t column) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if (p.rows_last) {
    S24_UNROLL
    for (int n = 0; n < kChunkCols / 8; n += 2) {
      uint32_t rounded[4];
      S24_UNROLL
      for (int i = 0; i < 4; ++i) rounded[i] = rounded_pair<T>(acc[n + i / 2][i % 2 * 2], acc[n + i / 2][i % 2 * 2 + 1]);
      store_matrices_transposed(chunk + (n * 8 + lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8, rounded);
    }
  } else {
    S24_UNROLL
    for (int n = 0; n < kChunkCols / 8; ++n) {
      S24_UNROLL
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint32_t*>(chunk + (lane / 4 + i * 8) * kChunkCols + n * 8 + lane % 4 * 2) =
            rounded_pair<T>(acc[n][i * 2], acc[n][i * 2 + 1]);
    }
  }
  __syncwarp();
  S24_UNROLL
  for (int unit = lane; unit < 64; unit += 32) {  // of eight numbers
    const auto eight = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(chunk + unit * 8));
    const int64_t r = row + (p.rows_last ? unit % 2 * 8 : unit / 4), c = column + (p.rows_last ? unit / 2 : unit % 4 * 8);
    uint16_t* const to = p.out + (p.rows_last ? c * p.rows + r : r * p.cols + c);
    if (r < p.rows && c < p.cols) store(reinterpret_cast<uint32_t*>(to), eight);
  }
}

__device__ __forceinline__ void leave_sums(const Product& p, int place, int own_warp, const float (&acc)[kWgmmaCols / 8][4]) {
  float* const to = sums_of(p, place, own_warp);
  S24_UNROLL
  for (int n = 0; n < kWgmmaCols / 8; ++n) store(to + n * 128, Vector<float, 4>{acc[n][0], acc[n][1], acc[n][2], acc[n][3]});
  send_signal(p.signals + place * kWarpsOfPlace + own_warp);
}

// Adds the sums that others have left, in their order, and the bias, and writes the results.
template <class T>
__device__ __forceinline__ void finish_tile(const Product& p, const Piece& piece, int own_warp, uint16_t* chunk,
                                            float (&acc)[kWgmmaCols / 8][4]) {
#pragma unroll 1
  for (int part = 1; part < p.division.parts(piece); ++part) {
    const int place = p.division.place_of(piece, part);
    wait_signal(p.signals + place * kWarpsOfPlace + own_warp);
    const float* const from = sums_of(p, place, own_warp);
    S24_UNROLL
    for (int n = 0; n < kWgmmaCols / 8; ++n) {
      const auto sums = load<float, 4>(from + n * 128);
      S24_UNROLL
      for (int i = 0; i < 4; ++i) acc[n][i] += sums.at[i];
    }
  }
  int64_t row, column;
  p.tiles.at(piece.tile, &row, &column);
  row += own_warp * 16;  // warps of both blocks are above each other
  if (p.bias != nullptr && row < p.rows) {
    const uint16_t* const own = p.bias + row + threadIdx.x % 32 / 4;
    const float upper = float_of(T::to_f32(own[0])), lower = float_of(T::to_f32(own[8]));
    S24_UNROLL
    for (int n = 0; n < kWgmmaCols / 8; ++n) acc[n][0] += upper, acc[n][1] += upper, acc[n][2] += lower, acc[n][3] += lower;
  }
  S24_UNROLL
  for (int c = 0; c < kWgmmaCols; c += kChunkCols) write_chunk<T>(p, acc + c / 8, chunk, row, column + c);
}

// Warpgroup `group` multiplies rows 64 * group and on of the block.
template <class T, bool kColumns>
__device__ __forceinline__ void multiply_tiles(const Product& p, int block, int group, Stages& shared) {
  const int warp = threadIdx.x / 32, own_warp = block * Shape::kWarps + warp;
  const uint64_t dense = kColumns ? swizzled_columns<kStageDepth>(shared.dense[0]) : swizzled_rows<2 * kStageDepth>(shared.dense[0]);
  const StageOperands<Shape, Stages> operands(shared, group, dense);
  StagePlace<Shape::kStages> place;
  int& now = shared.now[warp] = 0;
  while (true) {
    wait_barrier(&shared.full[place.stage], place.round);
    const Piece& piece = shared.pieces[now];
    if (piece.begin == piece.end) break;
    float acc[kWgmmaCols / 8][4];
    multiply_stages<T, Shape, kColumns>(acc, operands, 2 * (piece.end - piece.begin), shared, place);
    if (piece.place >= 0)
      leave_sums(p, piece.place, own_warp, acc);
    else
      finish_tile<T>(p, piece, own_warp, shared.chunks[warp], acc);
    const int next = (now + 1) % kPieces;
    __syncwarp();
    now = next;
    __syncwarp();
  }
}

// Clusters that share tiles are numbered as they begin: whoever waits for others of lower numbers waits for what runs, also where
// other work keeps some clusters from beginning.
template <class T, bool kColumns>
__device__ __forceinline__ void multiply_all(const Operands& from, const Product& p) {
  auto& shared = *reinterpret_cast<Stages*>(launched_memory());
  const int cluster = int(blockIdx.x) / Shape::kBlocks, block = block_of_cluster(), warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(&shared.full[i], 1);
      init_barrier(&shared.empty[i], Shape::kBlocks * Shape::kGroups);
    }
    publish_barriers();
    if (block == 0 && p.division.is_divided()) p.order[1 + cluster] = atomicAdd(p.order, 1);
  }
  sync_cluster();
  if (warp < Shape::kWarps)
    multiply_tiles<T, kColumns>(p, block, warp / 4, shared);
  else if (threadIdx.x % 32 == 0)
    copy_tiles<kColumns>(from, p, p.division.is_divided() ? p.order[1 + cluster] : cluster, block, shared);
  __syncwarp();
  sync_cluster();  // nobody leaves while the other block may still signal it
}

template <class T, bool kColumns>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matmul_compressed24(const __grid_constant__ Operands operands, const __grid_constant__ Product product) {
  if constexpr (kWithWgmma)
    multiply_all<T, kColumns>(operands, product);
  else
    __trap();  // has_matmul_compressed24 says so
}

template <class T, bool kColumns>
cudaError_t launch(const MatmulCompressed24Args& a, cudaStream_t stream) {
  constexpr auto kKernel = matmul_compressed24<T, kColumns>;
  constexpr int kBytes = sizeof(Stages);
  static_assert(kBytes <= 227 * 1024, "what a block can have");
  static_assert(sizeof(Stages::values[0]) % 1024 == 0 && sizeof(Stages::dense[0]) % 1024 == 0, "swizzled boxes");
  const int parts = a.strided ? 4 : 1;
  const BoxesOf columns = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.dense, a.cols, a.depth, 2 * a.cols, kSwizzledCols, kStageDepth,
                           CU_TENSOR_MAP_SWIZZLE_128B, parts};
  const BoxesOf rows = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.dense, a.depth, a.cols, 2 * a.depth, kStageDepth,
                        Shape::kCols / Shape::kBlocks, CU_TENSOR_MAP_SWIZZLE_128B};
  Operands from;
  cudaError_t e = describe_compressed(a.compressed, a.rows, a.depth, Shape::kBlockRows, &from.values, &from.metadata);
  if (e == cudaSuccess) e = describe(kColumns ? columns : rows, &from.dense);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  int clusters = 0;
  if (e == cudaSuccess) e = clusters_here<kKernel>(Shape::kBlocks, Shape::kThreads, kBytes, &clusters);
  if (e != cudaSuccess) return e;
  clusters = min(clusters, kMatmulCompressed24Clusters);
  const Tiles<Shape> tiles = {int(ceil_div(a.rows, Shape::kRows)), int(ceil_div(a.cols, Shape::kCols)), 8};
  const Division division = divide_tiles(tiles.count(), int(a.depth / (2 * kStageDepth)), clusters);
  auto* const signals = static_cast<uint32_t*>(a.workspace);
  auto* const order = reinterpret_cast<int*>(signals + kSignals);
  if (division.is_divided()) e = cudaMemsetAsync(signals, 0, 4 * (kSignals + kOrder), stream);
  if (e != cudaSuccess) return e;
  const Product product = {static_cast<const uint16_t*>(a.bias), static_cast<uint16_t*>(a.out), signals, order,
                           reinterpret_cast<float*>(order + kOrder), int(a.rows), int(a.cols), a.rows_last, kStageDepth / parts,
                           tiles, division};
  return start_clusters(kKernel, clusters, Shape::kBlocks, Shape::kThreads, kBytes, stream, from, product);
}

}  // namespace

bool has_matmul_compressed24() { return runs_on_sm90(matmul_compressed24<BF16, true>); }

template <>
cudaError_t run(const MatmulCompressed24Args& a, cudaStream_t stream) {
  const bool half = a.dtype == Dtype::kF16;
  if (a.dense_k_last) return half ? launch<F16, false>(a, stream) : launch<BF16, false>(a, stream);
  return half ? launch<F16, true>(a, stream) : launch<BF16, true>(a, stream);
}

}  // namespace cuda
}  // namespace s24
