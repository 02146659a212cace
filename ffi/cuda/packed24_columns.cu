// Packing to 2:4, unpacking and gathering where groups lie across rows.
//
// Operands: as in packed24_rows.cu, with inner > 1.
// Steps: a block takes several tiles of the group axis in turn. It loads the next tile, encodes one, and transposes it through
// shared memory, so that both sides are read and written in 16-byte pieces of whole lines.
// Constraints: fits_columns says which calls fall into whole tiles.
#include "mma_sp.cuh"
#include "packed24_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

// The same array packed along its rows, too; null: not asked for.
template <class Bits>
struct RowsToo {
  Bits* values;
  uint8_t* metadata;
};

// The squared ReLU of a row of eight 16-bit elements, which is a thread's, packed. at: the number of the first in the array.
template <class T>
__device__ __forceinline__ void pack_row_of_squares(const Vector<uint32_t, 4>& row, uint64_t at, const RowsToo<uint16_t>& to) {
  const Words in[2] = {{row.at[0], row.at[1]}, {row.at[2], row.at[3]}};
  uint32_t squares[4], x[4];
  S24_UNROLL
  for (int i = 0; i < 4; ++i) squares[i] = squared_relu_pair<T>(row.at[i]);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = select_bytes(squares[i / 2], squares[2 + i / 2], i % 2 == 0 ? 0x5410u : 0x7632u);
  const TwoPacked two = two_largest_of_both<T>(x);
  Vector<uint32_t, 2> kept = {{two.bits[0], two.bits[1]}};
  uint32_t byte = two.nibbles | two.nibbles >> 12;
  if (has_nan<T>(two.magnitude)) {
    byte = 0;
    S24_UNROLL
    for (int i = 0; i < 2; ++i) {
      const PackedGroup group = pack_with_nan<PackOp::kSquaredRelu, T>(in[i]);
      kept.at[i] = group.bits;
      byte |= group.nibble << (4 * i);
    }
  }
  store(reinterpret_cast<uint32_t*>(to.values) + at / 4, kept);
  to.metadata[at / 8] = uint8_t(byte);
}

// What a thread reads of a tile: one vector of four rows, and what a mask allows there.
template <PackOp op, class Bits>
struct Input {
  static constexpr int kLanes = Tile<Bits>::kLanes;
  using Allowed = Vector<uint32_t, kLanes / 4>;  // words: bytes would be spilled
  FourRows rows;
  Allowed allowed[op == PackOp::kMasked ? 4 : 1];

  __device__ __forceinline__ uint32_t mask_bytes(int l) const {
    if constexpr (op == PackOp::kMasked) {
      const uint32_t words[4] = {allowed[0].at[l / 4], allowed[1].at[l / 4], allowed[2].at[l / 4], allowed[3].at[l / 4]};
      return byte_of_each(words, l % 4);
    }
    return 0;
  }
};

// The next tile, which is copied to shared memory while one is packed: of estimates, not all of it fits into registers. A thread
// reads back what it has copied itself, so that no barrier is needed. kUnpack reads no dense tile.
template <PackOp op, class Bits>
struct Coming {
  using In = Input<op, Bits>;
  static constexpr int kRows = op == PackOp::kUnpack ? 1 : 4, kAllowed = op == PackOp::kMasked ? kThreads : 1;
  Vector<uint32_t, 4> rows[kRows][kThreads];
  typename In::Allowed allowed[kRows][kAllowed];

  // next: from one row to the next.
  __device__ __forceinline__ void copy(const Bits* dense, const uint8_t* mask, uint64_t at, uint64_t next) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      copy_async<16>(&rows[j][threadIdx.x], dense + at + next * j, true);
      if constexpr (op == PackOp::kMasked)
        copy_async<sizeof(typename In::Allowed)>(&allowed[j][threadIdx.x], mask + at + next * j, true);
    }
    commit_copies();
  }

  __device__ __forceinline__ In read() const {
    In in;
    wait_copies<0>();
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      in.rows[j] = rows[j][threadIdx.x];
      if constexpr (op == PackOp::kMasked) in.allowed[j] = allowed[j][threadIdx.x];
    }
    asm volatile("" ::: "memory");  // the next copy must not begin before
    return in;
  }
};

// Blocks that share a multiprocessor: fewer where threads need more registers.
template <PackOp op, bool kRowsToo>
constexpr int kBlocks = kDraws<op> > 0 || op == PackOp::kMasked || op == PackOp::kSoft || kRowsToo ? 3 : 4;

// How many tiles a block takes at most, what rounds_for takes as `fewer`, and how many strips blocks share: what was fastest on an
// H200. With kMasked, kGather and kSoft no other number of strips was tried.
template <PackOp op>
constexpr int kRounds = kLargest<op> ? 2 : 4;
template <PackOp op>
constexpr int kFewer = kDraws<op> > 0 || op == PackOp::kSoft ? 4 : 1;
template <PackOp op, bool kRowsToo>
constexpr unsigned kAcross = kLargest<op> && !kRowsToo ? 4 : 0;

// A block takes up to `rounds` tiles along the group axis and begins to copy the next one before it packs one.
template <PackOp op, class T, bool kRowsToo>
__global__ void __launch_bounds__(kThreads, kBlocks<op, kRowsToo>)
    pack_columns(typename T::Bits* dense, const uint8_t* mask, const void* scale, typename T::Bits* values,
                 uint8_t* metadata, Groups g, bool strided, unsigned rounds, Draws draws, RowsToo<typename T::Bits> rows_too) {
  using Bits = typename T::Bits;
  using S = Tile<Bits>;
  constexpr int kLanes = S::kLanes, kPairs = S::kPairs, kChunks = S::kChunks;
  __shared__ S tiles[2];  // in turn, so that one barrier is enough
  __shared__ Coming<op, Bits> coming;
  const unsigned vector = threadIdx.x % kTileVectors, group = threadIdx.x / kTileVectors;
  const unsigned inner = unsigned(g.inner), len = unsigned(g.len), outer = blockIdx.z;
  const PlaceInGrid here = place_in_grid<kAcross<op, kRowsToo>>();
  const unsigned inner0 = here.strip * S::kInner, i0 = inner0 + vector * kLanes;
  const unsigned packed0 = outer * inner + inner0, rows = min(unsigned(S::kInner), inner - inner0);  // of the packed form
  const bool inside = i0 < inner;
  const Key key = read_key<kDraws<op>>(draws);
  const uint32_t times = op == PackOp::kSoft ? bits_of(scale_of<T>(scale)) : 0;
  const uint64_t step = strided ? uint64_t(len / 4) * inner : inner;  // from one member of a group to the next
  const auto first_at = [&](unsigned tile) {
    const unsigned q = tile * kTileGroups + group;
    return uint64_t(outer * len + (strided ? q : 4 * q)) * inner + i0;
  };
  unsigned n = here.tiles * rounds;
  const unsigned end = min(n + rounds, len / (4 * kTileGroups));
  if constexpr (op != PackOp::kUnpack) {
    if (inside) coming.copy(dense, mask, first_at(n), step);
  }
#pragma unroll 1
  for (; n < end; ++n) {
    S& tile = tiles[n % 2];
    const uint64_t at = first_at(n);
    const auto pairs_at = [&](unsigned row, unsigned first) {
      return reinterpret_cast<Pair<Bits>*>(values) + (uint64_t(packed0 + row) * (len / 4) + n * kTileGroups + first);
    };
    uint8_t* const nibbles_at = metadata + (uint64_t(packed0 + threadIdx.x) * (len / 8) + n * kTileGroups / 2);

    if constexpr (op == PackOp::kGather || op == PackOp::kUnpack) {
      if (threadIdx.x < rows) tile.nibbles[threadIdx.x] = load<uint8_t, 16>(nibbles_at);
      if constexpr (op == PackOp::kUnpack) {
        for (unsigned c = threadIdx.x; c < rows * kChunks; c += kThreads) {
          const unsigned i = c / kChunks, first = c % kChunks * kPairs;
          *reinterpret_cast<Vector<Pair<Bits>, kPairs>*>(tile.pairs + S::place(i, first)) =
              load<Pair<Bits>, kPairs>(pairs_at(i, first));
        }
      }
      __syncthreads();
    }
    const auto given = [&](int l) {
      if constexpr (op == PackOp::kGather || op == PackOp::kUnpack)
        return uint32_t(tile.nibbles[vector * kLanes + l].at[group / 2]) >> (group % 2 * 4) & 15;
      else
        return 0u;
    };

    if constexpr (op == PackOp::kUnpack) {
      if (!inside) continue;
      Vector<Bits, kLanes> out[4];
      S24_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        const Group<T> made = decode<T>(tile.pairs[S::place(vector, l, group)], given(l));
        S24_UNROLL
        for (int j = 0; j < 4; ++j) out[j].at[l] = member<T>(made, j);
      }
      S24_UNROLL
      for (int j = 0; j < 4; ++j) store(dense + at + step * j, out[j]);
      continue;
    }
    uint32_t made[kLanes / 4] = {};  // the nibbles of four lanes in the low halves of four bytes
    if (inside) {
      const Input<op, Bits> in = coming.read();
      if (n + 1 < end) coming.copy(dense, mask, first_at(n + 1), step);
      if constexpr (kRowsToo) {
        S24_UNROLL
        for (int j = 0; j < 4; ++j) pack_row_of_squares<T>(in.rows[j], at + step * j, rows_too);
      }
      const uint64_t row = outer * (len / 4) + n * kTileGroups + group, quartet = key.number(row * inner + i0, row) / 4;
      if constexpr (op == PackOp::kMasked && sizeof(Bits) == 2) {
        tile.template put_masked<T>(in.rows, in.allowed, vector, group, made);
      } else {
        const auto with = [&](int l) { return op == PackOp::kSoft ? times : in.mask_bytes(l); };
        tile.template put<op, T>(in.rows, vector, group, key, quartet, with, given, made);
      }
    }
    if constexpr (op != PackOp::kGather) tile.exchange(made);
    __syncthreads();
    tile.store_pairs(pairs_at(0, 0), len, rows);
    if constexpr (op != PackOp::kGather) {
      if (threadIdx.x < rows) store(nibbles_at, tile.nibbles[threadIdx.x]);
    }
  }
}

template <PackOp op, class T, bool kRowsToo>
cudaError_t launch(const PackArgs& a, const RowsToo<typename T::Bits>& rows_too, cudaStream_t stream) {
  using Bits = typename T::Bits;
  const Groups& g = a.groups;
  const int64_t tiles = g.len / (4 * kTileGroups), columns = ceil_div(g.inner, int64_t(Tile<Bits>::kInner));
  const int rounds = rounds_for(tiles * columns * g.outer, kRounds<op>, kFewer<op>);
  const dim3 grid(unsigned(columns), blocks_for(tiles, rounds), unsigned(g.outer));
  return start(pack_columns<op, T, kRowsToo>, grid, kThreads, 0, stream, static_cast<Bits*>(a.dense), a.mask, a.scale,
               static_cast<Bits*>(a.values), a.metadata, g, a.strided, unsigned(rounds), a.draws, rows_too);
}

template <PackOp op, class T>
struct LaunchColumns {
  static cudaError_t run(const PackArgs& a, cudaStream_t stream) {
    return launch<op, T, false>(a, {nullptr, nullptr}, stream);
  }
};

}  // namespace

bool fits_columns(const PackArgs& a) {
  const Groups& g = a.groups;
  const int lanes = a.dtype == Dtype::kF32 ? 4 : 8;
  constexpr int64_t kMost = 65535;
  const bool countable = g.outer * g.inner <= INT32_MAX && g.outer * g.len <= INT32_MAX;  // rows, of both forms
  return g.inner > 1 && countable && g.inner % lanes == 0 && g.len % (4 * kTileGroups) == 0 && g.outer <= kMost &&
         g.len / (4 * kTileGroups) <= kMost && aligned(a.dense, 16) && aligned(a.values, 16) && aligned(a.metadata, 16) &&
         aligned(a.mask, 8);
}

cudaError_t launch_pack_columns(const PackArgs& a, cudaStream_t stream) { return for_pack<LaunchColumns>(a, stream); }

cudaError_t launch_squared_relu_both(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream) {
  const bool half = columns.dtype == Dtype::kF16;
  if (columns.dtype == Dtype::kF32 || columns.groups.count() == 0 || !fits_columns(columns) || !aligned(rows.values, 8)) {
    const cudaError_t e = run(rows, stream);
    return e == cudaSuccess ? run(columns, stream) : e;
  }
  const RowsToo<uint16_t> too = {static_cast<uint16_t*>(rows.values), rows.metadata};
  cudaError_t e = half ? launch<PackOp::kSquaredRelu, F16, true>(columns, too, stream)
                       : launch<PackOp::kSquaredRelu, BF16, true>(columns, too, stream);
  if (e == cudaSuccess) e = append_metadata(rows, stream);
  return e == cudaSuccess ? append_metadata(columns, stream) : e;
}

}  // namespace cuda
}  // namespace s24
