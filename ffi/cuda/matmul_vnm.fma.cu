// The product of a V:2:M matrix and a dense one on sparse tensor cores, in bfloat16 and float16.
//
// Operands: out (R, N) = P (R, K) D (K, N), or out^T; P is packed as values, metadata and columns.
// Steps: it is the 2:4 product of the columns that a block of V rows keeps with the rows of D that belong to them. A block
// gathers these rows on their way into shared memory, multiplies by mma.sp, and stores whole lines; Hopper has a kernel of its
// own.
// Constraints: D is not transposed: its rows are gathered whole, so the caller transposes a D whose contracted axis is
// contiguous. Gathering tiles need V of at least 64 and whole accesses; other calls take the kernel of matmul.cuh.
//
// The rows of one block of threads share their columns, and nothing else shares what they gather: level 2 of the cache
// delivers each line of D once for every V rows. So a block takes as many columns as its registers hold, which also reads P
// less often.
#include "matmul_vnm.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kCols = 256, kStep = kGatheredRows;
constexpr int kAhead = 3, kSlots = kAhead + 1, kPairSlots = 3;  // steps that are copied ahead; of P, pairs of steps
constexpr int kMatrices = 4, kColumnTiles = 8;  // a warp computes 64 x 64: of 16 rows, of 8 columns

template <int kRows>
struct Gathered {
  alignas(1024) uint16_t dense[kSlots][kStep * kCols];
  uint16_t values[kPairSlots][kRows * kPairRow];
  uint8_t metadata[kPairSlots][kRows * 8];
};

// A warp's share of the gather: lanes take the columns, and the warp its own rows of every step.
template <int kRows>
struct Gather {
  static constexpr int kWarps = kRows / 16, kOwn = kStep / kWarps;
  using Bytes = std::conditional_t<kOwn == 8, uint64_t, uint32_t>;

  const uint8_t* columns;
  const uint8_t* dense;
  uint32_t line_bytes;
  Grouping grouping;
  bool inside;
  Bytes next[2] = {};  // of the two steps that are loaded next: what is read here waits behind all that is being copied

  template <int kOfPair>
  __device__ __forceinline__ void prefetch(int step) {
    next[kOfPair] = __ldg(reinterpret_cast<const Bytes*>(columns + step * kStep));
  }

  template <int kOfPair>
  __device__ __forceinline__ void load(uint16_t* slot, int step) const {
    const int first = int(threadIdx.x) / 32 * kOwn;
    const uint32_t group = uint32_t(step * kStep + first) / 4u;
    S24_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t row = grouping.column(group + uint32_t(i) / 4u, uint32_t(next[kOfPair] >> (8 * i)) & 0xffu);
      copy_async<16>(slot + swizzled(first + i, threadIdx.x % 32), dense + uint64_t(row) * line_bytes, inside);
    }
  }
};

template <class T, int kRows>
__global__ void __launch_bounds__(2 * kRows, 128 / kRows) matmul_gathered(MatmulVnmArgs args) {
  const MatmulArgs& a = args.product;  // its depth: of P as it is stored
  auto& shared = *reinterpret_cast<Gathered<kRows>*>(launched_memory());
  const int64_t row0 = int64_t(blockIdx.x) * kRows, col0 = int64_t(blockIdx.y) * kCols;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warp_row = warp / 4 * 64, warp_col = warp % 4 * 64;
  const int steps = int(a.depth) / kStep;

  using G = Gather<kRows>;
  const int64_t own_col = col0 + lane * 8;
  G gather = {args.columns + row0 / args.v * a.depth + warp * G::kOwn,
              reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(a.dense) + own_col),
              uint32_t(a.cols * 2), args.grouping, own_col < a.cols};
  const int row = thread / 4, access = thread % 4;
  const auto* const values = static_cast<const uint16_t*>(a.values) + (row0 + row) * (a.depth / 2) + access * 8;
  const uint8_t* const metadata = a.metadata + (row0 + thread) * (a.depth / 8);

  const auto load_packed = [&](int pair) {
    uint16_t* const to = shared.values[pair % kPairSlots] + row * kPairRow + values_access(row, access);
    S24_UNROLL
    for (int half = 0; half < 2; ++half)
      copy_async<16>(to + half * (kRows / 2) * kPairRow, values + half * (kRows / 2) * (a.depth / 2) + pair * kPairRow, true);
    if (thread < kRows) copy_async<8>(shared.metadata[pair % kPairSlots] + thread * 8, metadata + pair * 8, true);
  };
  const auto load_step = [&](int step, auto of_pair) {
    constexpr int kOfPair = decltype(of_pair)::value;
    if (step < steps) {
      gather.template load<kOfPair>(shared.dense[step % kSlots], step);
      if constexpr (kOfPair == 0) load_packed(step / 2);
      if (step + 2 < steps) gather.template prefetch<kOfPair>(step + 2);
    }
    commit_copies();
  };

  float acc[kMatrices][kColumnTiles][4] = {};
  uint32_t words[kMatrices];
  const auto do_step = [&](int step, auto of_pair) {
    constexpr int kOfPair = decltype(of_pair)::value;
    wait_copies<kAhead - 1>();
    __syncthreads();
    const int pair_slot = step / 2 % kPairSlots;
    uint32_t sparse[kMatrices][4], gathered[2][4];
    S24_UNROLL
    for (int i = 0; i < kMatrices; ++i) {
      if constexpr (kOfPair == 0) words[i] = pair_words(shared.metadata[pair_slot] + (warp_row + 16 * i) * 8);
      load_matrices<false>(shared.values[pair_slot] + (warp_row + 16 * i + lane % 16) * kPairRow +
                               values_access(lane, 2 * kOfPair + lane / 16),
                           sparse[i]);
    }
    const uint16_t* const slot = shared.dense[step % kSlots];
    load_matrices<true>(slot + swizzled(lane, warp_col / 8), gathered[0]);
    S24_UNROLL
    for (int n = 0; n < kColumnTiles; ++n) {
      if (n + 1 < kColumnTiles) load_matrices<true>(slot + swizzled(lane, warp_col / 8 + n + 1), gathered[(n + 1) % 2]);
      S24_UNROLL
      for (int i = 0; i < kMatrices; ++i) mma_sp<T, kOfPair>(acc[i][n], sparse[i], gathered[n % 2], words[i]);
    }
    load_step(step + kAhead, std::integral_constant<int, 1 - kOfPair>());
  };

  constexpr std::integral_constant<int, 0> kFirst = {};
  constexpr std::integral_constant<int, 1> kSecond = {};
  gather.template prefetch<0>(0);
  gather.template prefetch<1>(1);
  load_step(0, kFirst);
  load_step(1, kSecond);
  load_step(2, kFirst);
  for (int step = 0; step < steps; step += 2) {
    do_step(step, kFirst);
    do_step(step + 1, kSecond);
  }
  const int64_t r = row0 + warp_row, c = col0 + warp_col;
  a.out_dtype == Dtype::kF32 ? write_tile<F32>(args, r, c, acc) : write_tile<T>(args, r, c, acc);
}

template <class T, int kRows>
cudaError_t launch_gathered(const MatmulVnmArgs& args, cudaStream_t stream) {
  const auto kernel = matmul_gathered<T, kRows>;
  constexpr int kBytes = sizeof(Gathered<kRows>);
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  const dim3 grid(unsigned(args.product.rows / kRows), blocks_for(args.product.cols, kCols));
  return start(kernel, grid, 2 * kRows, kBytes, stream, args);
}

}  // namespace

template <>
cudaError_t run(const MatmulVnmArgs& args, cudaStream_t stream) {
  if (args.product.in == Dtype::kF32) return launch_matmul_vnm_f32(args, stream);
  MatmulVnmArgs packed = args;
  MatmulArgs& a = packed.product;
  a.depth = a.depth / args.grouping.m * 4;  // of P as it is stored
  if (a.dense_k_last) return cudaErrorInvalidValue;
  const bool whole = whole_accesses(a) && aligned(args.columns, 8);
  if (whole && args.v % 64 == 0 && aligned(a.out, 8) && has_matmul_vnm_sm90()) return launch_matmul_vnm_sm90(packed, stream);
  return for_type(a.in, [&](auto type) {
    using T = decltype(type);
    if (whole && args.v % 64 == 0 && aligned(a.out, 8))
      return args.v % 128 == 0 ? launch_gathered<T, 128>(packed, stream) : launch_gathered<T, 64>(packed, stream);
    const GatheredColumns columns = {args.columns, int(args.v), args.grouping, args.collected};
    if (args.v % 64 == 0) return launch_matmul_sp<T, 64, false, false>(a, columns, stream);
    return whole ? launch_matmul_sp<T, 16, false, true>(a, columns, stream)
                 : launch_matmul_sp<T, 16, false, false>(a, columns, stream);
  });
}

}  // namespace cuda
}  // namespace s24
