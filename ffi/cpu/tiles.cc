// Transposable masks and double pruning, by tiles of 4x4. Compiled once per instruction set, like maps.cc.
#include "../core/tiles.h"

#include "lanes.h"

namespace s24 {
namespace S24_ISA {

// kLanes tiles: quad r holds row r.
template <class B>
struct Tiles {
  Quad<B> row[4];
};

// Not a template: the search over all patterns is compiled once.
__attribute__((noinline)) void search_tiles(const Tiles<uint32_t>& in, Tiles<uint8_t>& out) {
  uint32_t masks[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    uint32_t w[16];
    S24_UNROLL
    for (int i = 0; i < 16; ++i) w[i] = in.row[i / 4].at[i % 4][l];
    masks[l] = best_tile_mask(w);
  }
  for (int i = 0; i < 16; ++i)
    for (int l = 0; l < kLanes; ++l) out.row[i / 4].at[i % 4][l] = uint8_t((masks[l] >> i) & 1u);
}

struct TransposableOp {
  template <class T>
  using Out = uint8_t;
  template <class T>
  static S24_HD void apply(const Tiles<typename T::Bits>& in, Tiles<uint8_t>& out) {
    Tiles<uint32_t> wide;
    for (int i = 0; i < 16; ++i)
      for (int l = 0; l < kLanes; ++l) wide.row[i / 4].at[i % 4][l] = T::to_f32(in.row[i / 4].at[i % 4][l]);
    search_tiles(wide, out);
  }
};

template <bool kColumnsFirst>
struct DoublePruneOp {
  template <class T>
  using Out = typename T::Bits;
  template <class T>
  static S24_HD void apply(const Tiles<typename T::Bits>& in, Tiles<typename T::Bits>& out) {
    for (int l = 0; l < kLanes; ++l) {
      typename T::Bits x[16];
      S24_UNROLL
      for (int i = 0; i < 16; ++i) x[i] = in.row[i / 4].at[i % 4][l];
      double_prune_tile<T, kColumnsFirst>(x);
      S24_UNROLL
      for (int i = 0; i < 16; ++i) out.row[i / 4].at[i % 4][l] = x[i];
    }
  }
};

template <class T, class Op>
void map_tiles(const TileArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  using Out = typename Op::template Out<T>;
  const Groups row = {1, a.cols, 1};  // one row of the matrix, groups of four columns
  Tiles<Bits> in;
  Tiles<Out> out;
  for (int64_t tile_row = begin; tile_row < end; ++tile_row) {
    const Bits* w = static_cast<const Bits*>(a.w) + tile_row * 4 * a.cols;
    Out* o = static_cast<Out*>(a.out) + tile_row * 4 * a.cols;
    for (int64_t q = 0; q < a.cols / 4; q += kLanes) {
      const int64_t n = a.cols / 4 - q < kLanes ? a.cols / 4 - q : kLanes;
      for (int r = 0; r < 4; ++r) load_quads(w + r * a.cols, row, q, n, in.row[r]);
      Op::template apply<T>(in, out);
      for (int r = 0; r < 4; ++r) store_quads(o + r * a.cols, row, q, n, out.row[r]);
    }
  }
}

template <class T>
void tile_typed(const TileArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case TileOp::kTransposableMask: return map_tiles<T, TransposableOp>(a, begin, end);
    case TileOp::kPruneColumnsFirst: return map_tiles<T, DoublePruneOp<true>>(a, begin, end);
    case TileOp::kPruneRowsFirst: return map_tiles<T, DoublePruneOp<false>>(a, begin, end);
  }
}

void tile(const TileArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return tile_typed<F32>(a, begin, end);
    case Dtype::kBF16: return tile_typed<BF16>(a, begin, end);
    case Dtype::kF16: return tile_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
