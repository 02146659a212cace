// Gated activations and their gradients, in float32.
//
// Operands: gate and up (rows, cols), or (cols, rows) if transposed; dz likewise. Results: z = act(gate) up, or dgate and dup,
// all (rows, cols), and on request the estimates of both gradients packed along rows.
// Steps: where all operands lie alike a thread goes along rows; otherwise a block loads tiles of 128 rows, transposes through
// shared memory what lies the other way, computes, stores, and packs the gradients from registers.
// Constraints: tiles need aligned arrays whose sizes are multiples of an access, packing whole tiles of rows. Other calls run
// element by element, and pack in passes of their own.
#include "mma_sp.cuh"
#include "packed24_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr float kGeluCubic = 0.044715f, kGeluScale = 1.5957691216057308f;  // 2 sqrt(2 / pi)

// 1 / (1 + exp(-s)), with subnormals as zero. For results of 16 bits it uses the hardware's approximations, which are good to a
// few units of float32.
template <class T>
__device__ __forceinline__ float logistic(float s) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(typename T::Bits) == 2) {
    float power, share;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(s * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + power));
    return share;
  }
#endif
  return 1.0f / (1.0f + expf(-s));
}

struct Activated {
  float value, slope;
};

// Both activations are x logistic(s): SiLU with s = x, GELU by tanh with s = 2 sqrt(2 / pi) (x + 0.044715 x^3).
template <class T>
__device__ __forceinline__ Activated activate(Activation activation, float x) {
  const bool gelu = activation == Activation::kGelu;
  const float cubic = kGeluCubic * x * x;
  const float s = gelu ? kGeluScale * x * (1.0f + cubic) : x;
  const float share = logistic<T>(s), value = x * share;
  return {value, share + value * (1.0f - share) * (gelu ? kGeluScale * (1.0f + 3.0f * cubic) : 1.0f)};
}

template <class T>
__device__ __forceinline__ float number(typename T::Bits b) {
  return float_of(T::to_f32(b));
}

// A NaN stays one on a GPU and on the host.
template <class T>
__device__ __forceinline__ typename T::Bits rounded(float x) {
  return round_number<T>(bits_of(x));
}

// 16 bytes as four words, which is what registers hold.
using Words16 = Vector<uint32_t, 4>;

template <class Bits>
__device__ __forceinline__ Bits element(const Words16& words, int i) {
  if constexpr (sizeof(Bits) == 2)
    return Bits(words.at[i / 2] >> (i % 2 * 16));
  else
    return words.at[i];
}

template <class Bits>
__device__ __forceinline__ void set_element(Words16& words, int i, Bits b) {
  if constexpr (sizeof(Bits) == 2)
    words.at[i / 2] = i % 2 == 0 ? uint32_t(b) : words.at[i / 2] | uint32_t(b) << 16;
  else
    words.at[i] = b;
}

template <class Bits>
__device__ __forceinline__ Words16 load16(const Bits* p) {
  return load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(p));
}

// Stores 16 bytes to global memory in one access; the compiler would split it.
template <class Bits>
__device__ __forceinline__ void store16(Bits* p, const Words16& words) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(words.at[0]),
               "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
#else
  store(reinterpret_cast<uint32_t*>(p), words);
#endif
}

// One element. in: gate, up, dz; out: z, or dgate and dup.
template <class T, bool kBackward>
__device__ __forceinline__ void apply(Activation activation, const typename T::Bits* in, typename T::Bits* out) {
  const Activated act = activate<T>(activation, number<T>(in[0]));
  const float up = number<T>(in[1]);
  if constexpr (kBackward) {
    const float dz = number<T>(in[2]);
    out[0] = rounded<T>(dz * up * act.slope);
    out[1] = rounded<T>(dz * act.value);
  } else {
    out[0] = rounded<T>(act.value * up);
  }
}

template <bool kBackward>
constexpr int kIn = kBackward ? 3 : 2;
template <bool kBackward>
constexpr int kOut = kBackward ? 2 : 1;

template <class Bits>
struct Operands {
  const Bits* in[3];
  bool transposed[3];
  Bits* out[2];

  explicit Operands(const GatedArgs& a)
      : in{static_cast<const Bits*>(a.gate), static_cast<const Bits*>(a.up), static_cast<const Bits*>(a.dz)},
        transposed{a.transposed, a.transposed, a.dz != nullptr && a.dz_transposed},
        out{static_cast<Bits*>(a.dz == nullptr ? a.z : a.dgate), static_cast<Bits*>(a.dup)} {}
};

// Element by element, in the order of the results, whose rows lie one after the other. With kLanes > 1 a thread takes kLanes
// neighbours at once; then no operand may be transposed.
template <class T, bool kBackward, int kLanes>
__global__ void __launch_bounds__(kThreads) gated_rows(Operands<typename T::Bits> operands, Activation activation,
                                                       int64_t rows, int64_t cols) {
  using Bits = typename T::Bits;
  constexpr int kAccesses = kLanes > 1 ? 2 : 1;
  const auto place = [](int a) {
    return ((int64_t(blockIdx.x) * kAccesses + a) * kThreads + threadIdx.x) * kLanes;
  };
  const int64_t count = rows * cols;
  Vector<Bits, kLanes> in[kAccesses][kIn<kBackward>];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t at = place(a);
    if (at >= count) break;
    int64_t from_column = at;
    if constexpr (kLanes == 1) {
      int64_t col;
      const int64_t row = divide(at, cols, &col);
      from_column = col * rows + row;
    }
    S24_UNROLL
    for (int n = 0; n < kIn<kBackward>; ++n)
      in[a][n] = load<Bits, kLanes>(operands.in[n] + (operands.transposed[n] ? from_column : at));
  }
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t at = place(a);
    if (at >= count) break;
    Vector<Bits, kLanes> out[kOut<kBackward>];
    S24_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      Bits x[kIn<kBackward>], y[kOut<kBackward>];
      S24_UNROLL
      for (int n = 0; n < kIn<kBackward>; ++n) x[n] = in[a][n].at[l];
      apply<T, kBackward>(activation, x, y);
      S24_UNROLL
      for (int n = 0; n < kOut<kBackward>; ++n) out[n].at[l] = y[n];
    }
    S24_UNROLL
    for (int n = 0; n < kOut<kBackward>; ++n) store(operands.out[n] + at, out[n]);
  }
}

// A tile of a transposed operand in shared memory: its columns, in pieces of 16 bytes, of which those of one row stand in
// different banks.
template <class Bits>
struct Columns {
  static constexpr int kLanes = Tile<Bits>::kLanes, kInner = Tile<Bits>::kInner;
  static constexpr int kRows = 4 * kTileGroups, kPieces = kRows / kLanes;
  Bits at[kInner * kRows];

  static __device__ __forceinline__ int place(int column, int piece) {
    return (column * kPieces + (piece ^ (column / kLanes))) * kLanes;
  }

  __device__ __forceinline__ void fetch(const Bits* from, int64_t row0, int64_t rows, int64_t col0, int64_t cols) {
    S24_UNROLL
    for (int n = 0; n < kInner * kPieces / kThreads; ++n) {
      const int c = n * kThreads + threadIdx.x, column = c / kPieces, piece = c % kPieces;
      const bool inside = col0 + column < cols && row0 + piece * kLanes < rows;
      copy_async<16>(at + place(column, piece), inside ? from + (col0 + column) * rows + row0 + piece * kLanes : from, inside);
    }
  }

  // A thread's four rows of one vector.
  __device__ __forceinline__ void take(int group, int vector, Words16 (&rows)[4]) const {
    S24_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      const auto four = load<Bits, 4>(at + place(vector * kLanes + l, 4 * group / kLanes) + 4 * group % kLanes);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) set_element(rows[j], l, four.at[j]);
    }
  }
};

// Keeps the loop over both gradients: unrolled, two estimates would not fit into the instruction cache.
#if defined(__CUDACC__)
#define S24_ROLLED _Pragma("unroll 1")
#else
#define S24_ROLLED
#endif

constexpr PackOp kNothing = PackOp::kPlain;

// How many blocks a multiprocessor takes at least. With more, too few registers would be left for the sequential estimate, or
// for float32.
template <class T, PackOp op>
constexpr int kBlocks = op == PackOp::kMvueSequential || (op != kNothing && sizeof(typename T::Bits) == 4) ? 2 : 3;

// Tiles of 128 rows. op: how the gradients are packed along rows besides, or kNothing.
template <class T, bool kBackward, PackOp op>
__global__ void __launch_bounds__(kThreads, kBlocks<T, op>)
    gated_tiles(Operands<typename T::Bits> operands, Activation activation, int64_t rows, int64_t cols, PackedGradients packed) {
  using Bits = typename T::Bits;
  using S = Tile<Bits>;
  constexpr int kLanes = S::kLanes;
  const int vector = threadIdx.x % kTileVectors, group = threadIdx.x / kTileVectors;
  const int64_t col0 = int64_t(blockIdx.x) * S::kInner, row0 = int64_t(blockIdx.y) * 4 * kTileGroups;
  const int64_t col = col0 + vector * kLanes, row = row0 + 4 * group;
  const bool inside = col < cols && row < rows;
  Words16 in[kIn<kBackward>][4];
  auto* columns = reinterpret_cast<Columns<Bits>*>(launched_memory());
  int fetched = 0;
  S24_UNROLL
  for (int n = 0; n < kIn<kBackward>; ++n)
    if (operands.transposed[n]) columns[fetched++].fetch(operands.in[n], row0, rows, col0, cols);
  commit_copies();
  S24_UNROLL
  for (int n = 0; n < kIn<kBackward>; ++n) {
    if (operands.transposed[n] || !inside) continue;
    S24_UNROLL
    for (int j = 0; j < 4; ++j) in[n][j] = load16(operands.in[n] + (row + j) * cols + col);
  }
  wait_copies<0>();
  __syncthreads();
  fetched = 0;
  S24_UNROLL
  for (int n = 0; n < kIn<kBackward>; ++n)
    if (operands.transposed[n]) columns[fetched++].take(group, vector, in[n]);

  Words16 out[kOut<kBackward>][4];
  if (inside) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      S24_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        Bits x[kIn<kBackward>], y[kOut<kBackward>];
        S24_UNROLL
        for (int n = 0; n < kIn<kBackward>; ++n) x[n] = element<Bits>(in[n][j], l);
        apply<T, kBackward>(activation, x, y);
        S24_UNROLL
        for (int n = 0; n < kOut<kBackward>; ++n) set_element(out[n][j], l, y[n]);
      }
      S24_UNROLL
      for (int n = 0; n < kOut<kBackward>; ++n) store16(operands.out[n] + (row + j) * cols + col, out[n][j]);
    }
  }
  if constexpr (op != kNothing) {
    __syncthreads();  // the tiles of the results take the place of those of the operands
    auto* tiles = reinterpret_cast<S*>(launched_memory());
    S24_ROLLED
    for (int n = 0; n < 2; ++n) {
      uint32_t made[kLanes / 4] = {};
      if (inside) {
        const Key key = read_key<kDraws<op>>(n == 0 ? packed.draws[0] : packed.draws[1]);
        const int64_t first = key.number(row / 4 * cols + col, row / 4);
        const auto none = [](int) { return 0u; };
        tiles[n].template put<op, T>(out[0], vector, group, key, first / 4, none, none, made);
      }
      tiles[n].exchange(made);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) out[0][j] = out[1][j];
    }
    __syncthreads();
    const int packed_rows = int(min(int64_t(S::kInner), cols - col0));
    S24_UNROLL
    for (int n = 0; n < 2; ++n) {
      tiles[n].store_pairs(static_cast<Pair<Bits>*>(packed.values[n]) + (col0 * rows + row0) / 4, unsigned(rows), packed_rows);
      tiles[n].store_nibbles(packed.metadata[n] + (col0 * rows + row0) / 8, rows, packed_rows);
    }
  }
}

int64_t lanes_of(const GatedArgs& a) { return a.dtype == Dtype::kF32 ? 4 : 8; }

bool all_aligned(const GatedArgs& a) {
  bool all = true;
  for (const void* p : {a.gate, a.up, a.dz, static_cast<const void*>(a.z), static_cast<const void*>(a.dgate),
                        static_cast<const void*>(a.dup)})
    all = all && aligned(p, 16);
  return all;
}

bool fits_tiles(const GatedArgs& a) {
  return a.rows % lanes_of(a) == 0 && a.cols % lanes_of(a) == 0 && ceil_div(a.rows, 4 * kTileGroups) <= 65535 &&
         all_aligned(a);
}

template <class T, bool kBackward, PackOp op>
cudaError_t launch_tiles(const GatedArgs& a, const PackedGradients& packed, cudaStream_t stream) {
  using Bits = typename T::Bits;
  const Operands<Bits> operands(a);
  size_t shared = op == kNothing ? 0 : 2 * sizeof(Tile<Bits>), columns = 0;
  for (const bool transposed : operands.transposed) columns += transposed ? sizeof(Columns<Bits>) : 0;
  const dim3 grid(blocks_for(a.cols, Tile<Bits>::kInner), blocks_for(a.rows, 4 * kTileGroups));
  return start(gated_tiles<T, kBackward, op>, grid, kThreads, shared > columns ? shared : columns, stream, operands,
               a.activation, a.rows, a.cols, packed);
}

template <class T, bool kBackward>
cudaError_t launch(const GatedArgs& a, cudaStream_t stream) {
  using Bits = typename T::Bits;
  const Operands<Bits> operands(a);
  const bool transposed = operands.transposed[0] || operands.transposed[2];
  if (transposed && fits_tiles(a)) return launch_tiles<T, kBackward, kNothing>(a, PackedGradients{}, stream);
  const int64_t count = a.rows * a.cols;
  if (!transposed && count % lanes_of(a) == 0 && all_aligned(a)) {
    constexpr int kLanes = 16 / int(sizeof(Bits));
    return start(gated_rows<T, kBackward, kLanes>, dim3(blocks_for(count, 2 * kThreads * kLanes)), kThreads, 0, stream,
                 operands, a.activation, a.rows, a.cols);
  }
  return start(gated_rows<T, kBackward, 1>, dim3(blocks_for(count, kThreads)), kThreads, 0, stream, operands, a.activation,
               a.rows, a.cols);
}

}  // namespace

template <>
cudaError_t run(const GatedArgs& a, cudaStream_t stream) {
  if (a.rows * a.cols == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    return a.dz == nullptr ? launch<T, false>(a, stream) : launch<T, true>(a, stream);
  });
}

cudaError_t launch_gated_pack(const GatedArgs& a, const PackedGradients& packed, cudaStream_t stream) {
  if (a.rows * a.cols == 0) return cudaSuccess;
  bool fits = fits_tiles(a) && a.rows % (4 * kTileGroups) == 0;
  for (int n = 0; n < 2; ++n) fits = fits && aligned(packed.values[n], 16) && aligned(packed.metadata[n], 16);
  if (!fits) {
    cudaError_t e = run(a, stream);
    for (int n = 0; n < 2 && e == cudaSuccess; ++n) {
      void* const dense = n == 0 ? a.dgate : a.dup;
      const Groups groups = {1, a.rows, a.cols};
      e = run(PackArgs{packed.op, a.dtype, dense, nullptr, packed.values[n], packed.metadata[n], groups, packed.draws[n]}, stream);
    }
    return e;
  }
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    return packed.op == PackOp::kMvueExact ? launch_tiles<T, true, PackOp::kMvueExact>(a, packed, stream)
                                           : launch_tiles<T, true, PackOp::kMvueSequential>(a, packed, stream);
  });
}

}  // namespace cuda
}  // namespace s24
