// Packing to 2:4, unpacking and gathering: groups of neighbours, and every case that fits no tile.
//
// Operands: dense (outer, len, inner) with groups along len; values (outer, inner, len / 2) and metadata (outer, inner,
// ceil(len / 8)); a mask of the shape of dense, a scale, or the words of a key in device memory, where the operation takes one.
// Steps: a thread loads the two groups of a metadata byte, encodes or decodes them, and stores the result; estimates take two
// bytes, so that four groups share a call of Philox.
// Constraints: none. Long rows of whole bytes that are aligned take accesses of 16 bytes.
#include "packed24.cuh"

namespace s24 {
namespace cuda {
namespace {

// Two groups, in accesses of 16 bytes.
template <class T>
__device__ __forceinline__ void load_groups(const typename T::Bits* from, Group<T> (&groups)[2]) {
  const auto* words = reinterpret_cast<const uint32_t*>(from);
  constexpr int kWords = int(sizeof(Group<T>)) / 2;  // of two groups
  uint32_t w[kWords];
  S24_UNROLL
  for (int i = 0; i < kWords; i += 4) {
    const Vector<uint32_t, 4> v = load<uint32_t, 4>(words + i);
    S24_UNROLL
    for (int j = 0; j < 4; ++j) w[i + j] = v.at[j];
  }
  __builtin_memcpy(groups, w, sizeof w);
}

template <class T>
__device__ __forceinline__ void store_groups(typename T::Bits* to, const Group<T> (&groups)[2]) {
  auto* words = reinterpret_cast<uint32_t*>(to);
  constexpr int kWords = int(sizeof(Group<T>)) / 2;
  uint32_t w[kWords];
  __builtin_memcpy(w, groups, sizeof w);
  S24_UNROLL
  for (int i = 0; i < kWords; i += 4) store(words + i, Vector<uint32_t, 4>{{w[i], w[i + 1], w[i + 2], w[i + 3]}});
}

constexpr int kAccesses = 4;  // of one thread: bytes of metadata, two groups each, a block of threads apart

// Whole metadata bytes of one long row.
template <PackOp op, class T>
__global__ void __launch_bounds__(kThreads) pack_rows(typename T::Bits* dense, const uint8_t* mask,
                                                      const void* scale, typename T::Bits* values,
                                                      uint8_t* metadata, int64_t bytes) {
  using Bits = typename T::Bits;
  const uint32_t times = op == PackOp::kSoft ? bits_of(scale_of<T>(scale)) : 0;
  const auto place = [](int i) { return (int64_t(blockIdx.x) * kAccesses + i) * kThreads + threadIdx.x; };
  Group<T> groups[kAccesses][2];
  Vector<Pair<Bits>, 2> kept[kAccesses];
  Vector<uint32_t, 2> allowed[kAccesses] = {};
  uint32_t byte[kAccesses] = {};
  S24_UNROLL
  for (int i = 0; i < kAccesses; ++i) {
    const int64_t b = place(i);
    if (b >= bytes) break;
    if constexpr (op == PackOp::kUnpack)
      kept[i] = load<Pair<Bits>, 2>(reinterpret_cast<Pair<Bits>*>(values) + 2 * b);
    else
      load_groups<T>(dense + 8 * b, groups[i]);
    if constexpr (op == PackOp::kMasked) allowed[i] = load<uint32_t, 2>(reinterpret_cast<const uint32_t*>(mask) + 2 * b);
    if constexpr (op == PackOp::kGather || op == PackOp::kUnpack) byte[i] = metadata[b];
  }
  S24_UNROLL
  for (int i = 0; i < kAccesses; ++i) {
    const int64_t b = place(i);
    if (b >= bytes) break;
    uint32_t made = 0;
    S24_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint32_t nibble = byte[i] >> (4 * j) & 15;
      if constexpr (op == PackOp::kUnpack)
        groups[i][j] = decode<T>(kept[i].at[j], nibble);
      else
        made |= encode<op, T>(groups[i][j], op == PackOp::kSoft ? times : allowed[i].at[j], nibble, {}, kept[i].at[j]) << (4 * j);
    }
    if constexpr (op == PackOp::kUnpack) {
      store_groups<T>(dense + 8 * b, groups[i]);
    } else {
      store(reinterpret_cast<Pair<Bits>*>(values) + 2 * b, kept[i]);
      if constexpr (op != PackOp::kGather) metadata[b] = uint8_t(made);
    }
  }
}

// The same for estimates: a unit are the four groups that share a call of Philox.
template <PackOp op, class T>
__global__ void __launch_bounds__(kThreads) estimate_rows(const typename T::Bits* dense, typename T::Bits* values,
                                                          uint8_t* metadata, int64_t quartets, int rounds,
                                                          Draws draws) {
  using Bits = typename T::Bits;
  struct Quartet {
    Group<T> of[2][2];
    __device__ __forceinline__ Group<T> operator()(int i) const { return of[i / 2][i % 2]; }
  };
  const Key key = read_key<kDraws<op>>(draws);
  const auto read = [&](int64_t quartet) {
    Quartet q;
    S24_UNROLL
    for (int i = 0; i < 2; ++i) load_groups<T>(dense + 16 * quartet + 8 * i, q.of[i]);
    return q;
  };
  in_rounds(quartets, rounds, read, [&](int64_t quartet, const Quartet& group) {
    const auto words = QuartetDraw<kDraws<op>>::of(key, key.number(4 * quartet) / 4);
    Pair<Bits> kept[4];
    uint32_t made = 0;
    if constexpr (kChoose<op, T>) {
      const Numbers numbers[4] = {numbers_of<T>(group(0)), numbers_of<T>(group(1)), numbers_of<T>(group(2)),
                                  numbers_of<T>(group(3))};
      made = encode_four<T>(numbers, words, group, kept);
    } else {
      S24_UNROLL
      for (int i = 0; i < 4; ++i) made |= encode<op, T>(group(i), 0, 0, words.group[i], kept[i]) << (8 * i);
    }
    constexpr int kPairs = 8 / int(sizeof(Bits));  // of 16 bytes
    S24_UNROLL
    for (int i = 0; i < 4; i += kPairs) {
      Vector<Pair<Bits>, kPairs> some;
      S24_UNROLL
      for (int j = 0; j < kPairs; ++j) some.at[j] = kept[i + j];
      store(reinterpret_cast<Pair<Bits>*>(values) + 4 * quartet + i, some);
    }
    const uint32_t bytes = made | made >> 4;
    store(metadata + 2 * quartet, Vector<uint8_t, 2>{{uint8_t(bytes), uint8_t(bytes >> 16)}});
  });
}

// Any shape and alignment: a thread takes one metadata byte, element by element. Neighbouring threads are neighbours along
// inner.
template <PackOp op, class T>
__global__ void __launch_bounds__(kThreads) pack_any(typename T::Bits* dense, const uint8_t* mask,
                                                     const void* scale, typename T::Bits* values,
                                                     uint8_t* metadata, Groups g, bool strided, Draws draws) {
  using Bits = typename T::Bits;
  const int64_t bytes = ceil_div(g.len, 8), unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= g.outer * bytes * g.inner) return;
  int64_t i, b;
  const int64_t row = divide(unit, g.inner, &i), o = divide(row, bytes, &b);
  const int64_t next = strided ? g.len / 4 * g.inner : g.inner;  // member of a group
  const Key key = read_key<kDraws<op>>(draws);
  const int64_t packed_row = o * g.inner + i;
  Bits* const kept = values + packed_row * (g.len / 2) + 4 * b;
  uint32_t byte = 0;
  if constexpr (op == PackOp::kGather || op == PackOp::kUnpack) byte = metadata[packed_row * bytes + b];
  uint32_t made = 0;
  for (int n = 0; n < 2; ++n) {
    const int64_t q = 2 * b + n;
    if (q >= g.len / 4) {
      made |= uint32_t(kEmptyNibble) << (4 * n);
      break;
    }
    const int64_t at = (o * g.len + (strided ? q : 4 * q)) * g.inner + i;
    const uint32_t nibble = byte >> (4 * n) & 15;
    Pair<Bits> pair;
    if constexpr (op == PackOp::kUnpack) {
      pair = {kept[2 * n], kept[2 * n + 1]};
      const Group<T> group = decode<T>(pair, nibble);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) dense[at + j * next] = member<T>(group, j);
    } else {
      Bits x[4];
      uint32_t with = op == PackOp::kSoft ? bits_of(scale_of<T>(scale)) : 0;
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        x[j] = dense[at + j * next];
        if constexpr (op == PackOp::kMasked) with |= uint32_t(mask[at + j * next]) << (8 * j);
      }
      const int64_t number = key.number((o * (g.len / 4) + q) * g.inner + i);
      made |= encode<op, T>(Group<T>::of(x), with, nibble, Draw<kDraws<op>>::of(key, number), pair) << (4 * n);
      kept[2 * n] = pair.at[0];
      kept[2 * n + 1] = pair.at[1];
    }
  }
  if constexpr (op != PackOp::kGather && op != PackOp::kUnpack) metadata[packed_row * bytes + b] = uint8_t(made);
}

template <PackOp op, class T>
struct LaunchRows {
  static cudaError_t run(const PackArgs& a, cudaStream_t stream) {
    using Bits = typename T::Bits;
    auto* dense = static_cast<Bits*>(a.dense);
    auto* values = static_cast<Bits*>(a.values);
    const Groups& g = a.groups;
    const bool row = g.inner == 1 && !a.strided && g.len % 8 == 0;
    const bool whole = row && aligned(dense, 16) && aligned(values, 16) && aligned(a.mask, 8);
    const int64_t bytes = g.outer * (g.len / 8);
    if constexpr (kDraws<op> > 0) {
      if (whole && bytes % 2 == 0 && aligned(a.metadata, 2) && a.draws.in_quartets()) {
        const int rounds = rounds_for(ceil_div(bytes / 2, kThreads), 8);
        return start(estimate_rows<op, T>, dim3(blocks_for(bytes / 2, kThreads * rounds)), kThreads, 0, stream, dense,
                     values, a.metadata, bytes / 2, rounds, a.draws);
      }
    } else if (whole) {
      const dim3 grid(blocks_for(bytes, kThreads * kAccesses));
      return start(pack_rows<op, T>, grid, kThreads, 0, stream, dense, a.mask, a.scale, values, a.metadata, bytes);
    }
    const dim3 grid(blocks_for(g.outer * ceil_div(g.len, 8) * g.inner, kThreads));
    return start(pack_any<op, T>, grid, kThreads, 0, stream, dense, a.mask, a.scale, values, a.metadata, g, a.strided, a.draws);
  }
};

}  // namespace

template <>
cudaError_t run(const PackArgs& a, cudaStream_t stream) {
  cudaError_t e = cudaSuccess;
  if (a.groups.count() != 0) e = fits_columns(a) ? launch_pack_columns(a, stream) : for_pack<LaunchRows>(a, stream);
  return e == cudaSuccess ? append_metadata(a, stream) : e;
}

}  // namespace cuda
}  // namespace s24
