// Elementwise operations in tiles of 128 rows, whose results are packed along rows in the same pass.
//
// Operands: matrices (rows, cols), or (cols, rows) where they are transposed. Results: matrices (rows, cols), and on request
// the estimate of each, packed along rows.
// Steps: a block loads tiles, transposes through shared memory what lies the other way, computes, stores, and packs the results
// from registers.
// Constraints: aligned arrays whose sizes are multiples of an access; packing needs whole tiles of rows.
#pragma once
#include "mma_sp.cuh"
#include "packed24_tile.cuh"

namespace s24 {
namespace cuda {

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

template <class Bits, int kIn, int kOut>
struct Operands {
  const Bits* in[kIn];
  bool transposed[kIn];
  Bits* out[kOut];
};

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

// Tiles of 128 rows. F: the operation, with its type F::T, the numbers F::kIn and F::kOut of operands and results, and
// f(in, j, out), which computes row j of a thread's four. op: how the results are packed along rows besides, or kNothing.
// packed: a loop indexes it, which would make every thread copy it, were it not a constant of the grid.
template <class F, PackOp op>
__global__ void __launch_bounds__(kThreads, kBlocks<typename F::T, op>)
    elementwise_tiles(Operands<typename F::T::Bits, F::kIn, F::kOut> operands, F f, int64_t rows, int64_t cols,
                      const __grid_constant__ PackedResults packed) {
  using T = typename F::T;
  using Bits = typename T::Bits;
  using S = Tile<Bits>;
  constexpr int kLanes = S::kLanes;
  const int vector = threadIdx.x % kTileVectors, group = threadIdx.x / kTileVectors;
  const int64_t col0 = int64_t(blockIdx.x) * S::kInner, row0 = int64_t(blockIdx.y) * 4 * kTileGroups;
  const int64_t col = col0 + vector * kLanes, row = row0 + 4 * group;
  const bool inside = col < cols && row < rows;
  Words16 in[F::kIn][4];
  auto* columns = reinterpret_cast<Columns<Bits>*>(launched_memory());
  int fetched = 0;
  S24_UNROLL
  for (int n = 0; n < F::kIn; ++n)
    if (operands.transposed[n]) columns[fetched++].fetch(operands.in[n], row0, rows, col0, cols);
  commit_copies();
  S24_UNROLL
  for (int n = 0; n < F::kIn; ++n) {
    if (operands.transposed[n] || !inside) continue;
    S24_UNROLL
    for (int j = 0; j < 4; ++j) in[n][j] = load16(operands.in[n] + (row + j) * cols + col);
  }
  wait_copies<0>();
  __syncthreads();
  fetched = 0;
  S24_UNROLL
  for (int n = 0; n < F::kIn; ++n)
    if (operands.transposed[n]) columns[fetched++].take(group, vector, in[n]);

  Words16 out[F::kOut][4];
  if (inside) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      f(in, j, out);
      S24_UNROLL
      for (int n = 0; n < F::kOut; ++n) store16(operands.out[n] + (row + j) * cols + col, out[n][j]);
    }
  }
  if constexpr (op != kNothing) {
    __syncthreads();  // the tiles of the results take the place of those of the operands
    auto* tiles = reinterpret_cast<S*>(launched_memory());
    S24_ROLLED
    for (int n = 0; n < F::kOut; ++n) {
      uint32_t made[kLanes / 4] = {};
      if (inside) {
        const Key key = read_key<kDraws<op>>(packed.draws[n]);
        const int64_t first = key.number(row / 4 * cols + col, row / 4);
        const auto none = [](int) { return 0u; };
        tiles[n].template put<op, T>(out[0], vector, group, key, first / 4, none, none, made);
      }
      tiles[n].exchange(made);
      if constexpr (F::kOut > 1) {
        S24_UNROLL
        for (int j = 0; j < 4; ++j) out[0][j] = out[1][j];
      }
    }
    __syncthreads();
    const int packed_rows = int(min(int64_t(S::kInner), cols - col0));
    S24_UNROLL
    for (int n = 0; n < F::kOut; ++n) {
      tiles[n].store_pairs(static_cast<Pair<Bits>*>(packed.values[n]) + (col0 * rows + row0) / 4, unsigned(rows), packed_rows);
      tiles[n].store_nibbles(packed.metadata[n] + (col0 * rows + row0) / 8, rows, packed_rows);
    }
  }
}

template <PackOp op, class F>
cudaError_t launch_tiles(const Operands<typename F::T::Bits, F::kIn, F::kOut>& operands, F f, int64_t rows, int64_t cols,
                         const PackedResults& packed, cudaStream_t stream) {
  using Bits = typename F::T::Bits;
  size_t shared = op == kNothing ? 0 : F::kOut * sizeof(Tile<Bits>), columns = 0;
  for (const bool transposed : operands.transposed) columns += transposed ? sizeof(Columns<Bits>) : 0;
  const dim3 grid(blocks_for(cols, Tile<Bits>::kInner), blocks_for(rows, 4 * kTileGroups));
  return start(elementwise_tiles<F, op>, grid, kThreads, shared > columns ? shared : columns, stream, operands, f, rows, cols,
               packed);
}

}  // namespace cuda
}  // namespace s24
