// Transposable masks and double pruning, by tiles of 4x4.
#include "../core/transposable.h"

#include "lanes.h"

namespace s24 {
namespace S24_ISA {

// Quad r holds row r of the tiles.
template <class B>
struct Tiles {
  Quad<B> row[4];
};

// Not a template: the search over all patterns is compiled once. words[i]: entry i of kWidth tiles.
__attribute__((noinline)) void search_tiles(const uint32_t words[16][kWidth], uint32_t masks[kWidth]) {
  for (int l = 0; l < kWidth; ++l) {
    uint32_t w[16];
    S24_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = words[i][l];
    masks[l] = best_tile_mask(w);
  }
}

template <class T>
struct TransposableOp {
  using Bits = typename T::Bits;
  using Out = uint8_t;
  static S24_HD void apply(const Tiles<Bits>& in, uint8_t* to, int64_t to_step) {
    constexpr int kCount = kLanes<Bits>;
    uint32_t masks[kCount];
    for (int first = 0; first < kCount; first += kWidth) {
      uint32_t words[16][kWidth];
      for (int i = 0; i < 16; ++i)
        for (int l = 0; l < kWidth; ++l) words[i][l] = T::to_f32(in.row[i / 4].at[i % 4][first + l]);
      search_tiles(words, masks + first);
    }
    for (int r = 0; r < 4; ++r) {
      uint32_t bytes[kCount];  // the product spreads four bits over four bytes
      for (int l = 0; l < kCount; ++l) bytes[l] = (((masks[l] >> (4 * r)) & 0xfu) * 0x00204081u) & 0x01010101u;
      __builtin_memcpy(to + r * to_step, bytes, sizeof bytes);
    }
  }
};

template <class T, bool kColumnsFirst>
struct DoublePruneOp {
  using Bits = typename T::Bits;
  using Out = Bits;
  static S24_HD void apply(const Tiles<Bits>& in, Bits* to, int64_t to_step) {
    Tiles<Bits> out;
    for (int l = 0; l < kLanes<Bits>; ++l) {
      Bits x[16];
      S24_UNROLL
      for (int i = 0; i < 16; ++i) x[i] = in.row[i / 4].at[i % 4][l];
      double_prune_tile<T, kColumnsFirst>(x);
      S24_UNROLL
      for (int i = 0; i < 16; ++i) out.row[i / 4].at[i % 4][l] = x[i];
    }
    for (int r = 0; r < 4; ++r) store_block<true, true>(to + r * to_step, 1, out.row[r]);
  }
};

template <class T, class Op>
void map_tiles(const TileArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  using Out = typename Op::Out;
  constexpr int64_t kCount = kLanes<Bits>, kStaged = 4 * kCount;
  Bits in[4 * kStaged] = {};
  Out out[4 * kStaged];
  for (int64_t tile_row = begin; tile_row < end; ++tile_row) {
    for (int64_t at = 0; at < a.cols; at += kStaged) {
      const int64_t n = a.cols - at < kStaged ? a.cols - at : kStaged;
      const Bits* from = static_cast<const Bits*>(a.w) + tile_row * 4 * a.cols + at;
      Out* to = static_cast<Out*>(a.out) + tile_row * 4 * a.cols + at;
      const bool whole = n == kStaged;
      if (!whole) copy_groups<false>(from, a.cols, n, in, kStaged);
      Tiles<Bits> tiles;
      for (int r = 0; r < 4; ++r)
        load_block<true, true>(whole ? from + r * a.cols : in + r * kStaged, 1, tiles.row[r]);
      Op::apply(tiles, whole ? to : out, whole ? a.cols : kStaged);
      if (!whole) copy_groups<false>(out, kStaged, n, to, a.cols);
    }
  }
}

template <class T>
void tile_typed(const TileArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case TileOp::kTransposableMask: return map_tiles<T, TransposableOp<T>>(a, begin, end);
    case TileOp::kPruneColumnsFirst: return map_tiles<T, DoublePruneOp<T, true>>(a, begin, end);
    case TileOp::kPruneRowsFirst: return map_tiles<T, DoublePruneOp<T, false>>(a, begin, end);
  }
}

template <>
void run(const TileArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return tile_typed<F32>(a, begin, end);
    case Dtype::kBF16: return tile_typed<BF16>(a, begin, end);
    case Dtype::kF16: return tile_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
