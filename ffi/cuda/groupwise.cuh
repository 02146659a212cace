// Maps from groups to groups: masks and pruned arrays. Compiled without contraction of products and sums.
#include <type_traits>

#include "simt/pairs.h"
#include "simt/soft_pairs.h"
#include "draws.cuh"

namespace s24 {
namespace cuda {
namespace {

template <GroupwiseOp op, class T>
using Out = std::conditional_t<op == GroupwiseOp::kMask, uint8_t, typename T::Bits>;

template <GroupwiseOp op>
constexpr int kDraws = op == GroupwiseOp::kMvueExact ? 1 : op == GroupwiseOp::kMvueSequential ? 2 : 0;

template <GroupwiseOp op, class T>
constexpr bool kChoose = kDraws<op> > 0 && sizeof(typename T::Bits) == 2;

template <GroupwiseOp op, class T>
__device__ __forceinline__ void apply(const typename T::Bits x[4], const Draw<kDraws<op>>& draw, Out<op, T> y[4]) {
  if constexpr (op == GroupwiseOp::kMask && sizeof(typename T::Bits) == 2) {
    const uint32_t bytes = top_two_of<T>(words_of(x)).bytes();
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint8_t(bytes >> (8 * i));
  } else if constexpr (op == GroupwiseOp::kMask) {
    typename T::Bits keep[4];
    keep24<T>(x, keep);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint8_t(keep[i] & 1);
  } else if constexpr (op == GroupwiseOp::kPrune) {
    prune24<T>(x, y);
  } else if constexpr (op == GroupwiseOp::kSoft) {
    soft24<T>(x, y);
  } else if constexpr (kChoose<op, T>) {
    const Words out = put_nibble(keep_drawn<T, op == GroupwiseOp::kMvueExact>(words_of(x), draw.words[0], draw.words[1]));
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = uint16_t((i < 2 ? out.low : out.high) >> (i % 2 * 16));
  } else {
    mvue24<T, op == GroupwiseOp::kMvueExact>(x, draw.words[0], draw.words[1], y);
  }
}

// Two groups of 16-bit floats in the halves of four words. Never inlined: rare.
template <class T>
__device__ __noinline__ Vector<uint32_t, 4> soft_by_definition(Vector<uint32_t, 4> x) {
  Vector<uint32_t, 4> y = {};
#pragma unroll 1
  for (int n = 0; n < 32; n += 16) {
    uint16_t group[4], made[4];
    S24_UNROLL
    for (int i = 0; i < 4; ++i) group[i] = uint16_t(x.at[i] >> n);
    soft24<T>(group, made);
    S24_UNROLL
    for (int i = 0; i < 4; ++i) y.at[i] |= uint32_t(made[i]) << n;
  }
  return y;
}

template <class T>
__device__ __forceinline__ Vector<uint32_t, 4> soft_two(const Vector<uint32_t, 4>& x) {
  Vector<uint32_t, 4> y;
  if (!soft24_two<T>(x.at, y.at)) y = soft_by_definition<T>(x);
  return y;
}

// f(i, draw) for kGroups groups from `first` on. Four of a quartet share a call of Philox.
template <int kDraws, int kGroups, class F>
__device__ __forceinline__ void for_draws(Key key, int64_t first, F f) {
  if constexpr (kGroups % 4 == 0) {
    S24_UNROLL
    for (int q = 0; q < kGroups; q += 4) {
      const auto draws = QuartetDraw<kDraws>::of(key, (first + q) / 4);
      S24_UNROLL
      for (int i = 0; i < 4; ++i) f(q + i, draws.group[i]);
    }
  } else {
    S24_UNROLL
    for (int i = 0; i < kGroups; ++i) f(i, Draw<kDraws>::of(key, first + i));
  }
}

// Groups of neighbours: a thread takes kGroups of them per access, several accesses apart by a block.
template <GroupwiseOp op, class T, int kGroups>
__global__ void __launch_bounds__(kThreads) map_rows(const typename T::Bits* x, Out<op, T>* y, int64_t groups,
                                                     const uint32_t* key_words) {
  using Bits = typename T::Bits;
  constexpr int kAccesses = kDraws<op> > 0 ? 1 : 4;
  const int64_t first = (int64_t(blockIdx.x) * kThreads * kAccesses + threadIdx.x) * kGroups;
  const Key key = read_key<kDraws<op>>(key_words);
  Vector<Bits, 4 * kGroups> in[kAccesses];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t q = first + int64_t(a) * kThreads * kGroups;
    if (q < groups) in[a] = load<Bits, 4 * kGroups>(x + 4 * q);
  }
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t q = first + int64_t(a) * kThreads * kGroups;
    if (q >= groups) break;
    Vector<Out<op, T>, 4 * kGroups> out;
    for_draws<kDraws<op>, kGroups>(key, q, [&](int i, const auto& draw) { apply<op, T>(in[a].at + 4 * i, draw, out.at + 4 * i); });
    store(y + 4 * q, out);
  }
}

// Groups across rows: a thread takes kLanes neighbours of four rows.
template <GroupwiseOp op, class T, int kLanes>
__global__ void __launch_bounds__(kThreads) map_columns(const typename T::Bits* x, Out<op, T>* y, Groups g,
                                                        const uint32_t* key_words) {
  using Bits = typename T::Bits;
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x, per_row = g.inner / kLanes;
  if (unit >= g.count() / kLanes) return;
  int64_t lane;
  const int64_t row = divide(unit, per_row, &lane);  // of groups
  const int64_t at = 4 * row * g.inner + lane * kLanes;
  const Key key = read_key<kDraws<op>>(key_words);
  Vector<Bits, kLanes> in[4];
  Vector<Out<op, T>, kLanes> out[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) in[j] = load<Bits, kLanes>(x + at + j * g.inner);
  for_draws<kDraws<op>, kLanes>(key, unit * kLanes, [&](int l, const auto& draw) {
    const Bits group[4] = {in[0].at[l], in[1].at[l], in[2].at[l], in[3].at[l]};
    Out<op, T> result[4];
    apply<op, T>(group, draw, result);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) out[j].at[l] = result[j];
  });
  S24_UNROLL
  for (int j = 0; j < 4; ++j) store(y + at + j * g.inner, out[j]);
}

// The soft threshold of 16-bit floats: a unit is two groups, 16 bytes.
template <class T>
__global__ void __launch_bounds__(kThreads) soft_rows(const uint32_t* x, uint32_t* y, int64_t units) {
  constexpr int kAccesses = 4;
  const int64_t first = int64_t(blockIdx.x) * kThreads * kAccesses + threadIdx.x;
  Vector<uint32_t, 4> in[kAccesses];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a)
    if (first + a * kThreads < units) in[a] = load<uint32_t, 4>(x + 4 * (first + a * kThreads));
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    if (first + a * kThreads >= units) break;
    const uint32_t* const w = in[a].at;
    const Vector<uint32_t, 4> made = soft_two<T>({{select_bytes(w[0], w[2], 0x5410u), select_bytes(w[0], w[2], 0x7632u),
                                                   select_bytes(w[1], w[3], 0x5410u), select_bytes(w[1], w[3], 0x7632u)}});
    const uint32_t* const m = made.at;
    store(y + 4 * (first + a * kThreads),
          Vector<uint32_t, 4>{{select_bytes(m[0], m[1], 0x5410u), select_bytes(m[2], m[3], 0x5410u),
                               select_bytes(m[0], m[1], 0x7632u), select_bytes(m[2], m[3], 0x7632u)}});
  }
}

// The same across rows: eight neighbours of four rows. `row`: words of a row.
template <class T>
__global__ void __launch_bounds__(kThreads) soft_columns(const uint32_t* x, uint32_t* y, int64_t units, int64_t row) {
  const int64_t unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= units) return;
  int64_t place;
  const int64_t group_row = divide(unit, row / 4, &place), at = 4 * (group_row * row + place);
  Vector<uint32_t, 4> in[4], out[4];
  S24_UNROLL
  for (int j = 0; j < 4; ++j) in[j] = load<uint32_t, 4>(x + at + j * row);
  S24_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vector<uint32_t, 4> made = soft_two<T>({{in[0].at[i], in[1].at[i], in[2].at[i], in[3].at[i]}});
    S24_UNROLL
    for (int j = 0; j < 4; ++j) out[j].at[i] = made.at[j];
  }
  S24_UNROLL
  for (int j = 0; j < 4; ++j) store(y + at + j * row, out[j]);
}

// Estimates of 16-bit floats: a unit is a quartet of groups.
template <class T, int kDraws>
__global__ void __launch_bounds__(kThreads) estimate_rows(const uint32_t* x, uint32_t* y, int64_t quartets, int rounds,
                                                          const uint32_t* key_words) {
  struct Quartet {
    Vector<uint32_t, 4> w[2];
    __device__ __forceinline__ Words operator()(int i) const { return {w[i / 2].at[i % 2 * 2], w[i / 2].at[i % 2 * 2 + 1]}; }
  };
  const Key key = read_key<kDraws>(key_words);
  const auto read = [&](int64_t quartet) {
    return Quartet{{load<uint32_t, 4>(x + 8 * quartet), load<uint32_t, 4>(x + 8 * quartet + 4)}};
  };
  in_rounds(quartets, rounds, read, [&](int64_t quartet, const Quartet& group) {
    const auto draws = QuartetDraw<kDraws>::of(key, quartet);
    const Numbers numbers[4] = {numbers_of<T>(group(0)), numbers_of<T>(group(1)), numbers_of<T>(group(2)),
                                numbers_of<T>(group(3))};
    Chosen chosen[4];
    choose_four<T>(numbers, draws, group, chosen);
    S24_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Words a = chosen[2 * i].spread(), b = chosen[2 * i + 1].spread();
      store(y + 8 * quartet + 4 * i, Vector<uint32_t, 4>{{a.low, a.high, b.low, b.high}});
    }
  });
}

// The same across rows: four neighbours of four rows. `row`: words of a row.
template <class T, int kDraws>
__global__ void __launch_bounds__(kThreads, 3) estimate_columns(const uint32_t* x, uint32_t* y, int64_t quartets, int64_t row,
                                                             int rounds, const uint32_t* key_words) {
  struct Quartet {
    int64_t at;
    Vector<uint32_t, 2> w[4];
    __device__ __forceinline__ Words operator()(int i) const {
      const uint32_t halves = i % 2 == 0 ? 0x5410u : 0x7632u;
      return {select_bytes(w[0].at[i / 2], w[1].at[i / 2], halves), select_bytes(w[2].at[i / 2], w[3].at[i / 2], halves)};
    }
  };
  const Key key = read_key<kDraws>(key_words);
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
    const auto draws = QuartetDraw<kDraws>::of(key, quartet);
    Numbers numbers[4];
    S24_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t rows[4] = {group.w[0].at[i], group.w[1].at[i], group.w[2].at[i], group.w[3].at[i]};
      numbers_of<T>(rows, numbers[2 * i], numbers[2 * i + 1]);
    }
    Chosen chosen[4];
    choose_four<T>(numbers, draws, group, chosen);
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
cudaError_t launch(const GroupwiseArgs& a, const uint32_t* key, cudaStream_t stream) {
  using Bits = typename T::Bits;
  constexpr bool kEstimate = kDraws<op> > 0;
  constexpr int kRun = kEstimate ? 4 : sizeof(Bits) == 2 ? 2 : 1;  // groups of an access: of 16 bytes, or a quartet
  constexpr int kWide = kEstimate ? 4 : 16 / int(sizeof(Bits));
  constexpr int kAccesses = kEstimate ? 1 : 4;
  const auto* x = static_cast<const Bits*>(a.x);
  auto* y = static_cast<Out<op, T>*>(a.out);
  const int64_t groups = a.groups.count();
  if constexpr (kChoose<op, T>) {
    const auto* from = static_cast<const uint32_t*>(a.x);
    auto* to = static_cast<uint32_t*>(a.out);
    const int rounds = rounds_for(ceil_div(groups / 4, kThreads), 8);
    const dim3 grid(blocks_for(groups / 4, kThreads * rounds));
    if (aligned(x, 16) && aligned(y, 16) && groups % 4 == 0 && a.groups.inner == 1)
      return start(estimate_rows<T, kDraws<op>>, grid, kThreads, 0, stream, from, to, groups / 4, rounds, key);
    if (aligned(x, 8) && aligned(y, 8) && a.groups.inner % 4 == 0)
      return start(estimate_columns<T, kDraws<op>>, grid, kThreads, 0, stream, from, to, groups / 4, a.groups.inner / 2,
                   rounds, key);
  }
  if constexpr (op == GroupwiseOp::kSoft && sizeof(Bits) == 2) {
    const auto* from = static_cast<const uint32_t*>(a.x);
    auto* to = static_cast<uint32_t*>(a.out);
    const bool whole = aligned(x, 16) && aligned(y, 16);
    if (whole && groups % 2 == 0 && a.groups.inner == 1)
      return start(soft_rows<T>, dim3(blocks_for(groups / 2, 4 * kThreads)), kThreads, 0, stream, from, to, groups / 2);
    if (whole && a.groups.inner % 8 == 0)
      return start(soft_columns<T>, dim3(blocks_for(groups / 8, kThreads)), kThreads, 0, stream, from, to, groups / 8,
                   a.groups.inner / 2);
  }
  if (a.groups.inner == 1) {
    constexpr size_t kAlign = 4 * kRun * sizeof(Bits);
    if (aligned(x, kAlign) && aligned(y, kAlign) && groups % kRun == 0)
      return start(map_rows<op, T, kRun>, dim3(blocks_for(groups, kRun * kThreads * kAccesses)), kThreads, 0, stream, x, y,
                   groups, key);
    return start(map_rows<op, T, 1>, dim3(blocks_for(groups, kThreads * kAccesses)), kThreads, 0, stream, x, y, groups, key);
  }
  if (aligned(x, 16) && aligned(y, 16) && a.groups.inner % kWide == 0)
    return start(map_columns<op, T, kWide>, dim3(blocks_for(groups, kWide * kThreads)), kThreads, 0, stream, x, y, a.groups,
                 key);
  return start(map_columns<op, T, 1>, dim3(blocks_for(groups, kThreads)), kThreads, 0, stream, x, y, a.groups, key);
}

}  // namespace

cudaError_t launch_map(const GroupwiseArgs& a, const uint32_t* key, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return for_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    switch (a.op) {
      case GroupwiseOp::kMask: return launch<GroupwiseOp::kMask, T>(a, key, stream);
      case GroupwiseOp::kPrune: return launch<GroupwiseOp::kPrune, T>(a, key, stream);
      case GroupwiseOp::kSoft: return launch<GroupwiseOp::kSoft, T>(a, key, stream);
      case GroupwiseOp::kMvueExact: return launch<GroupwiseOp::kMvueExact, T>(a, key, stream);
      case GroupwiseOp::kMvueSequential: return launch<GroupwiseOp::kMvueSequential, T>(a, key, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace cuda
}  // namespace s24
