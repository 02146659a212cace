// The product of a V:2:M matrix and a dense one on Hopper, in bfloat16 and float16.
//
// Operands: as in ../matmul_vnm.fma.cu; args.product.depth is that of P as it is stored.
// Steps: some warps of a block only copy: the rows of D that a block of V rows keeps, gathered, and P. Warpgroups multiply what
// has arrived by wgmma.sp. Stages in shared memory pass between them by two barriers each, one for full and one for empty.
// Blocks stay for several tiles, so that the copies of the next tile begin while the last one is written.
// Constraints: V is a multiple of 64; all operands fall into whole accesses.
//
// More bytes in flight alone gain little on an H100. Few barriers do, warps that only copy, and fewer bytes: 64 rows share P with
// 512 columns where this fills the device, and blocks that run at a time share the rows of D in level 2 of the cache, for 128
// rows also P with four tiles side by side.
#include "clusters.cuh"
#include "wgmma_sp.cuh"

namespace s24 {
namespace cuda {
namespace {

// A block's tile; stages of a pair of steps, 64 gathered rows, in flight; blocks of a multiprocessor; how many tiles side by
// side follow each other.
template <int kRows_, int kCols_, int kStages_, int kBlocks_, int kSideBySide_>
struct Shape {
  static constexpr int kRows = kRows_, kCols = kCols_, kStages = kStages_, kBlocks = kBlocks_, kSideBySide = kSideBySide_;
  static constexpr int kTilesDown = kRows / 64, kTilesAcross = kCols / kWgmmaCols;  // of a warpgroup
  static constexpr int kMultiplying = 4 * kTilesDown * kTilesAcross;                // warps
  static constexpr int kCopying = kMultiplying / 2, kThreads = 32 * (kMultiplying + kCopying);
};
using Tall = Shape<128, 256, 5, 1, 4>;
using Wide = Shape<64, 512, 3, 1, 1>;
using Narrow = Shape<64, 256, 3, 2, 1>;

template <class S>
struct Stages {
  alignas(1024) uint16_t dense[S::kStages][S::kTilesAcross][2][kGatheredRows * kWgmmaCols];
  uint16_t values[S::kStages][S::kRows * kPairRow];
  uint8_t metadata[S::kStages][S::kRows * 8];
  Barrier full[S::kStages], empty[S::kStages];
};

// A warp copies its own of a stage's gathered rows, lanes taking the columns, and its share of P.
template <class S>
__device__ __forceinline__ void copy_tiles(const MatmulVnmArgs& args, const Tiles<S>& tiles, int blocks, Stages<S>& shared) {
  constexpr int kOwnGroups = 8 / S::kCopying, kLines = 8 * S::kCopying;  // of each step; of P that are copied at once
  const MatmulArgs& a = args.product;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - S::kMultiplying, thread = 32 * warp + lane;
  const int pairs = int(a.depth) / 64, groups = int(a.depth) / 4, line = thread / 4, access = thread % 4;
  const uint32_t line_bytes = uint32_t(a.cols * 2);
  StagePlace<S::kStages> place;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += blocks) {
    int64_t row0, own_col;
    tiles.at(tile, &row0, &own_col);
    own_col += lane * 8;
    const auto* const columns = reinterpret_cast<const uint32_t*>(args.columns + row0 / args.v * a.depth);
    const auto* const dense = reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(a.dense) + own_col);
    const auto* const values = static_cast<const uint16_t*>(a.values) + (row0 + line) * (a.depth / 2) + access * 8;
    const uint8_t* const metadata = a.metadata + (row0 + thread) * (a.depth / 8);
    uint32_t now = 0, next = lane < groups ? __ldg(columns + lane) : 0;  // columns of a group a lane, for two pairs
    for (int pair = 0; pair < pairs; ++pair, place.advance()) {
      if (pair % 2 == 0) {
        now = next;
        next = __ldg(columns + min((pair + 2) * 16 + lane, groups - 1));  // not conditional, or it would wait for what it loads
      }
      const int stage = place.stage;
      wait_barrier(&shared.empty[stage], place.round ^ 1);
      S24_UNROLL
      for (int step = 0; step < 2; ++step) {
        S24_UNROLL
        for (int i = 0; i < kOwnGroups; ++i) {
          const int group = step * 8 + warp * kOwnGroups + i;
          const uint32_t four = __shfl_sync(0xffffffffu, now, pair % 2 * 16 + group);
          S24_UNROLL
          for (int k = 0; k < 4; ++k) {
            const uint32_t row = args.grouping.column(uint32_t(pair * 16 + group), four >> (8 * k) & 0xffu);
            const uint8_t* const from = dense + uint64_t(row) * line_bytes;
            S24_UNROLL
            for (int n = 0; n < S::kTilesAcross; ++n)
              copy_async<16>(shared.dense[stage][n][step] + swizzled((warp * kOwnGroups + i) * 4 + k, lane),
                             from + n * kWgmmaCols * 2, own_col + n * kWgmmaCols < a.cols);
          }
        }
      }
      uint16_t* const to = shared.values[stage] + line * kPairRow + values_access(line, access);
      S24_UNROLL
      for (int i = 0; i < S::kRows / kLines; ++i)
        copy_async<16>(to + i * kLines * kPairRow, values + i * kLines * (a.depth / 2) + pair * kPairRow, true);
      if (thread < S::kRows) copy_async<8>(shared.metadata[stage] + thread * 8, metadata + pair * 8, true);
      arrive_with_copies(&shared.full[stage]);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// A warpgroup computes 64 x 256, a warp 16 x 256 of them.
template <class S, class T>
__device__ __forceinline__ void multiply_tiles(const MatmulVnmArgs& args, const Tiles<S>& tiles, int blocks, Stages<S>& shared) {
  const MatmulArgs& a = args.product;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = int(a.depth) / 64;
  const int warp_row = warp / 4 % S::kTilesDown * 64 + warp % 4 * 16, across = warp / 4 / S::kTilesDown;
  StagePlace<S::kStages> place;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += blocks) {
    float acc[1][kWgmmaCols / 8][4];
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair, place.advance()) {
      const int stage = place.stage;
      wait_barrier(&shared.full[stage], place.round);
      publish_copies();
      const uint32_t words = pair_words(shared.metadata[stage] + warp_row * 8);
      const uint16_t* const kept = shared.values[stage] + (warp_row + lane % 16) * kPairRow;
      uint32_t sparse[2][4];
      S24_UNROLL
      for (int step = 0; step < 2; ++step)
        load_matrices<false>(kept + values_access(lane, 2 * step + lane / 16), sparse[step]);
      begin_wgmma();
      wgmma_sp<T, 0>(acc[0], sparse[0], swizzled_columns<kGatheredRows>(shared.dense[stage][across][0]), words, pair > 0);
      wgmma_sp<T, 1>(acc[0], sparse[1], swizzled_columns<kGatheredRows>(shared.dense[stage][across][1]), words, 1);
      commit_wgmma();
      wait_wgmma<0>();
      hold(sparse[0]), hold(sparse[1]);
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[stage]);
    }
    int64_t row, column;
    tiles.at(tile, &row, &column);
    row += warp_row, column += across * kWgmmaCols;
    a.out_dtype == Dtype::kF32 ? write_tile<F32>(args, row, column, acc) : write_tile<T>(args, row, column, acc);
  }
}

template <class S, class T>
__device__ __forceinline__ void multiply_gathered(const MatmulVnmArgs& args, const Tiles<S>& tiles, int blocks) {
  auto& shared = *reinterpret_cast<Stages<S>*>(launched_memory());
  begin_stages<S>(shared);
  if (threadIdx.x >= 32 * S::kMultiplying)
    copy_tiles(args, tiles, blocks, shared);
  else
    multiply_tiles<S, T>(args, tiles, blocks, shared);
}

template <class S, class T>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) matmul_gathered(MatmulVnmArgs args, Tiles<S> tiles, int blocks) {
  if constexpr (kWithWgmma)
    multiply_gathered<S, T>(args, tiles, blocks);
  else
    __trap();  // has_matmul_vnm_sm90 says so
}

template <class S, class T>
cudaError_t launch_gathered(const MatmulVnmArgs& args, int multiprocessors, cudaStream_t stream) {
  const auto kernel = matmul_gathered<S, T>;
  constexpr int kBytes = sizeof(Stages<S>);
  static_assert(kBytes <= (228 / S::kBlocks - 1) * 1024, "as many blocks as a multiprocessor's memory holds");
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  const Tiles<S> tiles = {int(args.product.rows / S::kRows), int(ceil_div(args.product.cols, S::kCols)), S::kSideBySide};
  const int blocks = min(tiles.count(), multiprocessors * S::kBlocks);
  return start(kernel, dim3(unsigned(blocks)), S::kThreads, kBytes, stream, args, tiles, blocks);
}

}  // namespace

bool has_matmul_vnm_sm90() { return runs_on_sm90(matmul_gathered<Narrow, BF16>); }

cudaError_t launch_matmul_vnm_sm90(const MatmulVnmArgs& args, cudaStream_t stream) {
  int multiprocessors = 0;
  const cudaError_t e = count_multiprocessors(&multiprocessors);
  if (e != cudaSuccess) return e;
  const MatmulArgs& a = args.product;
  const int64_t narrow = a.rows / Narrow::kRows * ceil_div(a.cols, Narrow::kCols);  // tiles
  const bool wide = ceil_div(a.cols, Narrow::kCols) % 2 == 0 && narrow / 2 >= multiprocessors;
  return for_type(a.in, [&](auto type) {
    using T = decltype(type);
    if (args.v % Tall::kRows == 0) return launch_gathered<Tall, T>(args, multiprocessors, stream);
    return wide ? launch_gathered<Wide, T>(args, multiprocessors, stream)
                : launch_gathered<Narrow, T>(args, multiprocessors, stream);
  });
}

}  // namespace cuda
}  // namespace s24
