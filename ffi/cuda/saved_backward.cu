// The backward pass of an activation that was saved packed along features.
//
// Operands: Y2 packed (tokens, features) along features and dY2 (tokens, features), which is dense. Results: dY1 on the
// support of Y2; both cut to the two largest of four tokens and packed along tokens; their chosen features as dense rows.
// Steps: a block loads tiles of dY2 with the kept pairs of Y2, multiplies the slope of the activation with dY2, stores dY1 and
// the dense rows, cuts along tokens, and transposes through shared memory.
// Constraints: 16-bit floats, tokens a multiple of kSavedTokens, features of 8, fewer elements than kSavedLimit. Nothing dense of
// this size is read or written but dY2.
#include <algorithm>
#include "metadata_order.cuh"
#include "packed24_tile.cuh"

namespace s24 {
namespace cuda {
namespace {

// A thread's eight features of the four tokens of a group, packed along features.
struct PackedRows {
  Vector<uint32_t, 2> pairs[4];
  __device__ __forceinline__ void unpack(const Places (&places)[4][2], FourRows& rows) const {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      S24_UNROLL
      for (int i = 0; i < 2; ++i) {
        rows[j].at[2 * i] = select_bytes(pairs[j].at[i], 0, places[j][i].put);
        rows[j].at[2 * i + 1] = select_bytes(pairs[j].at[i], 0, places[j][i].put >> 16);
      }
    }
  }
};

// A thread's features of its tokens.
struct SavedInput {
  FourRows dy2;
  PackedRows y2;
  uint32_t nibbles[4];  // a byte of metadata each

  // at: of the first token's features, in eights. next: from one token to the next.
  __device__ __forceinline__ void read(const SavedArgs& a, uint32_t at, uint32_t next) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j, at += next) {
      dy2[j] = static_cast<const Vector<uint32_t, 4>*>(a.dy2)[at];
      y2.pairs[j] = static_cast<const Vector<uint32_t, 2>*>(a.values)[at];
      nibbles[j] = a.metadata[at];
    }
  }
};

// Lanes of `dense` (a bit each) to their rows; to: of a thread's tokens in row 0.
template <class T>
__device__ __forceinline__ void store_dense(const FourRows& rows, uint32_t dense, const int32_t* ranks, uint16_t* to,
                                            uint64_t tokens) {
  if (dense == 0) return;
  S24_UNROLL
  for (int l = 0; l < 8; ++l) {
    if ((dense >> l & 1) == 0) continue;
    const Group<T> group = group_of<T>(rows, l);
    store(reinterpret_cast<uint32_t*>(to + uint32_t(ranks[l]) * tokens), Vector<uint32_t, 2>{{group.low, group.high}});
  }
}

// Strips that blocks share, and tiles that a block takes: what was fastest on an H200.
constexpr unsigned kAcross = 4;
constexpr int kRounds = 2;

// A block takes up to `rounds` tiles along tokens and reads the next one before it packs one.
template <class Order, class T, Slope slope>
__global__ void __launch_bounds__(kThreads, 2) saved_backward(const __grid_constant__ SavedArgs a, unsigned rounds) {
  using S = Tile<uint16_t>;
  static_assert(kTileRows == S::kInner, "a block writes the metadata of its rows");
  __shared__ S tiles[2][2];  // of Y2 and dY1; in turn, so that one barrier is enough
  __shared__ int32_t ranks[S::kInner];
  __shared__ Places places_of[16];  // of a nibble; each bank of memory holds one word of them
  const unsigned vector = threadIdx.x % kTileVectors, group = threadIdx.x / kTileVectors;
  const unsigned features = unsigned(a.features), tokens = unsigned(a.tokens);
  const PlaceInGrid here = place_in_grid<kAcross>();
  const unsigned inner0 = here.strip * S::kInner, i0 = inner0 + vector * S::kLanes;
  const unsigned rows = inner0 < features ? min(unsigned(S::kInner), features - inner0) : 0;  // of the packed form
  const bool inside = i0 < features;
  const uint32_t step = (a.strided ? tokens / 4 : 1) * (features / 8);  // from one token of a group to the next, in eights
  const auto first_at = [&](unsigned tile) {
    const unsigned q = tile * kTileGroups + group;
    return (a.strided ? q : 4 * q) * (features / 8) + i0 / 8;
  };
  unsigned n = here.tiles * rounds;
  const unsigned end = min(n + rounds, tokens / (4 * kTileGroups));
  SavedInput next;
  if (inside) next.read(a, first_at(n), step);
  if (threadIdx.x < 16) places_of[threadIdx.x] = Places::of(threadIdx.x);
  if (threadIdx.x < S::kInner) {
    const int32_t rank = threadIdx.x < rows ? a.ranks[inner0 + threadIdx.x] : -1;
    ranks[threadIdx.x] = rank < a.dense_rows ? rank : -1;
  }
  __syncthreads();
  uint32_t dense = 0;
  S24_UNROLL
  for (int l = 0; l < S::kLanes; ++l) dense |= uint32_t(ranks[vector * S::kLanes + l] >= 0) << l;
#pragma unroll 1
  for (; n < end; ++n) {
    const uint32_t at = first_at(n);
    const SavedInput in = next;
    if (inside && n + 1 < end) next.read(a, first_at(n + 1), step);
    S(&both)[2] = tiles[n % 2];
    constexpr uint32_t kPadding = Order::kPaddingNibble * 0x01010101u;
    uint32_t made[2][2] = {{kPadding, kPadding}, {kPadding, kPadding}};
    if (inside) {
      Places places[4][2];
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        S24_UNROLL
        for (int i = 0; i < 2; ++i) places[j][i] = places_of[in.nibbles[j] >> (4 * i) & 15];
      }
      const unsigned first = 4 * (n * kTileGroups + group);
      const auto keep_dense = [&](const FourRows& of, const AlongTokens& to) {
        store_dense<T>(of, dense, ranks + vector * S::kLanes, static_cast<uint16_t*>(to.dense) + first, tokens);
      };
      const auto put = [&](const FourRows& of, int operand) {
        const auto none = [](int) { return 0u; };
        both[operand].template put<PackOp::kPlain, T>(of, vector, group, Key{0, 0}, 0, none, none, made[operand]);
      };
      PackedRows dy1;
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        S24_UNROLL
        for (int i = 0; i < 2; ++i) {
          const uint32_t given = select_bytes(in.dy2[j].at[2 * i], in.dy2[j].at[2 * i + 1], places[j][i].take);
          dy1.pairs[j].at[i] = sloped_pair<T, slope>(in.y2.pairs[j].at[i], given);
        }
        static_cast<Vector<uint32_t, 2>*>(a.dy1)[at + step * j] = dy1.pairs[j];
      }
      FourRows all;
      in.y2.unpack(places, all);
      keep_dense(all, a.y2_along);
      put(all, 0);
      dy1.unpack(places, all);
      keep_dense(all, a.dy1_along);
      put(all, 1);
    }
    both[0].exchange(made[0]);
    both[1].exchange(made[1]);
    __syncthreads();
    const auto write = [&](auto work) {
      work(both[0], a.y2_along, 64);
      work(both[1], a.dy1_along, 128);
    };
    const uint64_t packed = uint64_t(inner0) * (tokens / 4) + n * kTileGroups;  // group
    S::for_pieces(tokens, rows, [&](uint64_t more, unsigned i) {
      const uint64_t at = packed + more;
      write([&](const S& tile, const AlongTokens& to, int) { tile.store_piece(static_cast<Pair<uint16_t>*>(to.values) + at, i); });
    });
    if (threadIdx.x < rows) {
      const uint64_t byte = (packed + threadIdx.x * uint64_t(tokens / 4)) / 2;
      write([&](const S& tile, const AlongTokens& to, int) { store(to.metadata + byte, tile.nibbles[threadIdx.x]); });
    }
    write([&](const S& tile, const AlongTokens& to, int from) {  // other threads than those of rows
      const int thread = int(threadIdx.x) - from;
      if (to.behind == nullptr || thread < 0 || thread >= 64) return;
      using Share = typename Order::Of16Bits;
      const Share own = Share::of(thread);
      const auto* const words = reinterpret_cast<const uint32_t*>(tile.nibbles);
      const int64_t place = Share::at(inner0 + own.row, n * kTileGroups + 8 * own.word, tokens);
      store(reinterpret_cast<uint32_t*>(to.behind + place / 2), own.made([&](int row, int w) { return words[4 * row + w]; }));
    });
  }
}

template <class Order, class T>
cudaError_t launch(const SavedArgs& a, cudaStream_t stream) {
  const int64_t tiles = a.tokens / (4 * kTileGroups), columns = ceil_div(a.features, Order::kRows) * (Order::kRows / kTileRows);
  const int rounds = int(std::max<int64_t>(rounds_for(tiles * columns, kRounds), ceil_div(tiles, kMostTiles)));
  const dim3 grid(unsigned(columns), blocks_for(tiles, rounds));
  const auto relu = saved_backward<Order, T, Slope::kRelu>, squared = saved_backward<Order, T, Slope::kSquaredRelu>;
  const auto kernel = a.slope == Slope::kRelu ? relu : squared;
  return start(kernel, grid, kThreads, 0, stream, a, unsigned(rounds));
}

}  // namespace

static_assert(kSavedTokens == 4 * kTileGroups, "a tile");

template <>
cudaError_t run(const SavedArgs& a, cudaStream_t stream) {
  if (a.tokens * a.features == 0) return cudaSuccess;
  const cudaError_t e = with_order([&](auto order) {
    using Order = decltype(order);
    return a.dtype == Dtype::kF16 ? launch<Order, F16>(a, stream) : launch<Order, BF16>(a, stream);
  });
  if (e != cudaSuccess || a.behind == nullptr) return e;
  return launch_metadata(a.metadata, a.behind, a.tokens, a.features, 2, stream);
}

}  // namespace cuda
}  // namespace s24
