// The product of a 2:4 matrix and a dense one on Hopper in bfloat16, and an elementwise operation on what it gives: the squared
// ReLU, or the gradient of the input of an activation, see core/slope.h.
//
// Operands: P (R, K), compressed as cuSPARSELt has it here: values, and behind them metadata in its order; D (N, K); for the
// gradient what the activation saved (N, R). Result: out (N, R) = max(D P^T, 0)^2, or dY1 of what was saved and of dY2 = D P^T;
// the product is rounded to bfloat16 before, so that the bits are those of two passes.
// Steps: one thread of a block copies stages of 64 of the contracted axis by boxes; two blocks of a cluster, above each other,
// each copy half of D for both. Two warpgroups multiply 64 x 256 each, and leave what they get, rounded, in chunks of 32 columns.
// The three warps beside the copying thread finish these, which is the epilogue, and write whole lines, while the next tile is
// multiplied; what was saved they read one part ahead. Blocks stay for several tiles.
// Constraints: R is a multiple of 64, K of 128, and none is zero.
//
// What else was tried is in experiments/benchmarks/results/probe/nvidia-h200_fused_2026-11-25.md and, for the slope, in
// nvidia-h200_slope_2026-11-28.md beside it.
#include "compressed.cuh"
#include "slope.h"

namespace s24 {
namespace cuda {
namespace {

constexpr int kChunkCols = 32, kRowsAtOnce = 8;  // of a 16-byte access

// The tile of a cluster: that of its blocks, above each other.
struct Shape {
  static constexpr int kBlocks = 2, kGroups = 2, kStages = 4, kChunks = 7;
  static constexpr int kBlockRows = 64 * kGroups, kRows = kBlocks * kBlockRows, kCols = kWgmmaCols;
  static constexpr int kFinishing = 3, kThreads = 128 * (1 + kGroups);  // warps
  static constexpr int kParts = 2;  // of a chunk, each of which a warp finishes
};

struct Stages {
  alignas(1024) uint16_t dense[Shape::kStages][Shape::kCols * kStageDepth];
  uint16_t values[Shape::kStages][Shape::kBlockRows * kStageDepth / 2];
  uint16_t chunks[Shape::kChunks][kChunkCols * Shape::kBlockRows];
  uint8_t metadata[Shape::kStages][Shape::kBlockRows * kStageDepth / 8];
  Barrier full[Shape::kStages], empty[Shape::kStages], written[Shape::kChunks], read[Shape::kChunks];
};
constexpr int kStageBytes = sizeof(Stages::dense[0]) + sizeof(Stages::values[0]) + sizeof(Stages::metadata[0]);

struct Operands {
  CUtensorMap values, metadata, dense;
};

struct Product {
  const uint16_t* saved;  // null for squares
  uint16_t* out;
  int rows, cols, stages;  // of the depth, an even number
  Tiles<Shape> tiles;
  int clusters;
};

__device__ __forceinline__ void copy_tiles(const Operands& from, const Product& p, int block, Stages& shared) {
  constexpr int kOwnCols = Shape::kCols / Shape::kBlocks;
  StagePlace<Shape::kStages> place;
  for (int tile = blockIdx.x / Shape::kBlocks; tile < p.tiles.count(); tile += p.clusters) {
    int64_t row, column;
    p.tiles.at(tile, &row, &column);
    row += block * Shape::kBlockRows, column += block * kOwnCols;
    for (int k = 0; k < p.stages; ++k, place.advance()) {
      const int stage = place.stage;
      Barrier* const full = &shared.full[stage];
      wait_barrier(&shared.empty[stage], place.round ^ 1);
      arrive_expecting(full, kStageBytes);
      copy_box_for_all<Shape::kBlocks>(shared.dense[stage] + block * kOwnCols * kStageDepth, &from.dense, k * kStageDepth,
                                       int(column), full);
      copy_box(shared.values[stage], &from.values, k * (kStageDepth / 2), int(row), full);
      copy_box(shared.metadata[stage], &from.metadata, k * 128, int(row) / 64, full);
    }
  }
}

// Where the eight rows number `unit` of a column of a chunk lie: eight accesses to one column, or to eight columns, fall on all
// banks.
__device__ __forceinline__ unsigned chunk_at(unsigned column, unsigned unit) {
  return column * Shape::kBlockRows + (unit ^ column % 8) * kRowsAtOnce;
}

// Warpgroup `group` multiplies rows 64 * group and on of the block.
__device__ __forceinline__ void multiply_tiles(const Product& p, int group, Stages& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const StageOperands<Shape, Stages> operands(shared, group, swizzled_rows<2 * kStageDepth>(shared.dense[0]));
  StagePlace<Shape::kStages> place;
  StagePlace<Shape::kChunks> chunk;
  for (int tile = blockIdx.x / Shape::kBlocks; tile < p.tiles.count(); tile += p.clusters) {
    float acc[kWgmmaCols / 8][4];
    multiply_stages<BF16, Shape, false>(acc, operands, p.stages, shared, place);
    S24_UNROLL
    for (int c = 0; c < kWgmmaCols / kChunkCols; ++c, chunk.advance()) {
      wait_barrier(&shared.read[chunk.stage], chunk.round ^ 1);
      const int column = lane / 16 * 8 + lane % 8, unit = group * 8 + warp * 2 + lane / 8 % 2;
      S24_UNROLL
      for (int n = 0; n < kChunkCols / 8; n += 2) {
        uint32_t rounded[4];
        S24_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* const two = acc[c * (kChunkCols / 8) + n + i / 2] + i % 2 * 2;
          rounded[i] = rounded_pair<BF16>(two[0], two[1]);
        }
        store_matrices_transposed(shared.chunks[chunk.stage] + chunk_at(column + n * 8, unit), rounded);
      }
      __syncwarp();
      if (lane == 0) arrive(&shared.written[chunk.stage]);
    }
  }
}

// What a lane has of a part: eight rows of every second one of 16 columns.
constexpr int kPartCols = kChunkCols / Shape::kParts, kPartsOfTile = kWgmmaCols / kPartCols, kOwn = kPartCols / 2;
using Rows = Vector<uint32_t, 4>;

// What a product is finished with, of what was saved.
template <Pointwise op>
__device__ __forceinline__ uint32_t factors(uint32_t saved) {
  return op == Pointwise::kSlopeOfSquaredRelu ? slopes_of_squares(saved) : saved;
}

template <Pointwise op>
__device__ __forceinline__ uint32_t finished(uint32_t product, uint32_t factors) {
  return op == Pointwise::kSquaredRelu   ? squared_relu_pair<BF16>(product)
         : op == Pointwise::kSlopeOfRelu ? activation_gradients<BF16, Slope::kRelu>(factors, product)
                                         : normal_gradients(factors, product);
}

// Whether dY2 has a number so small that its product with a slope could be subnormal. Only where there are zeros they are told
// apart from such numbers.
__device__ __forceinline__ bool has_small(const Rows (&dy2)[kOwn]) {
  uint32_t least = 0x7f807f80u, small = 0;
  S24_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) least = smaller_magnitudes(least, dy2[i].at[j]);
  }
  if (!small_or_zero(least)) return false;
  S24_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) small |= small_numbers(dy2[i].at[j]);
  }
  return small != 0;
}

// A warp finishes a part at a time. What was saved for the next one is on its way meanwhile.
template <Pointwise op>
__device__ __forceinline__ void finish_tiles(const Product& p, int block, int warp, Stages& shared) {
  constexpr bool kReads = op != Pointwise::kSquaredRelu;
  const unsigned lane = threadIdx.x % 32, unit = lane % 16, own = lane / 16;
  const int first = blockIdx.x / Shape::kBlocks;
  const int parts = first < p.tiles.count() ? ((p.tiles.count() - first - 1) / p.clusters + 1) * kPartsOfTile : 0;
  const int64_t apart = 2 * int64_t(p.rows);
  // Where the lane's rows of a part begin, and how many columns of the part, from its own on, are there.
  struct Place {
    int64_t at;
    int cols;
  };
  int tile = -1;
  int64_t row, column;
  const auto place_of = [&](int part) {
    if (tile != part / kPartsOfTile) {
      tile = part / kPartsOfTile;
      p.tiles.at(first + tile * p.clusters, &row, &column);
      row += block * Shape::kBlockRows + unit * kRowsAtOnce, column += own;
    }
    const int64_t there = column + part % kPartsOfTile * kPartCols;
    return Place{there * p.rows + row, row < p.rows ? int(p.cols - there) : 0};
  };
  Rows saved[kOwn] = {};
  const auto read_saved = [&](const Place& from) {
    const uint16_t* at = p.saved + from.at;
    S24_UNROLL
    for (int i = 0; i < kOwn; ++i, at += apart)
      if (2 * i < from.cols) saved[i] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(at));
  };
  Place next = {};
  if (warp < parts) next = place_of(warp);
  if (kReads) read_saved(next);
#pragma unroll 1
  for (int part = warp; part < parts; part += Shape::kFinishing) {
    const Place place = next;
    next = part + Shape::kFinishing < parts ? place_of(part + Shape::kFinishing) : Place{};
    Rows factor[kOwn], rows[kOwn];
    S24_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      S24_UNROLL
      for (int j = 0; j < 4; ++j) factor[i].at[j] = factors<op>(saved[i].at[j]);
    }
    if (kReads) read_saved(next);
    const int number = part / Shape::kParts, chunk = number % Shape::kChunks;
    uint16_t* const from = shared.chunks[chunk] + part % Shape::kParts * kPartCols * Shape::kBlockRows;
    const auto at = [&](int i) { return reinterpret_cast<uint32_t*>(from + chunk_at(own + 2 * i, unit)); };
    wait_barrier(&shared.written[chunk], number / Shape::kChunks % 2);
    S24_UNROLL
    for (int i = 0; i < kOwn; ++i) rows[i] = load<uint32_t, 4>(at(i));
    const bool small = op == Pointwise::kSlopeOfSquaredRelu && has_small(rows);
    if (small) {  // seldom, and so in few instructions
#pragma unroll 1
      for (int i = 0; i < kOwn && 2 * i < place.cols; ++i) {
        const int64_t there = place.at + i * apart;
        const Rows y2 = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(p.saved + there));
        Rows dy2 = load<uint32_t, 4>(at(i));
        S24_UNROLL
        for (int j = 0; j < 4; ++j) dy2.at[j] = activation_gradients<BF16, Slope::kSquaredRelu>(y2.at[j], dy2.at[j]);
        store(reinterpret_cast<uint32_t*>(p.out + there), dy2);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&shared.read[chunk]);
    uint16_t* to = p.out + place.at;
    S24_UNROLL
    for (int i = 0; i < kOwn; ++i, to += apart) {
      S24_UNROLL
      for (int j = 0; j < 4; ++j) rows[i].at[j] = finished<op>(rows[i].at[j], factor[i].at[j]);
      if (2 * i < place.cols && !small) store(reinterpret_cast<uint32_t*>(to), rows[i]);
    }
  }
}

template <Pointwise op>
__device__ __forceinline__ void multiply_and_finish(const Operands& from, const Product& p) {
  auto& shared = *reinterpret_cast<Stages*>(launched_memory());
  const int block = block_of_cluster(), group = threadIdx.x / 128, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      init_barrier(&shared.full[i], 1);
      init_barrier(&shared.empty[i], Shape::kBlocks * Shape::kGroups);
    }
    for (int i = 0; i < Shape::kChunks; ++i) {
      init_barrier(&shared.written[i], 4 * Shape::kGroups);
      init_barrier(&shared.read[i], Shape::kParts);
    }
    publish_barriers();
  }
  sync_cluster();
  if (group > 0)
    multiply_tiles(p, group - 1, shared);
  else if (warp > 0)
    finish_tiles<op>(p, block, warp - 1, shared);
  else if (threadIdx.x == 0)
    copy_tiles(from, p, block, shared);
  __syncwarp();
  sync_cluster();  // nobody leaves while the other block may still signal it
}

// So many threads have 168 registers each, of which the slope of squared ReLU needs nearly all.
template <Pointwise op>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    matmul_pointwise(const __grid_constant__ Operands operands, const __grid_constant__ Product product) {
  if constexpr (kWithWgmma)
    multiply_and_finish<op>(operands, product);
  else
    __trap();  // has_matmul_pointwise says so
}

template <Pointwise op>
cudaError_t launch(const MatmulPointwiseArgs& a, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Stages);
  static_assert(kBytes <= 227 * 1024, "what a block can have");
  static_assert(sizeof(Stages::values[0]) % 1024 == 0 && sizeof(Stages::dense[0]) % 1024 == 0, "swizzled boxes");
  Operands from;
  cudaError_t e = describe_compressed(a.compressed, a.rows, a.depth, Shape::kBlockRows, &from.values, &from.metadata);
  if (e == cudaSuccess)
    e = describe({CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.dense, a.depth, a.cols, 2 * a.depth, kStageDepth,
                  Shape::kCols / Shape::kBlocks, CU_TENSOR_MAP_SWIZZLE_128B},
                 &from.dense);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(matmul_pointwise<op>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  int clusters = 0;
  if (e == cudaSuccess) e = clusters_here<matmul_pointwise<op>>(Shape::kBlocks, Shape::kThreads, kBytes, &clusters);
  if (e != cudaSuccess) return e;
  const Tiles<Shape> tiles = {int(ceil_div(a.rows, Shape::kRows)), int(ceil_div(a.cols, Shape::kCols)), 8};
  clusters = min(clusters, tiles.count());
  const Product product = {static_cast<const uint16_t*>(a.saved), static_cast<uint16_t*>(a.out), int(a.rows), int(a.cols),
                           int(a.depth / kStageDepth), tiles, clusters};
  return start_clusters(matmul_pointwise<op>, clusters, Shape::kBlocks, Shape::kThreads, kBytes, stream, from, product);
}

}  // namespace

bool has_matmul_pointwise() { return runs_on_sm90(matmul_pointwise<Pointwise::kSquaredRelu>); }

template <>
cudaError_t run(const MatmulPointwiseArgs& a, cudaStream_t stream) {
  switch (a.op) {
    case Pointwise::kSquaredRelu: return launch<Pointwise::kSquaredRelu>(a, stream);
    case Pointwise::kSlopeOfRelu: return launch<Pointwise::kSlopeOfRelu>(a, stream);
    default: return launch<Pointwise::kSlopeOfSquaredRelu>(a, stream);
  }
}

}  // namespace cuda
}  // namespace s24
