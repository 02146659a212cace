// The product of a V:2:M matrix and a dense one on sparse tensor cores, in bfloat16 and float16.
//
// Operands: out (R, N) = P (R, K) D (K, N), or out^T; P is packed as values, metadata and columns.
// Steps: it is the 2:4 product of the columns that a block of V rows keeps with the rows of D that belong to them. A block
// gathers these rows on their way into shared memory, multiplies by mma.sp, or on Hopper by wgmma, and stores whole lines.
// Constraints: D is not transposed: its rows are gathered whole, so the caller transposes a D whose contracted axis is
// contiguous. Gathering tiles need V of at least 64 and whole accesses; other calls take the kernel of matmul.cuh.
//
// The rows of one block of threads share their columns, and nothing else shares what they gather: level 2 of the cache
// delivers each line of D once for every V rows. So a block takes as many columns as its registers hold, which also reads P
// less often.
#include "matmul.cuh"
#include "sm90/wgmma_sp.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kCols = 256;
constexpr int kStep = 32;  // gathered rows of D that a step takes: what one instruction contracts
constexpr int kAhead = 3, kPairSlots = 3;  // steps that are copied ahead; pairs of steps of P in flight or in use

// mma.sp: a warp computes 64 x 64, so that the gathered rows leave shared memory once for every 64 rows.
struct OfWarps {
  static constexpr int kMatrices = 4, kColumnTiles = 8;  // of 16 rows, of 8 columns, that a warp computes
  static constexpr bool kInFlight = false;
  static constexpr int kSlots = kAhead + 1, kSlot = kStep * kCols;
  using Sums = float[kMatrices][kColumnTiles][4];

  __device__ __forceinline__ static int row(int warp) { return warp / 4 * 64; }
  __device__ __forceinline__ static int column(int warp) { return warp % 4 * 64; }
  __device__ __forceinline__ static void publish() {}
  template <int kLeft>
  __device__ __forceinline__ static void wait() {}

  template <class T, int kOfPair>
  __device__ __forceinline__ static void multiply(const uint32_t sparse[][4], const uint16_t* slot, const uint32_t words[],
                                                  Sums& acc, bool) {
    const int lane = threadIdx.x % 32, access = column(threadIdx.x / 32) / 8;
    uint32_t gathered[2][4];
    load_matrices<true>(slot + swizzled(lane, access), gathered[0]);
    S24_UNROLL
    for (int n = 0; n < kColumnTiles; ++n) {
      if (n + 1 < kColumnTiles) load_matrices<true>(slot + swizzled(lane, access + n + 1), gathered[(n + 1) % 2]);
      S24_UNROLL
      for (int i = 0; i < kMatrices; ++i) mma_sp<T, kOfPair>(acc[i][n], sparse[i], gathered[n % 2], words[i]);
    }
  }
};

// wgmma.sp: a warpgroup computes 64 x 256, a warp 16 x 256 of them, while the next step begins.
struct OfWarpgroups {
  static constexpr int kMatrices = 1, kColumnTiles = 32;
  static constexpr int kSlots = kAhead + 2, kSlot = kWgmmaRows * kWgmmaCols;
  using Sums = float[kMatrices][kColumnTiles][4];
  static_assert(kStep == kWgmmaRows && kCols == kWgmmaCols, "one instruction a step");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static constexpr bool kInFlight = true;  // as the next step begins
  __device__ __forceinline__ static int row(int warp) { return warp * 16; }
  __device__ __forceinline__ static int column(int) { return 0; }
  __device__ __forceinline__ static void publish() { publish_copies(); }
  template <int kLeft>
  __device__ __forceinline__ static void wait() { wait_wgmma<kLeft>(); }

  template <class T, int kOfPair>
  __device__ __forceinline__ static void multiply(const uint32_t sparse[][4], const uint16_t* slot, const uint32_t words[],
                                                  Sums& acc, bool more) {
    begin_wgmma();
    wgmma_sp<T, kOfPair>(acc[0], sparse[0], swizzled_tile(slot), words[0], more);
    commit_wgmma();
  }
#endif
};

template <class By, int kRows>
struct Gathered {
  alignas(1024) uint16_t dense[By::kSlots][By::kSlot];
  uint16_t values[kPairSlots][kRows * kStep];  // 64 bytes a row; where its four accesses stand, the row says
  uint8_t metadata[kPairSlots][kRows * kStep / 4];
};

// Eight rows of 64 bytes, read at one access each, fall on all banks.
__device__ __forceinline__ int values_access(int row, int access) { return (access ^ (row >> 1 & 3)) * 8; }

// A warp's share of the gather: lanes take the columns, and the warp its own rows of every step.
template <class By, int kRows>
struct Gather {
  static constexpr int kWarps = kRows / 16, kOwn = kStep / kWarps;
  using Bytes = std::conditional_t<kOwn == 8, uint64_t, uint32_t>;

  const uint8_t* columns;
  const uint8_t* dense;
  uint32_t line_bytes;
  int m;
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
      const uint32_t column = min_u32(uint32_t(next[kOfPair] >> (8 * i)) & 0xffu, uint32_t(m) - 1u);
      const uint32_t row = (group + uint32_t(i) / 4u) * uint32_t(m) + column;
      copy_async<16>(slot + swizzled(first + i, threadIdx.x % 32), dense + uint64_t(row) * line_bytes, inside);
    }
  }
};

// Each quad of lanes holds eight columns of a row, eight lanes hold eight rows of a column.
template <class Out, int kMatrices, int kColumnTiles>
__device__ __forceinline__ void write_tile(const MatmulArgs& a, int64_t row0, int64_t col0,
                                           const float (&acc)[kMatrices][kColumnTiles][4]) {
  using Bits = typename Out::Bits;
  const int lane = threadIdx.x % 32;
  auto* const out = static_cast<Bits*>(a.out);
  S24_UNROLL
  for (int n = 0; n < kColumnTiles; ++n) {
    const int64_t c = col0 + 8 * n + lane % 4 * 2;
    if (c >= a.cols) break;
    S24_UNROLL
    for (int i = 0; i < 2 * kMatrices; ++i) {
      const int64_t r = row0 + 8 * i + lane / 4;
      const float* const two = acc[i / 2][n] + i % 2 * 2;
      const Vector<Bits, 2> v = {{round_number<Out>(bits_of(two[0])), round_number<Out>(bits_of(two[1]))}};
      if (a.out_packed_last) {
        out[c * a.rows + r] = v.at[0];
        out[(c + 1) * a.rows + r] = v.at[1];
      } else {
        store(out + r * a.cols + c, v);
      }
    }
  }
}

template <class By, class T, int kRows>
__device__ __forceinline__ void multiply_gathered(const MatmulVnmArgs& args) {
  const MatmulArgs& a = args.product;  // its depth: of P as it is stored
  auto& shared = *reinterpret_cast<Gathered<By, kRows>*>(launched_memory());
  const int64_t row0 = int64_t(blockIdx.x) * kRows, col0 = int64_t(blockIdx.y) * kCols;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, warp_row = By::row(warp);
  const int steps = int(a.depth) / kStep;

  using G = Gather<By, kRows>;
  const int64_t own_col = col0 + lane * 8;
  G gather = {args.columns + row0 / args.v * a.depth + warp * G::kOwn,
              reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(a.dense) + own_col),
              uint32_t(a.cols * 2), int(args.m), own_col < a.cols};
  const int row = thread / 4, access = thread % 4;
  const auto* const values = static_cast<const uint16_t*>(a.values) + (row0 + row) * (a.depth / 2) + access * 8;
  const uint8_t* const metadata = a.metadata + (row0 + thread) * (a.depth / 8);

  const auto load_packed = [&](int pair) {
    uint16_t* const to = shared.values[pair % kPairSlots] + row * kStep + values_access(row, access);
    S24_UNROLL
    for (int half = 0; half < 2; ++half)
      copy_async<16>(to + half * (kRows / 2) * kStep, values + half * (kRows / 2) * (a.depth / 2) + pair * kStep, true);
    if (thread < kRows) copy_async<8>(shared.metadata[pair % kPairSlots] + thread * 8, metadata + pair * 8, true);
  };
  const auto load_step = [&](int step, auto of_pair) {
    constexpr int kOfPair = decltype(of_pair)::value;
    if (step < steps) {
      gather.template load<kOfPair>(shared.dense[step % By::kSlots], step);
      if constexpr (kOfPair == 0) load_packed(step / 2);
      if (step + 2 < steps) gather.template prefetch<kOfPair>(step + 2);
    }
    commit_copies();
  };

  typename By::Sums acc;
  if constexpr (!By::kInFlight) {
    S24_UNROLL
    for (int i = 0; i < By::kMatrices * By::kColumnTiles * 4; ++i) (&acc[0][0][0])[i] = 0;
  }
  uint32_t words[2][By::kMatrices], sparse[2][By::kMatrices][4];  // of both steps: what is multiplied may not change
  const auto do_step = [&](int step, auto of_pair) {
    constexpr int kOfPair = decltype(of_pair)::value;
    wait_copies<kAhead - 1>();
    By::publish();
    __syncthreads();
    const int slot = step / 2 % kPairSlots;
    constexpr int kWords = By::kInFlight ? kOfPair : 0;
    if constexpr (kWords == kOfPair) {
      S24_UNROLL
      for (int i = 0; i < By::kMatrices; ++i) {
        words[kWords][i] = 0;
        S24_UNROLL
        for (int half = 0; half < 2; ++half) {
          const MmaWord w = mma_sp_word(lane, half);
          const uint8_t* const at = shared.metadata[slot] + (warp_row + 16 * i + w.row) * (kStep / 4) + 2 * w.column;
          words[kWords][i] |= uint32_t(*reinterpret_cast<const uint16_t*>(at)) << (16 * half);
        }
      }
    }
    const uint16_t* const kept = shared.values[slot] + (warp_row + lane % 16) * kStep;
    S24_UNROLL
    for (int i = 0; i < By::kMatrices; ++i)
      load_matrices<false>(kept + 16 * i * kStep + values_access(lane, 2 * kOfPair + lane / 16), sparse[kOfPair][i]);
    By::template multiply<T, kOfPair>(sparse[kOfPair], shared.dense[step % By::kSlots], words[kWords], acc, step > 0);
    load_step(step + kAhead, std::integral_constant<int, 1 - kOfPair>());
    By::template wait<1>();
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
  By::template wait<0>();
  const int64_t r = row0 + warp_row, c = col0 + By::column(warp);
  a.out_dtype == Dtype::kF32 ? write_tile<F32>(a, r, c, acc) : write_tile<T>(a, r, c, acc);
}

template <class By, class T, int kRows>
__global__ void __launch_bounds__(2 * kRows, 128 / kRows) matmul_gathered(MatmulVnmArgs args) {
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (std::is_same_v<By, OfWarps>)  // others have no wgmma
#endif
    multiply_gathered<By, T, kRows>(args);
}

template <class By, class T, int kRows>
cudaError_t launch_gathered(const MatmulVnmArgs& args, cudaStream_t stream) {
  const auto kernel = matmul_gathered<By, T, kRows>;
  constexpr int kBytes = sizeof(Gathered<By, kRows>);
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (e != cudaSuccess) return e;
  const dim3 grid(unsigned(args.product.rows / kRows), blocks_for(args.product.cols, kCols));
  return start(kernel, grid, 2 * kRows, kBytes, stream, args);
}

template <class By, class T>
cudaError_t launch_gathered(const MatmulVnmArgs& args, cudaStream_t stream) {
  return args.v % 128 == 0 ? launch_gathered<By, T, 128>(args, stream) : launch_gathered<By, T, 64>(args, stream);
}

// Whether this device runs the machine code for sm_90a.
#if defined(__CUDACC__)
bool has_wgmma() { return compute_capability() / 10 == 9; }
#endif

}  // namespace

template <>
cudaError_t run(const MatmulVnmArgs& args, cudaStream_t stream) {
  if (args.product.in == Dtype::kF32) return launch_matmul_vnm_f32(args, stream);
  MatmulVnmArgs packed = args;
  MatmulArgs& a = packed.product;
  a.depth = a.depth / args.m * 4;  // of P as it is stored
  if (a.dense_k_last) return cudaErrorInvalidValue;
  const bool whole = whole_accesses(a) && aligned(args.columns, 8);
  return for_type(a.in, [&](auto type) {
    using T = decltype(type);
    if (whole && args.v % 64 == 0 && aligned(a.out, 8)) {
#if defined(__CUDACC__)
      if (has_wgmma()) return launch_gathered<OfWarpgroups, T>(packed, stream);
#endif
      return launch_gathered<OfWarps, T>(packed, stream);
    }
    const GatheredColumns columns = {args.columns, int(args.v), int(args.m)};
    if (args.v % 64 == 0) return launch_matmul_sp<T, 64, false, false>(a, columns, stream);
    return whole ? launch_matmul_sp<T, 16, false, true>(a, columns, stream)
                 : launch_matmul_sp<T, 16, false, false>(a, columns, stream);
  });
}

}  // namespace cuda
}  // namespace s24
