// Maps from groups to groups: masks and pruned arrays. Compiled once per instruction set, with S24_ISA naming the
// namespace, and without contraction of products and sums.
#include "../core/select.h"
#include "../core/soft.h"
#include "mvue_lanes.h"

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kBlock = 64;  // groups that share one drawing of random words

// Operations on a group: `usual` of a block of groups, whose result stands if it says that they all are usual; `any`.
struct PruneOp {
  template <class T, class B>
  static S24_HD bool usual(const Quad<B>& in, Quad<B>& out) {
    for_lanes(in, out, [](const B x[4], B y[4]) { prune24<T>(x, y); });
    return true;
  }
  template <class T, class B>
  static S24_HD void any(const B x[4], B y[4]) {
    prune24<T>(x, y);
  }
};

struct SoftOp {
  template <class T, class B>
  static S24_HD bool usual(const Quad<B>& in, Quad<B>& out) {
    if constexpr (T::kInf == BF16::kInf) {
      return soft_bf16(in, out);
    } else {
      alignas(64) uint32_t unusual[kLanes<B>];
      for (int l = 0; l < kLanes<B>; ++l) {
        const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
        B y[4];
        unusual[l] = ~soft24_finite<T>(x, y);
        for (int j = 0; j < 4; ++j) out.at[j][l] = y[j];
      }
      return !any_bit(unusual);
    }
  }
  template <class T, class B>
  static S24_HD void any(const B x[4], B y[4]) {
    soft24<T>(x, y);
  }

 private:
  using B = uint16_t;
  static S24_HD bool soft_bf16(const Quad<B>& in, Quad<B>& out) {
    constexpr int kCount = kLanes<B>;
    Quad<B> a;
    alignas(64) B threshold[kCount], unusual[kCount];
    for (int l = 0; l < kCount; ++l) {
      const B x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      B m[4], t;
      const int16_t largest = soft24_threshold(x, m, t);
      unusual[l] = mask_if<B>(largest >= int16_t(BF16::kInf));
      threshold[l] = t;
      for (int j = 0; j < 4; ++j) a.at[j][l] = m[j];
    }
    for (int j = 0; j < 4; ++j) {
      for_words(a.at[j], threshold, out.at[j], subtract_two);
      for (int l = 0; l < kCount; ++l) out.at[j][l] = soft24_result(in.at[j][l], out.at[j][l]);
    }
    return !any_bit(unusual);
  }
};

template <class T, class Op>
struct EachGroup {
  using Out = typename T::Bits;
  void draw(Key, int64_t, int64_t) {}
  template <bool kRows>
  S24_HD void apply(int64_t, const Out* from, int64_t from_step, Out* to, int64_t to_step) const {
    Quad<Out> in, out;
    load_block<kRows, false>(from, from_step, in);
    if (!Op::template usual<T>(in, out))
      for_lanes(in, out, [](const Out x[4], Out y[4]) { Op::template any<T>(x, y); });
    store_block<kRows, false>(to, to_step, out);
  }
};

template <class T>
struct Mask {
  using Bits = typename T::Bits;
  using Out = uint8_t;
  void draw(Key, int64_t, int64_t) {}
  template <bool kRows>
  S24_HD void apply(int64_t, const Bits* from, int64_t from_step, uint8_t* to, int64_t to_step) const {
    constexpr int kMembers = int(sizeof(Bits));  // whose bytes one lane holds
    Quad<Bits> in, keep;
    load_block<kRows, true>(from, from_step, in);
    for (int l = 0; l < kLanes<Bits>; ++l) {
      const Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      Bits y[4];
      keep24<T>(x, y);
      for (int j = 0; j < 4; ++j) keep.at[j][l] = y[j];
    }
    if (!kRows) {
      for (int j = 0; j < 4; ++j)
        for (int l = 0; l < kLanes<Bits>; ++l) to[j * to_step + l] = uint8_t(keep.at[j][l] & 1);
      return;
    }
    Bits bytes[4 * kLanes<Bits> / kMembers];
    for (int l = 0; l < kLanes<Bits>; ++l) {
      S24_UNROLL
      for (int h = 0; h < 4 / kMembers; ++h) {
        Bits b = 0;
        S24_UNROLL
        for (int i = 0; i < kMembers; ++i) b = Bits(b | (keep.at[h * kMembers + i][l] & (Bits(1) << 8 * i)));
        bytes[4 / kMembers * l + h] = b;
      }
    }
    __builtin_memcpy(to, bytes, sizeof bytes);
  }
};

template <class T, bool kExact>
struct Mvue {
  using Out = typename T::Bits;
  void draw(Key key, int64_t first, int64_t n) {
    w0 = words0.draw(key, uint64_t(first), n, 0);
    w1 = kExact ? w0 : words1.draw(key, uint64_t(first), n, 1);
  }
  template <bool kRows>
  S24_HD void apply(int64_t l, const Out* from, int64_t from_step, Out* to, int64_t to_step) const {
    Quad<Out> in, out;
    load_block<kRows, true>(from, from_step, in);
    mvue_block<T, kExact>(w0 + l, w1 + l, in, out);
    store_block<kRows, true>(to, to_step, out);
  }
  DrawnWords<kBlock> words0, words1;
  const uint32_t *w0, *w1;
};

template <class T, class Op, bool kRows>
void map_groups(const GroupwiseArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  using Out = typename Op::Out;
  constexpr int64_t kCount = kLanes<Bits>, kMember = kRows ? 4 : 1;
  const int64_t step = a.groups.inner;
  Op op;
  Bits in[4 * kCount] = {};
  Out out[4 * kCount];
  for_blocks<kBlock, kRows>(a.groups, begin, end, [&](int64_t q, int64_t at, int64_t n) {
    const Bits* from = static_cast<const Bits*>(a.x) + at;
    Out* to = static_cast<Out*>(a.out) + at;
    op.draw(a.key, q, n);
    int64_t l = 0;
    for (; l + kCount <= n; l += kCount) {
      // The next group's rows: hardware prefetchers follow a row to the end of its page.
      for (int j = 0; !kRows && j < 4; ++j) __builtin_prefetch(from + l + (j + 4) * step, 0, 2);
      op.template apply<kRows>(l, from + l * kMember, step, to + l * kMember, step);
    }
    if (l < n) {
      copy_groups<kRows>(from + l * kMember, step, n - l, in, kCount);
      op.template apply<kRows>(l, in, kCount, out, kCount);
      copy_groups<kRows>(out, kCount, n - l, to + l * kMember, step);
    }
  });
}

template <class T, class Op>
void map_either(const GroupwiseArgs& a, int64_t begin, int64_t end) {
  if (a.groups.inner == 1) return map_groups<T, Op, true>(a, begin, end);
  map_groups<T, Op, false>(a, begin, end);
}

template <class T>
void map_typed(const GroupwiseArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case GroupwiseOp::kMask: return map_either<T, Mask<T>>(a, begin, end);
    case GroupwiseOp::kPrune: return map_either<T, EachGroup<T, PruneOp>>(a, begin, end);
    case GroupwiseOp::kSoft: return map_either<T, EachGroup<T, SoftOp>>(a, begin, end);
    case GroupwiseOp::kMvueExact: return map_either<T, Mvue<T, true>>(a, begin, end);
    case GroupwiseOp::kMvueSequential: return map_either<T, Mvue<T, false>>(a, begin, end);
  }
}

}  // namespace

void map(const GroupwiseArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return map_typed<F32>(a, begin, end);
    case Dtype::kBF16: return map_typed<BF16>(a, begin, end);
    case Dtype::kF16: return map_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
