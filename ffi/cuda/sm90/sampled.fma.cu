// The product of two dense matrices at the entries of a V:N:M matrix on Hopper, in bfloat16 and float16.
//
// Operands: A (R, K), B (N, K); metadata and columns of a matrix (R, N). Result: values of A B^T at its entries.
// Steps: a block of V rows needs four of every M rows of B. Some warps of a block only copy: rows of A, and the rows of B that
// its rows keep, gathered. Warpgroups multiply 64 x 256 each by wgmma. Of four sums, which two neighbouring lanes hold for two
// rows, each of them then takes two of one row, and writes 16 bytes of its values. Blocks stay for several tiles.
// Constraints: V is a multiple of 64, K of 64, N / M of 32.
//
// Level 2 of the cache delivers each gathered row of B once for every tile's rows of A, which binds where V is 64.
#include "../simt/select.h"
#include "clusters.cuh"
#include "wgmma_sp.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kStageDepth = 64, kWgmmaDepth = 16;  // of a stage, of an instruction

// A block's tile, of columns that are kept; stages in flight.
template <int kRows_, int kCols_, int kStages_>
struct Shape {
  static constexpr int kRows = kRows_, kCols = kCols_, kStages = kStages_;
  static constexpr int kTilesDown = kRows / 64, kTilesAcross = kCols / kWgmmaCols;  // of a warpgroup
  static constexpr int kMultiplying = 4 * kTilesDown * kTilesAcross;                // warps
  static constexpr int kCopying = 4, kThreads = 32 * (kMultiplying + kCopying);
};
using Tall = Shape<128, 256, 4>;
using Wide = Shape<64, 512, 3>;

template <class S>
struct Stages {
  alignas(1024) uint16_t b[S::kStages][S::kCols * kStageDepth];
  uint16_t a[S::kStages][S::kRows * kStageDepth];
  Barrier full[S::kStages], empty[S::kStages];
};

// A thread copies 16 bytes of every row number kAtOnce.
template <class S>
__device__ __forceinline__ void copy_tiles(const SampledArgs& args, const Tiles<S>& tiles, int blocks, Stages<S>& shared) {
  constexpr int kAtOnce = 4 * S::kCopying, kOwn = S::kCols / kAtOnce;
  const int thread = threadIdx.x - 32 * S::kMultiplying, access = thread % 8, line = thread / 8;
  const int place = line * kStageDepth + (access ^ line % 8) * 8, stages = int(args.depth) / kStageDepth;
  const auto* const b = static_cast<const uint16_t*>(args.b) + access * 8;
  const uint32_t m = uint32_t(args.m), depth = uint32_t(args.depth);
  const int kept = int(args.cols / args.m) * 4;
  StagePlace<S::kStages> at;
  for (int tile = blockIdx.x; tile < tiles.count(); tile += blocks) {
    int64_t row, column;
    tiles.at(tile, &row, &column);
    const uint8_t* const columns = args.columns + row / args.v * kept;
    const auto* const a = static_cast<const uint16_t*>(args.a) + (row + line) * args.depth + access * 8;
    uint32_t from[kOwn];  // rows of B, in elements
    S24_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t own = uint32_t(min(int(column) + line + i * kAtOnce, kept - 1));
      from[i] = (own / 4 * m + min_u32(__ldg(columns + own), m - 1)) * depth;
    }
    for (int k = 0; k < stages; ++k, at.advance()) {
      wait_barrier(&shared.empty[at.stage], at.round ^ 1);
      uint16_t* const to_a = shared.a[at.stage] + place;
      uint16_t* const to_b = shared.b[at.stage] + place;
      S24_UNROLL
      for (int i = 0; i < S::kRows / kAtOnce; ++i)
        copy_async<16>(to_a + i * kAtOnce * kStageDepth, a + i * kAtOnce * args.depth + k * kStageDepth, true);
      S24_UNROLL
      for (int i = 0; i < kOwn; ++i)
        if (int(column) + i * kAtOnce < kept)
          copy_async<16>(to_b + i * kAtOnce * kStageDepth, b + from[i] + k * kStageDepth, true);
      arrive_with_copies(&shared.full[at.stage]);
    }
  }
  commit_copies();
  wait_copies<0>();
}

// Writes values of 16 rows, of groups from `group` on, of the sums that a warp has. What lanes exchange is rounded.
template <class T>
__device__ __forceinline__ void write_values(const SampledArgs& args, int64_t row, int group,
                                             const float (&acc)[kWgmmaCols / 8][4]) {
  constexpr int kPart = int(kSampledGroups);
  const int lane = threadIdx.x % 32, groups = int(args.cols / args.m);
  const bool odd = lane % 2 == 1, second = lane % 4 / 2 == 1;
  row += lane / 4 + (odd ? 8 : 0);
  const uint8_t* const metadata = args.metadata + (row * groups + group) / 2;
  uint32_t* const values = static_cast<uint32_t*>(args.values) + row * groups + group + (second ? 4 : 0);
  S24_UNROLL
  for (int part = 0; part < kWgmmaCols / 4; part += kPart) {
    if (group + part >= groups) return;
    S24_UNROLL
    for (int i = part; i < part + kPart; i += 8) {  // groups i, i + 2, ...; every second pair of lanes has those between
      const uint32_t nibbles = *reinterpret_cast<const uint32_t*>(metadata + i / 2) >> (second ? 4 : 0);
      uint32_t two[4];
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float* const sums = acc[i / 2 + j];
        const uint32_t upper = rounded_pair<T>(sums[0], sums[1]), lower = rounded_pair<T>(sums[2], sums[3]);
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? upper : lower, 1), nibble = nibbles >> (8 * j);
        two[j] = take_two(odd ? Words{got, lower} : Words{upper, got}, nibble & 3u, nibble >> 2 & 3u);
      }
      const uint32_t got0 = __shfl_xor_sync(0xffffffffu, second ? two[0] : two[2], 2);
      const uint32_t got1 = __shfl_xor_sync(0xffffffffu, second ? two[1] : two[3], 2);
      using Four = Vector<uint32_t, 4>;
      store(values + i, second ? Four{{got0, two[2], got1, two[3]}} : Four{{two[0], got0, two[1], got1}});
    }
  }
}

// A warpgroup multiplies 64 x 256.
template <class S, class T>
__device__ __forceinline__ void multiply_tiles(const SampledArgs& args, const Tiles<S>& tiles, int blocks, Stages<S>& shared) {
  const int group = threadIdx.x / 128, down = group % S::kTilesDown, across = group / S::kTilesDown;
  constexpr int kNextA = sizeof(Stages<S>::a[0]) / 16, kNextB = sizeof(Stages<S>::b[0]) / 16;  // stage
  const uint64_t a = swizzled_rows<2 * kStageDepth>(shared.a[0] + down * 64 * kStageDepth);
  const uint64_t b = swizzled_rows<2 * kStageDepth>(shared.b[0] + across * kWgmmaCols * kStageDepth);
  StagePlace<S::kStages> place;
  const auto give_back = [&](int stage) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.empty[stage]);
  };
  for (int tile = blockIdx.x; tile < tiles.count(); tile += blocks) {
    float acc[kWgmmaCols / 8][4];
#pragma unroll 1
    for (int k = 0; k < int(args.depth) / kStageDepth; ++k, place.advance()) {
      wait_barrier(&shared.full[place.stage], place.round);
      publish_copies();
      begin_wgmma();
      S24_UNROLL
      for (int i = 0; i < kStageDepth / kWgmmaDepth; ++i) {
        const int step = i * kWgmmaDepth * 2 / 16;
        const uint64_t from_a = a + uint64_t(place.stage * kNextA + step), from_b = b + uint64_t(place.stage * kNextB + step);
        wgmma_rows<T>(acc, from_a, from_b, k > 0 || i > 0);
      }
      commit_wgmma();
      wait_wgmma<0>();
      give_back(place.stage);
    }
    int64_t row, column;
    tiles.at(tile, &row, &column);
    row += down * 64 + threadIdx.x % 128 / 32 * 16, column += across * kWgmmaCols;
    write_values<T>(args, row, int(column / 4), acc);
  }
}

template <class S, class T>
__device__ __forceinline__ void multiply_sampled(const SampledArgs& args, const Tiles<S>& tiles, int blocks) {
  auto& shared = *reinterpret_cast<Stages<S>*>(launched_memory());
  begin_stages<S>(shared);
  if (threadIdx.x >= 32 * S::kMultiplying)
    copy_tiles(args, tiles, blocks, shared);
  else
    multiply_tiles<S, T>(args, tiles, blocks, shared);
}

template <class S, class T>
__global__ void __launch_bounds__(S::kThreads, 1) matmul_sampled(SampledArgs args, Tiles<S> tiles, int blocks) {
  if constexpr (kWithWgmma)
    multiply_sampled<S, T>(args, tiles, blocks);
  else
    __trap();  // has_sampled says so
}

template <class S, class T>
cudaError_t launch_sampled(const SampledArgs& args, cudaStream_t stream) {
  const auto kernel = matmul_sampled<S, T>;
  constexpr int kBytes = sizeof(Stages<S>);
  static_assert(kBytes <= 227 * 1024, "what a block can have");
  int multiprocessors = 0;
  cudaError_t e = count_multiprocessors(&multiprocessors);
  if (e == cudaSuccess) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  const Tiles<S> tiles = {int(args.rows / S::kRows), int(ceil_div(args.cols / args.m * 4, S::kCols)), 1};
  const int blocks = min(tiles.count(), multiprocessors);
  return start(kernel, dim3(unsigned(blocks)), S::kThreads, kBytes, stream, args, tiles, blocks);
}

}  // namespace

bool has_sampled() { return runs_on_sm90(matmul_sampled<Wide, BF16>); }

template <>
cudaError_t run(const SampledArgs& args, cudaStream_t stream) {
  return for_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    return args.v % Tall::kRows == 0 ? launch_sampled<Tall, T>(args, stream) : launch_sampled<Wide, T>(args, stream);
  });
}

}  // namespace cuda
}  // namespace s24
