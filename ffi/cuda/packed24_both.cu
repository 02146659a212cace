// A matrix packed to 2:4 along its rows and along its columns in one pass, by one mask.
//
// Operands: dense (outer, len, inner); values and metadata along inner and along len; a mask, which is given or, if it is
// searched, written as the best transposable one.
// Steps: a block loads 4x4 tiles and their mask, or searches it; a thread takes the pairs of the rows and of the columns from
// the same registers; columns are transposed through shared memory.
// Constraints: 16-bit floats in whole tiles with at most 2^32 - 1 elements. Other calls take one pass after the other. Groups
// in which a given mask is not transposable take a slower path.
#include "simt/transposable_pairs.h"
#include "packed24_tile.cuh"
#include "transposable.cuh"

namespace s24 {
namespace cuda {
namespace {

struct PackedPlace {
  uint16_t* values;
  uint8_t* metadata;
};

using Mask = Vector<uint32_t, 2>[4];  // bytes of eight columns

// Packs two tiles from the beginning, by any mask. It is not inlined, because this is rare. next: from one row of the array to
// the next.
template <class T>
__device__ __noinline__ Vector<uint32_t, 2> pack_by_any_mask(const uint16_t* dense, const uint8_t* mask, uint32_t next,
                                                             PackedPlace to, Tile<uint16_t>& tile, unsigned vector,
                                                             unsigned group) {
  Vector<uint32_t, 2> made = {};
  uint32_t nibbles = 0;
#pragma unroll 1
  for (int t = 0; t < 2; ++t) {
    Words rows[4], columns[4];
    uint32_t by[4], found = 0;
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      const auto words = load<uint32_t, 2>(reinterpret_cast<const uint32_t*>(dense + next * j + 4 * t));
      rows[j] = {words.at[0], words.at[1]};
      by[j] = load<uint32_t, 1>(reinterpret_cast<const uint32_t*>(mask + next * j + 4 * t)).at[0];
    }
    transpose_tile(rows, columns);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) {
      const PackedGroup row = pack_by_mask<T>(rows[i], by[i]), column = pack_by_mask<T>(columns[i], byte_of_each(by, i));
      nibbles |= row.nibble << (8 * i + 4 * t);
      found |= column.nibble << (8 * i);
      store(reinterpret_cast<uint32_t*>(to.values + next / 2 * i + 2 * t), Vector<uint32_t, 1>{{row.bits}});
      __builtin_memcpy(&tile.pairs[Tile<uint16_t>::place(vector, 4 * t + i, group)], &column.bits, sizeof column.bits);
    }
    (t == 0 ? made.at[0] : made.at[1]) = found;
  }
  S24_UNROLL
  for (int j = 0; j < 4; ++j) to.metadata[next / 8 * j] = uint8_t(nibbles >> (8 * j));
  return made;
}

// A block takes up to `rounds` tiles along the columns and reads the next one before it packs one. A thread takes two tiles
// of 4x4 that stand side by side.
template <bool kSearch, class T>
__global__ void __launch_bounds__(kThreads, 2)
    pack_both(const uint16_t* dense, uint8_t* mask, PackedPlace rows_to, PackedPlace columns_to, Groups g, unsigned rounds) {
  using S = Tile<uint16_t>;
  __shared__ S tiles[2];  // in turn, so that one barrier is enough
  const unsigned vector = threadIdx.x % kTileVectors, group = threadIdx.x / kTileVectors;
  const unsigned inner = unsigned(g.inner), len = unsigned(g.len), outer = blockIdx.z;
  const unsigned inner0 = blockIdx.x * S::kInner, i0 = inner0 + vector * S::kLanes;
  const unsigned packed0 = outer * inner + inner0, rows = min(unsigned(S::kInner), inner - inner0);  // of the packed columns
  const bool inside = i0 < inner;
  const auto first_at = [&](unsigned tile) { return (outer * len + 4 * (tile * kTileGroups + group)) * inner + i0; };
  FourRows next;
  Mask next_mask;
  const auto read = [&](uint32_t at) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      next[j] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(dense + (at + inner * j)));
      if constexpr (!kSearch) next_mask[j] = load<uint32_t, 2>(reinterpret_cast<const uint32_t*>(mask + (at + inner * j)));
    }
  };
  unsigned n = blockIdx.y * rounds;
  const unsigned end = min(n + rounds, len / (4 * kTileGroups));
  if (inside) read(first_at(n));
#pragma unroll 1
  for (; n < end; ++n) {
    S& tile = tiles[n % 2];
    const uint32_t at = first_at(n);
    FourRows in;
    Mask allowed;
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      in[j] = next[j];
      if constexpr (!kSearch) allowed[j] = next_mask[j];
    }
    if (inside && n + 1 < end) read(first_at(n + 1));
    uint32_t made[S::kLanes / 4] = {};  // the nibbles of four columns in the low halves of four bytes
    if (inside) {
      Words words[2][4];
      uint32_t by[2][4];
      S24_UNROLL
      for (int t = 0; t < 2; ++t) {
        S24_UNROLL
        for (int j = 0; j < 4; ++j) {
          words[t][j] = {in[j].at[2 * t], in[j].at[2 * t + 1]};
          if constexpr (!kSearch) by[t][j] = allowed[j].at[t];
        }
        if constexpr (kSearch) {
          TileRows<T> numbers;
          __builtin_memcpy(numbers, words[t], sizeof numbers);
          const uint32_t best = tile_mask<T>(numbers);
          S24_UNROLL
          for (int j = 0; j < 4; ++j) by[t][j] = row_bytes(best, j);
        }
      }
      const PackedPlace here = {rows_to.values + at / 2, rows_to.metadata + at / 8};
      if (kSearch || (is_transposable(by[0]) && is_transposable(by[1]))) {
        FourPairs along_rows[2];
        S24_UNROLL
        for (int t = 0; t < 2; ++t) {
          Words columns[4];
          transpose_tile(words[t], columns);
          along_rows[t] = take_pairs(words[t], pairs_of_rows(by[t]));
          const FourPairs along_columns = take_pairs(columns, pairs_of_columns(by[t]));
          made[t] = along_columns.nibbles;
          S24_UNROLL
          for (int i = 0; i < 4; ++i)
            __builtin_memcpy(&tile.pairs[S::place(vector, 4 * t + i, group)], &along_columns.bits[i], sizeof(uint32_t));
        }
        if constexpr (kSearch) {
          S24_UNROLL
          for (int j = 0; j < 4; ++j)
            store(reinterpret_cast<uint32_t*>(mask + (at + inner * j)), Vector<uint32_t, 2>{{by[0][j], by[1][j]}});
        }
        const uint32_t bytes = along_rows[0].nibbles | along_rows[1].nibbles << 4;
        S24_UNROLL
        for (int j = 0; j < 4; ++j) {
          const Vector<uint32_t, 2> pairs = {{along_rows[0].bits[j], along_rows[1].bits[j]}};
          store(reinterpret_cast<uint32_t*>(here.values + inner / 2 * j), pairs);
          here.metadata[inner / 8 * j] = uint8_t(bytes >> (8 * j));
        }
      } else {
        const Vector<uint32_t, 2> slowly = pack_by_any_mask<T>(dense + at, mask + at, inner, here, tile, vector, group);
        made[0] = slowly.at[0];
        made[1] = slowly.at[1];
      }
    }
    tile.exchange(made);
    __syncthreads();
    tile.store_pairs(reinterpret_cast<Pair<uint16_t>*>(columns_to.values) + (packed0 * (len / 4) + n * kTileGroups), len,
                     rows);
    if (threadIdx.x < rows)
      store(columns_to.metadata + ((packed0 + threadIdx.x) * (len / 8) + n * kTileGroups / 2), tile.nibbles[threadIdx.x]);
  }
}

template <bool kSearch>
cudaError_t launch(const PackArgs& rows, const PackArgs& columns, uint8_t* mask, cudaStream_t stream) {
  const Groups& g = columns.groups;
  const int64_t tiles = g.len / (4 * kTileGroups), across = ceil_div(g.inner, int64_t(Tile<uint16_t>::kInner));
  const int rounds = rounds_for(tiles * across * g.outer, 2);  // two tiles were fastest on an H200
  const dim3 grid(unsigned(across), blocks_for(tiles, rounds), unsigned(g.outer));
  const auto place = [](const PackArgs& a) { return PackedPlace{static_cast<uint16_t*>(a.values), a.metadata}; };
  const auto kernel = columns.dtype == Dtype::kF16 ? pack_both<kSearch, F16> : pack_both<kSearch, BF16>;
  cudaError_t e = start(kernel, grid, kThreads, 0, stream, static_cast<const uint16_t*>(columns.dense), mask, place(rows),
                        place(columns), g, unsigned(rounds));
  if (e == cudaSuccess) e = append_metadata(rows, stream);
  return e == cudaSuccess ? append_metadata(columns, stream) : e;
}

bool one_pass(const PackArgs& rows, const PackArgs& columns) {
  const int64_t elements = 4 * columns.groups.count();  // indices of 32 bits spare registers
  return columns.dtype != Dtype::kF32 && elements > 0 && elements <= UINT32_MAX && fits_columns(columns) &&
         aligned(rows.values, 8);
}

cudaError_t launch_one_by_one(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream) {
  const cudaError_t e = run(rows, stream);
  return e == cudaSuccess ? run(columns, stream) : e;
}

}  // namespace

cudaError_t launch_pack_masked_both(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream) {
  if (!one_pass(rows, columns)) return launch_one_by_one(rows, columns, stream);
  return launch<false>(rows, columns, const_cast<uint8_t*>(columns.mask), stream);
}

cudaError_t launch_transposable_pack(const PackArgs& rows, const PackArgs& columns, uint8_t* mask, cudaStream_t stream) {
  if (one_pass(rows, columns)) return launch<true>(rows, columns, mask, stream);
  const Groups& g = columns.groups;
  const TileArgs search = {TileOp::kTransposableMask, columns.dtype, columns.dense, mask, g.outer * g.len, g.inner};
  const cudaError_t e = run(search, stream);
  return e == cudaSuccess ? launch_one_by_one(rows, columns, stream) : e;
}

}  // namespace cuda
}  // namespace s24
