// The backward pass of an activation that was saved packed along features.
//
// A tile of tokens and features is read once: for each four tokens their rows of Y2 and dY1 are unpacked into a cache, from
// which they are packed along tokens.
#include "../core/saved.h"
#include "packed24_block.h"
#include "packed24_tile.h"

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kTile = int(kSavedLanes);

// The same features of the four tokens of a group.
template <class B>
struct FourRows {
  alignas(64) B at[4][kTile];
};

// A feature of a tile that also goes to a row of dense ones.
struct DenseFeature {
  int32_t lane, row;
};

// kRow groups of a token: packed Y2 and dY2 give packed dY1, and the rows of Y2 and dY1.
template <class T, Slope slope>
S24_HD void unpack_run(const typename T::Bits* values, const uint8_t nibbles[kRow], const typename T::Bits* dy2,
                       typename T::Bits* dy1, typename T::Bits* y2_row, typename T::Bits* dy1_row) {
  using Bits = typename T::Bits;
  for (int l = 0; l < kRow; l += kLanes<Bits>) {
    Packed<Bits> y, d;
    Quad<Bits> dense;
    load_pairs(values + 2 * l, y);
    load_block<true, true>(dy2 + 4 * l, 1, dense);
    S24_LOOP
    for (int i = 0; i < kLanes<Bits>; ++i) {
      const Bits x[4] = {dense.at[0][i], dense.at[1][i], dense.at[2][i], dense.at[3][i]};
      Bits given[2];
      y.nibbles[i] = d.nibbles[i] = nibbles[l + i];
      take_nibble(x, y.nibbles[i], given);
      for (int k = 0; k < 2; ++k) d.pairs[k][i] = given[k];
    }
    for (int k = 0; k < 2; ++k) {
      S24_LOOP
      for (int i = 0; i < kLanes<Bits>; ++i) d.pairs[k][i] = sloped<T, slope>(y.pairs[k][i], d.pairs[k][i]);
    }
    store_pairs(d, dy1 + 2 * l);
    unpack_block<T>(y, dense);
    store_block<true, true>(y2_row + 4 * l, 1, dense);
    unpack_block<T>(d, dense);
    store_block<true, true>(dy1_row + 4 * l, 1, dense);
  }
}

// Asks for what unpack_token reads and overwrites. Into the second-level cache: rows whose distance is a power of two share few
// places in the first.
template <class B>
S24_HD void fetch_token(const SavedArgs& a, int64_t token, int64_t first, int64_t features) {
  constexpr int64_t kLine = 64;
  const int64_t at = (token * a.features + first) * int64_t(sizeof(B)), size = features * int64_t(sizeof(B));
  const char *dy2 = static_cast<const char*>(a.dy2) + at, *values = static_cast<const char*>(a.values) + at / 2;
  char* dy1 = static_cast<char*>(a.dy1) + at / 2;
  for (int64_t l = 0; l < size; l += kLine) __builtin_prefetch(dy2 + l, 0, 2);
  for (int64_t l = 0; l < size / 2; l += kLine) {
    __builtin_prefetch(values + l, 0, 2);
    __builtin_prefetch(dy1 + l, 1, 2);
  }
  __builtin_prefetch(a.metadata + token * ceil_div(a.features, 8) + first / 8, 0, 2);
}

template <class T, Slope slope>
S24_HD void unpack_token(const SavedArgs& a, int64_t token, int64_t first, int64_t features, typename T::Bits* y2_row,
                         typename T::Bits* dy1_row) {
  using Bits = typename T::Bits;
  const int64_t at = token * a.features + first;
  const Bits* values = static_cast<const Bits*>(a.values) + at / 2;
  const Bits* dy2 = static_cast<const Bits*>(a.dy2) + at;
  Bits* dy1 = static_cast<Bits*>(a.dy1) + at / 2;
  const uint8_t* metadata = a.metadata + token * ceil_div(a.features, 8) + first / 8;
  for (int64_t l = 0; l < features; l += 4 * kRow) {
    const int64_t n = (features - l) / 4;
    uint8_t nibbles[kRow];
    load_nibbles(metadata + l / 8, n < kRow ? n : int64_t{kRow}, nibbles);
    if (n >= kRow) {
      unpack_run<T, slope>(values + l / 2, nibbles, dy2 + l, dy1 + l / 2, y2_row + l, dy1_row + l);
      continue;
    }
    Bits some[2 * kRow], given[4 * kRow], made[2 * kRow];
    __builtin_memcpy(some, values + l / 2, size_t(2 * n) * sizeof(Bits));
    __builtin_memcpy(given, dy2 + l, size_t(4 * n) * sizeof(Bits));
    unpack_run<T, slope>(some, nibbles, given, made, y2_row + l, dy1_row + l);
    __builtin_memcpy(dy1 + l / 2, made, size_t(2 * n) * sizeof(Bits));
  }
}

// Group k of a tile along tokens.
template <class T>
S24_HD void pack_along(const FourRows<typename T::Bits>& rows, int64_t k, int64_t features,
                      PackedTile<typename T::Bits, kTile>& to) {
  using Bits = typename T::Bits;
  for (int64_t l = 0; l < features; l += kLanes<Bits>) {
    Quad<Bits> in;
    Packed<Bits> out;
    load_block<false, true>(rows.at[0] + l, kTile, in);
    pack_block<T, PackOp::kPlain>(in, in, out);
    to.put(k, l, out.pairs);
    to.put_nibbles(k, l, out.nibbles);
  }
}

template <class B>
S24_HD void store_dense(const FourRows<B>& rows, const DenseFeature* some, int64_t n, B* to, int64_t tokens) {
  for (int64_t i = 0; i < n; ++i) {
    const int32_t lane = some[i].lane;
    const B four[4] = {rows.at[0][lane], rows.at[1][lane], rows.at[2][lane], rows.at[3][lane]};
    __builtin_memcpy(to + some[i].row * tokens, four, sizeof four);
  }
}

template <class T, Slope slope>
void backward(const SavedArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  const int64_t groups = a.tokens / 4, bytes = ceil_div(groups, 2);
  const auto token = [&](int64_t q, int64_t j) { return a.strided ? q + j * groups : 4 * q + j; };
  FourRows<Bits> y2, dy1;
  PackedTile<Bits, kTile> tiles[2];
  DenseFeature dense[kTile];
  for (int64_t unit = begin; unit < end; ++unit) {
    const PackTile t = pack_tile<kSavedLanes>({1, a.tokens, a.features}, unit);
    const int64_t count = t.q1 - t.q0;
    int64_t kept = 0;
    for (int64_t l = 0; l < t.n; ++l) {
      const int32_t rank = a.ranks[t.i0 + l];
      if (rank >= 0 && rank < a.dense_rows) dense[kept++] = {int32_t(l), rank};
    }
    for (auto& tile : tiles) tile.clear_nibbles(count);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t q = t.q0 + k;
      for (int64_t j = 0; j < 4; ++j) {
        if (k + 1 < count) fetch_token<Bits>(a, token(q + 1, j), t.i0, t.n);
        unpack_token<T, slope>(a, token(q, j), t.i0, t.n, y2.at[j], dy1.at[j]);
      }
      pack_along<T>(y2, k, t.n, tiles[0]);
      pack_along<T>(dy1, k, t.n, tiles[1]);
      store_dense(y2, dense, kept, static_cast<Bits*>(a.y2_along.dense) + 4 * q, a.tokens);
      store_dense(dy1, dense, kept, static_cast<Bits*>(a.dy1_along.dense) + 4 * q, a.tokens);
    }
    const auto store = [&](const PackedTile<Bits, kTile>& tile, const AlongTokens& to) {
      tile.store_values(static_cast<Bits*>(to.values) + t.i0 * 2 * groups + 2 * t.q0, 2 * groups, t.n, count,
                        a.tokens * a.features / 2);
      tile.store_metadata(to.metadata + t.i0 * bytes + t.q0 / 2, bytes, t.n, count);
    };
    store(tiles[0], a.y2_along);
    store(tiles[1], a.dy1_along);
  }
}

template <class T>
void backward_typed(const SavedArgs& a, int64_t begin, int64_t end) {
  if (a.slope == Slope::kRelu) return backward<T, Slope::kRelu>(a, begin, end);
  backward<T, Slope::kSquaredRelu>(a, begin, end);
}

}  // namespace

template <>
void run(const SavedArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return backward_typed<F32>(a, begin, end);
    case Dtype::kBF16: return backward_typed<BF16>(a, begin, end);
    case Dtype::kF16: return backward_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
