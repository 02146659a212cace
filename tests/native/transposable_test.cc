// Kernels of 4x4 tiles, thread by thread on a CPU, against the definitions of ffi/core.
// Prints one line per check: its name, and how many cases were wrong.
#include <vector>

#include "../../ffi/core/transposable.h"
#include "../../ffi/cuda/launch.h"
#include "checks.h"

using namespace s24;

template <class T>
static void tile_case(const std::string& name, Dtype dtype, int64_t rows, int64_t cols) {
  using Bits = typename T::Bits;
  alignas(64) static Bits w[1 << 14], y[1 << 14];
  long wrong = 0, wrong_pruned = 0;
  for (int64_t i = 0; i < rows * cols; ++i) w[i] = i / cols < rows / 2 ? draw<Bits>() : similar<Bits>();
  for (const TileOp op : {TileOp::kTransposableMask, TileOp::kPruneColumnsFirst, TileOp::kPruneRowsFirst}) {
    cuda::run(TileArgs{op, dtype, w, y, rows, cols}, nullptr);
    for (int64_t t = 0; t < rows / 4 * (cols / 4); ++t) {
      const auto at = [&](int i) { return (t / (cols / 4) * 4 + i / 4) * cols + t % (cols / 4) * 4 + i % 4; };
      Bits x[16];
      uint32_t wide[16];
      for (int i = 0; i < 16; ++i) x[i] = w[at(i)], wide[i] = T::to_f32(x[i]);
      if (op == TileOp::kPruneColumnsFirst) double_prune_tile<T, true>(x);
      if (op == TileOp::kPruneRowsFirst) double_prune_tile<T, false>(x);
      const uint32_t mask = best_tile_mask(wide);
      const bool masks = op == TileOp::kTransposableMask;
      long differ = 0;
      for (int i = 0; i < 16; ++i)
        differ += masks ? reinterpret_cast<uint8_t*>(y)[at(i)] != (mask >> i & 1) : y[at(i)] != x[i];
      Bits given[16];
      for (int i = 0; i < 16; ++i) given[i] = w[at(i)];
      if (differ != 0) show_first(masks ? wrong : wrong_pruned, name + (masks ? " transposable" : " pruned"), given, 16);
      (masks ? wrong : wrong_pruned) += differ;
    }
  }
  report(name + " transposable", wrong);
  report(name + " pruned", wrong_pruned);
}

// One pass against one array after another: by a mask that is transposable in half of the tiles, and by the best one.
template <class T>
static void both_ways_case(const std::string& name, Dtype dtype, Groups g) {
  using Bits = typename T::Bits;
  const int64_t all = 4 * g.count(), row_bytes = g.outer * g.len * ceil_div(g.inner, 8), bytes = g.outer * g.inner * ceil_div(g.len, 8);
  struct Out {
    std::vector<Bits> rows, columns;
    std::vector<uint8_t> row_bytes, bytes, mask;
    bool operator==(const Out& o) const {
      return rows == o.rows && columns == o.columns && row_bytes == o.row_bytes && bytes == o.bytes && mask == o.mask;
    }
  };
  const auto fresh = [&] {
    const auto half = size_t(all / 2);
    return Out{std::vector<Bits>(half), std::vector<Bits>(half), std::vector<uint8_t>(size_t(row_bytes)),
               std::vector<uint8_t>(size_t(bytes)), std::vector<uint8_t>(size_t(all))};
  };
  alignas(64) static Bits x[1 << 16];
  for (int64_t i = 0; i < all; ++i) x[i] = i % 3000 < 1500 ? draw<Bits>() : similar<Bits>();
  const auto args = [&](Out& out, bool rows) {
    const Groups along = rows ? Groups{g.outer * g.len, g.inner, 1} : g;
    return PackArgs{PackOp::kMasked, dtype, x, out.mask.data(), rows ? out.rows.data() : out.columns.data(),
                    rows ? out.row_bytes.data() : out.bytes.data(), along};
  };
  Out want = fresh(), got = fresh();
  cuda::run(TileArgs{TileOp::kTransposableMask, dtype, x, want.mask.data(), g.outer * g.len, g.inner}, nullptr);
  long wrong = 0;
  for (const bool given : {false, true}) {
    if (given) {
      for (size_t i = 0; i < want.mask.size(); ++i)
        if (i / 64 % 2 == 0) want.mask[i] = uint8_t(random_bits() & 1);
      got.mask = want.mask;
    }
    cuda::run(args(want, true), nullptr);
    cuda::run(args(want, false), nullptr);
    if (given)
      cuda::launch_pack_masked_both(args(got, true), args(got, false), nullptr);
    else
      cuda::launch_transposable_pack(args(got, true), args(got, false), got.mask.data(), nullptr);
    wrong += !(got == want);
  }
  report(name + " both ways", wrong);
}

int main() {
  tile_case<BF16>("bfloat16", Dtype::kBF16, 60, 264);
  tile_case<F16>("float16", Dtype::kF16, 64, 252);
  tile_case<F32>("float32", Dtype::kF32, 16, 72);
  both_ways_case<BF16>("bfloat16", Dtype::kBF16, {1, 384, 136});
  both_ways_case<F16>("float16", Dtype::kF16, {2, 128, 72});
  both_ways_case<F32>("float32", Dtype::kF32, {2, 12, 20});
  return 0;
}
