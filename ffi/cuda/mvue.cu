// Unbiased estimates with two of four entries.
//
// Operands: x, an array of its shape and dtype, and the words of a key in device memory; groups of four along any axis.
// Steps: of 16-bit floats, a thread takes a quartet of groups, which share a call of Philox, and several quartets in turn, of
// which it loads the next before it works on one. Other arrays go group by group through groupwise.cuh.
// Constraints: the quartet kernels need aligned arrays and a multiple of four groups or neighbours.
#include "groupwise.cuh"

namespace s24 {
namespace cuda {
namespace {

// Estimates of 16-bit floats: a unit is a quartet of groups.
template <class T, int kDraws>
__global__ void __launch_bounds__(kThreads) estimate_rows(const uint32_t* x, uint32_t* y, int64_t quartets, int rounds,
                                                          Draws draws) {
  struct Quartet {
    Vector<uint32_t, 4> w[2];
    __device__ __forceinline__ Words operator()(int i) const { return {w[i / 2].at[i % 2 * 2], w[i / 2].at[i % 2 * 2 + 1]}; }
  };
  const Key key = read_key<kDraws>(draws);
  const auto read = [&](int64_t quartet) {
    return Quartet{{load<uint32_t, 4>(x + 8 * quartet), load<uint32_t, 4>(x + 8 * quartet + 4)}};
  };
  in_rounds(quartets, rounds, read, [&](int64_t quartet, const Quartet& group) {
    const auto words = QuartetDraw<kDraws>::of(key, key.number(4 * quartet) / 4);
    const Numbers numbers[4] = {numbers_of<T>(group(0)), numbers_of<T>(group(1)), numbers_of<T>(group(2)),
                                numbers_of<T>(group(3))};
    Chosen chosen[4];
    choose_four<T>(numbers, words, group, chosen);
    S24_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Words a = chosen[2 * i].spread(), b = chosen[2 * i + 1].spread();
      store(y + 8 * quartet + 4 * i, Vector<uint32_t, 4>{{a.low, a.high, b.low, b.high}});
    }
  });
}

// As above where groups lie across rows: a thread takes four neighbours of four rows. row: words in a row.
template <class T, int kDraws>
__global__ void __launch_bounds__(kThreads, 3) estimate_columns(const uint32_t* x, uint32_t* y, int64_t quartets, int64_t row,
                                                             int rounds, Draws draws) {
  struct Quartet {
    int64_t at;
    Vector<uint32_t, 2> w[4];
    __device__ __forceinline__ Words operator()(int i) const {
      const uint32_t halves = i % 2 == 0 ? 0x5410u : 0x7632u;
      return {select_bytes(w[0].at[i / 2], w[1].at[i / 2], halves), select_bytes(w[2].at[i / 2], w[3].at[i / 2], halves)};
    }
  };
  const Key key = read_key<kDraws>(draws);
  const int64_t per_row = row / 2;
  int64_t place, ahead, group_row = divide(first_unit(rounds), per_row, &place);
  const int64_t rows_ahead = divide(kThreads, per_row, &ahead);
  const auto read = [&](int64_t) {
    Quartet q;
    q.at = 4 * group_row * row + 2 * place;
    S24_UNROLL
    for (int j = 0; j < 4; ++j) q.w[j] = load<uint32_t, 2>(x + q.at + j * row);
    group_row += rows_ahead;
    place += ahead;
    if (place >= per_row) place -= per_row, ++group_row;
    return q;
  };
  in_rounds(quartets, rounds, read, [&](int64_t quartet, const Quartet& group) {
    const auto words = QuartetDraw<kDraws>::of(key, key.number(4 * quartet) / 4);
    Numbers numbers[4];
    S24_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t rows[4] = {group.w[0].at[i], group.w[1].at[i], group.w[2].at[i], group.w[3].at[i]};
      numbers_of<T>(rows, numbers[2 * i], numbers[2 * i + 1]);
    }
    Chosen chosen[4];
    choose_four<T>(numbers, words, group, chosen);
    Words out[4];
    S24_UNROLL
    for (int i = 0; i < 4; ++i) out[i] = chosen[i].spread();
    S24_UNROLL
    for (int j = 0; j < 4; ++j) {
      const auto word = [&](int i) {
        const Words &a = out[2 * i], &b = out[2 * i + 1];
        return select_bytes(j < 2 ? a.low : a.high, j < 2 ? b.low : b.high, j % 2 == 0 ? 0x5410u : 0x7632u);
      };
      store(y + group.at + j * row, Vector<uint32_t, 2>{{word(0), word(1)}});
    }
  });
}

template <GroupwiseOp op, class T>
constexpr bool kInQuartets = sizeof(typename T::Bits) == 2;

template <GroupwiseOp op, class T>
__device__ __forceinline__ void apply(const typename T::Bits x[4], const Draw<kDraws<op>>& draw, Out<op, T> y[4]) {
  if constexpr (kInQuartets<op, T>) {
    const Words out = put_nibble(pack_estimate<T, op == GroupwiseOp::kMvueExact>(words_of(x), draw.words[0], draw.words[1]));
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint16_t((i < 2 ? out.low : out.high) >> (i % 2 * 16));
  } else {
    mvue24<T, op == GroupwiseOp::kMvueExact>(x, draw.words[0], draw.words[1], y);
  }
}

template <GroupwiseOp op, class T>
cudaError_t launch(const GroupwiseArgs& a, cudaStream_t stream) {
  const auto* x = static_cast<const typename T::Bits*>(a.x);
  auto* y = static_cast<Out<op, T>*>(a.out);
  const int64_t groups = a.groups.count();
  if constexpr (kInQuartets<op, T>) {
    const auto* from = static_cast<const uint32_t*>(a.x);
    auto* to = static_cast<uint32_t*>(a.out);
    const int rounds = rounds_for(ceil_div(groups / 4, kThreads), 8);
    const dim3 grid(blocks_for(groups / 4, kThreads * rounds));
    if (aligned(x, 16) && aligned(y, 16) && groups % 4 == 0 && a.groups.inner == 1 && a.draws.in_quartets())
      return start(estimate_rows<T, kDraws<op>>, grid, kThreads, 0, stream, from, to, groups / 4, rounds, a.draws);
    if (aligned(x, 8) && aligned(y, 8) && a.groups.inner % 4 == 0)
      return start(estimate_columns<T, kDraws<op>>, grid, kThreads, 0, stream, from, to, groups / 4, a.groups.inner / 2,
                   rounds, a.draws);
  }
  return launch_groups<op, T>(a, stream);
}

}  // namespace

template <>
cudaError_t run(const MvueArgs& a, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.op == GroupwiseOp::kMvueExact) return launch<GroupwiseOp::kMvueExact, T>(a, stream);
    return launch<GroupwiseOp::kMvueSequential, T>(a, stream);
  });
}

}  // namespace cuda
}  // namespace s24
