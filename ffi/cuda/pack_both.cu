// A matrix of 16-bit floats packed along its rows and its columns in one pass: by a given mask, or by the best transposable
// one, which is written, too. Compiled without contraction of products and sums.
#include "../core/tile_pairs.h"
#include "pack_tile.cuh"
#include "tile_search.cuh"

namespace s24 {
namespace cuda {
namespace {

struct PackedPlace {
  uint16_t* values;
  uint8_t* metadata;
};

using Mask = Vector<uint32_t, 2>[4];  // bytes of eight columns

// Four rows of a tile, their masks of four bytes each, and what is kept of it along its rows and along its columns.
struct TileOfWords {
  Words rows[4];
};
struct TileOfBytes {
  uint32_t rows[4];
};
struct KeptTile {
  FourPairs rows, columns;
};

// Never inlined: masks that keep another number than two are rare.
template <class T>
__device__ __noinline__ KeptTile keep_by_any_mask(TileOfWords tile, TileOfBytes mask) {
  KeptTile kept{};
  Words columns[4];
  transpose_tile(tile.rows, columns);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    uint32_t down = 0;
    S24_UNROLL
    for (int r = 0; r < 4; ++r) down |= (mask.rows[r] >> (8 * i) & 1u) << (8 * r);
    const KeptPair row = keep_masked<T>(tile.rows[i], mask.rows[i]), column = keep_masked<T>(columns[i], down);
    kept.rows.bits[i] = row.bits;
    kept.columns.bits[i] = column.bits;
    kept.rows.nibbles |= row.nibble << (8 * i);
    kept.columns.nibbles |= column.nibble << (8 * i);
  }
  return kept;
}

template <class T>
__device__ __forceinline__ KeptTile keep_tile(const TileOfWords& tile, const TileOfBytes& mask, bool transposable) {
  if (!transposable && !is_transposable(mask.rows)) return keep_by_any_mask<T>(tile, mask);
  Words columns[4];
  transpose_tile(tile.rows, columns);
  return {take_pairs(tile.rows, pairs_of_rows(mask.rows)), take_pairs(columns, pairs_of_columns(mask.rows))};
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
  const auto first_at = [&](unsigned tile) { return uint64_t(outer * len + 4 * (tile * kTileGroups + group)) * inner + i0; };
  FourRows next;
  Mask next_mask;
  const auto read = [&](uint64_t at) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      next[j] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(dense + at + uint64_t(inner) * j));
      if constexpr (!kSearch) next_mask[j] = load<uint32_t, 2>(reinterpret_cast<const uint32_t*>(mask + at + uint64_t(inner) * j));
    }
  };
  unsigned n = blockIdx.y * rounds;
  const unsigned end = min(n + rounds, len / (4 * kTileGroups));
  if (inside) read(first_at(n));
#pragma unroll 1
  for (; n < end; ++n) {
    S& tile = tiles[n % 2];
    const uint64_t at = first_at(n);
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
      KeptTile kept[2];
      S24_UNROLL
      for (int t = 0; t < 2; ++t) {
        TileOfWords words;
        S24_UNROLL
        for (int j = 0; j < 4; ++j) words.rows[j] = {in[j].at[2 * t], in[j].at[2 * t + 1]};
        if constexpr (kSearch) {
          TileRows<T> numbers;
          __builtin_memcpy(numbers, words.rows, sizeof numbers);
          const uint32_t best = tile_mask<T>(numbers);
          S24_UNROLL
          for (int j = 0; j < 4; ++j) allowed[j].at[t] = row_bytes(best, j);
        }
        kept[t] = keep_tile<T>(words, {{allowed[0].at[t], allowed[1].at[t], allowed[2].at[t], allowed[3].at[t]}}, kSearch);
        made[t] = kept[t].columns.nibbles;
        S24_UNROLL
        for (int i = 0; i < 4; ++i)
          __builtin_memcpy(&tile.pairs[S::place(vector, 4 * t + i, group)], &kept[t].columns.bits[i], sizeof(uint32_t));
      }
      const uint32_t bytes = kept[0].rows.nibbles | kept[1].rows.nibbles << 4;
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint64_t row = at + uint64_t(inner) * j;
        if constexpr (kSearch) store(reinterpret_cast<uint32_t*>(mask + row), allowed[j]);
        store(reinterpret_cast<uint32_t*>(rows_to.values + row / 2), Vector<uint32_t, 2>{{kept[0].rows.bits[j], kept[1].rows.bits[j]}});
        rows_to.metadata[row / 8] = uint8_t(bytes >> (8 * j));
      }
    }
    tile.exchange(made);
    __syncthreads();
    tile.store_pairs(reinterpret_cast<Pair<uint16_t>*>(columns_to.values) + (uint64_t(packed0) * (len / 4) + n * kTileGroups), len,
                     rows);
    if (threadIdx.x < rows)
      store(columns_to.metadata + (uint64_t(packed0 + threadIdx.x) * (len / 8) + n * kTileGroups / 2), tile.nibbles[threadIdx.x]);
  }
}

template <bool kSearch>
cudaError_t launch(const PackArgs& rows, const PackArgs& columns, uint8_t* mask, cudaStream_t stream) {
  const Groups& g = columns.groups;
  const int64_t tiles = g.len / (4 * kTileGroups), across = ceil_div(g.inner, int64_t(Tile<uint16_t>::kInner));
  const int rounds = rounds_for(tiles * across * g.outer, 4);
  const dim3 grid(unsigned(across), blocks_for(tiles, rounds), unsigned(g.outer));
  const auto place = [](const PackArgs& a) { return PackedPlace{static_cast<uint16_t*>(a.values), a.metadata}; };
  const auto kernel = columns.dtype == Dtype::kF16 ? pack_both<kSearch, F16> : pack_both<kSearch, BF16>;
  return start(kernel, grid, kThreads, 0, stream, static_cast<const uint16_t*>(columns.dense), mask, place(rows), place(columns),
               g, unsigned(rounds));
}

bool one_pass(const PackArgs& rows, const PackArgs& columns) {
  return columns.dtype != Dtype::kF32 && columns.groups.count() > 0 && fits_columns(columns) && aligned(rows.values, 8);
}

cudaError_t launch_one_by_one(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream) {
  const cudaError_t e = launch_pack(rows, nullptr, stream);
  return e == cudaSuccess ? launch_pack(columns, nullptr, stream) : e;
}

}  // namespace

cudaError_t launch_pack_masked_both(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream) {
  if (!one_pass(rows, columns)) return launch_one_by_one(rows, columns, stream);
  return launch<false>(rows, columns, const_cast<uint8_t*>(columns.mask), stream);
}

cudaError_t launch_transposable_pack(const PackArgs& rows, const PackArgs& columns, uint8_t* mask, cudaStream_t stream) {
  if (one_pass(rows, columns)) return launch<true>(rows, columns, mask, stream);
  const Groups& g = columns.groups;
  const cudaError_t e = launch_tile({TileOp::kTransposableMask, columns.dtype, columns.dense, mask, g.outer * g.len, g.inner}, stream);
  return e == cudaSuccess ? launch_one_by_one(rows, columns, stream) : e;
}

}  // namespace cuda
}  // namespace s24
