// Packing and unpacking where groups lie across rows. Compiled without contraction of products and sums.
#include "pack_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

// The same array packed along its rows, too; null: not asked for.
template <class Bits>
struct RowsToo {
  Bits* values;
  uint8_t* metadata;
};

// A thread's two groups in a row of eight 16-bit elements, the first of which is number `at` of the array.
template <PackOp op, class T>
__device__ __forceinline__ void pack_row(const Vector<uint16_t, 8>& in, int64_t at, const RowsToo<uint16_t>& to) {
  Vector<Pair<uint16_t>, 2> kept;
  uint32_t byte = 0;
  S24_UNROLL
  for (int i = 0; i < 2; ++i) {
    const auto group = Group<T>::of(in.at + 4 * i);
    byte |= encode<op, T>(group, 0, 0, Draw<0>(), kept.at[i]) << (4 * i);
  }
  store(reinterpret_cast<Pair<uint16_t>*>(to.values) + at / 4, kept);
  to.metadata[at / 8] = uint8_t(byte);
}

template <PackOp op, class T, bool kRowsToo>
__global__ void __launch_bounds__(kThreads) pack_columns(typename T::Bits* dense, const uint8_t* mask,
                                                         typename T::Bits* values, uint8_t* metadata, Groups g,
                                                         const uint32_t* key_words, RowsToo<typename T::Bits> rows_too) {
  using Bits = typename T::Bits;
  using S = Tile<Bits>;
  constexpr int kLanes = S::kLanes, kPairs = S::kPairs, kChunks = S::kChunks;
  __shared__ S tile;
  const int vector = threadIdx.x % kTileVectors, group = threadIdx.x / kTileVectors;
  const int64_t inner0 = int64_t(blockIdx.x) * S::kInner, group0 = int64_t(blockIdx.y) * kTileGroups, o = blockIdx.z;
  const int64_t i0 = inner0 + vector * kLanes, q = group0 + group;
  const bool inside = i0 < g.inner;
  const int64_t at = (o * g.len + 4 * q) * g.inner + i0;
  const int64_t packed0 = (o * g.inner + inner0) * g.len;  // dense elements before the tile's first packed row
  const int rows = int(min(int64_t(S::kInner), g.inner - inner0));

  if constexpr (op == PackOp::kGather || op == PackOp::kUnpack) {
    if (int(threadIdx.x) < rows)
      tile.nibbles[threadIdx.x] = load<uint8_t, 16>(metadata + (packed0 + threadIdx.x * g.len) / 8 + group0 / 2);
    if constexpr (op == PackOp::kUnpack) {
      for (int c = threadIdx.x; c < rows * kChunks; c += kThreads) {
        const int i = c / kChunks, first = c % kChunks * kPairs;
        *reinterpret_cast<Vector<Pair<Bits>, kPairs>*>(tile.pairs + S::place(i, first)) =
            load<Pair<Bits>, kPairs>(reinterpret_cast<Pair<Bits>*>(values + (packed0 + i * g.len) / 2) + group0 + first);
      }
    }
    __syncthreads();
  }
  const auto given = [&](int l) { return uint32_t(tile.nibbles[vector * kLanes + l].at[group / 2]) >> (group % 2 * 4) & 15; };

  if constexpr (op == PackOp::kUnpack) {
    if (!inside) return;
    Vector<Bits, kLanes> out[4];
    S24_UNROLL
    for (int l = 0; l < kLanes; ++l) {
      const Group<T> made = decode<T>(tile.pairs[S::place(vector * kLanes + l, group)], given(l));
      S24_UNROLL
      for (int j = 0; j < 4; ++j) out[j].at[l] = member<T>(made, j);
    }
    S24_UNROLL
    for (int j = 0; j < 4; ++j) store(dense + at + j * g.inner, out[j]);
    return;
  } else {
    uint32_t own = 0;  // the nibbles of this thread's lanes
    if (inside) {
      const Key key = read_key(key_words);
      Vector<Bits, kLanes> in[4];
      Vector<uint8_t, kLanes> allowed[4];
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        in[j] = load<Bits, kLanes>(dense + at + j * g.inner);
        if constexpr (op == PackOp::kMasked) allowed[j] = load<uint8_t, kLanes>(mask + at + j * g.inner);
        if constexpr (kRowsToo) pack_row<op, T>(in[j], at + j * g.inner, rows_too);
      }
      S24_UNROLL
      for (int l0 = 0; l0 < kLanes; l0 += 4) {
        const auto draws = QuartetDraw<kDraws<op>>::of(key, (o * (g.len / 4) + q) * g.inner + i0 + l0);
        S24_UNROLL
        for (int l = l0; l < l0 + 4; ++l) {
          const Bits x[4] = {in[0].at[l], in[1].at[l], in[2].at[l], in[3].at[l]};
          uint32_t mask_bytes = 0;
          if constexpr (op == PackOp::kMasked) {
            S24_UNROLL
            for (int j = 0; j < 4; ++j) mask_bytes |= uint32_t(allowed[j].at[l]) << (8 * j);
          }
          Pair<Bits> pair;
          uint32_t nibble = 0;
          if constexpr (op == PackOp::kGather) nibble = given(l);
          own |= encode<op, T>(Group<T>::of(x), mask_bytes, nibble, draws.group[l - l0], pair) << (4 * l);
          tile.pairs[S::place(vector * kLanes + l, group)] = pair;
        }
      }
    }
    if constexpr (op != PackOp::kGather) tile.gather_nibbles(own);
    __syncthreads();
    tile.store_pairs(values + packed0 / 2 + 2 * group0, g.len, rows);
    if constexpr (op != PackOp::kGather) tile.store_nibbles(metadata + packed0 / 8 + group0 / 2, g.len, rows);
  }
}

template <PackOp op, class T, bool kRowsToo>
cudaError_t launch(const PackArgs& a, const uint32_t* key, const RowsToo<typename T::Bits>& rows_too, cudaStream_t stream) {
  using Bits = typename T::Bits;
  const Groups& g = a.groups;
  const dim3 grid(blocks_for(g.inner, Tile<Bits>::kInner), unsigned(g.len / (4 * kTileGroups)), unsigned(g.outer));
  return start(pack_columns<op, T, kRowsToo>, grid, kThreads, 0, stream, static_cast<Bits*>(a.dense), a.mask,
               static_cast<Bits*>(a.values), a.metadata, g, key, rows_too);
}

template <PackOp op, class T>
struct Launch {
  static cudaError_t run(const PackArgs& a, const uint32_t* key, cudaStream_t stream) {
    return launch<op, T, false>(a, key, {nullptr, nullptr}, stream);
  }
};

}  // namespace

bool fits_columns(const PackArgs& a) {
  const Groups& g = a.groups;
  const int lanes = a.dtype == Dtype::kF32 ? 4 : 8;
  constexpr int64_t kMost = 65535;
  return g.inner > 1 && g.inner % lanes == 0 && g.len % (4 * kTileGroups) == 0 && g.len / (4 * kTileGroups) <= kMost &&
         g.outer <= kMost && aligned(a.dense, 16) && aligned(a.values, 16) && aligned(a.metadata, 16) &&
         aligned(a.mask, 8);
}

cudaError_t launch_pack_columns(const PackArgs& a, const uint32_t* key, cudaStream_t stream) {
  return for_pack<Launch>(a, key, stream);
}

cudaError_t launch_squared_relu_both(const PackArgs& rows, const PackArgs& columns, cudaStream_t stream) {
  const bool half = columns.dtype == Dtype::kF16;
  if (columns.dtype == Dtype::kF32 || columns.groups.count() == 0 || !fits_columns(columns) || !aligned(rows.values, 8)) {
    const cudaError_t e = launch_pack(rows, nullptr, stream);
    return e == cudaSuccess ? launch_pack(columns, nullptr, stream) : e;
  }
  const RowsToo<uint16_t> too = {static_cast<uint16_t*>(rows.values), rows.metadata};
  return half ? launch<PackOp::kSquaredRelu, F16, true>(columns, nullptr, too, stream)
              : launch<PackOp::kSquaredRelu, BF16, true>(columns, nullptr, too, stream);
}

}  // namespace cuda
}  // namespace s24
