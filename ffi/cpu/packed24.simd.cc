// Packing to 2:4, unpacking and gathering.
#include "mvue_lanes.h"
#include "packed24_block.h"
#include "packed24_tile.h"
#include "soft_block.h"

namespace s24 {
namespace S24_ISA {

// Two bfloat16 at a time, rounded like round_two; float32 is squared where it is chosen.
S24_HD void square_words(uint32_t (&)[kLanes<uint32_t>]) {}
S24_HD void square_words(uint16_t (&x)[kLanes<uint16_t>]) {
  constexpr int32_t kSecond = int32_t(0xffff0000u);
  IntVec words;
  __builtin_memcpy(&words, x, sizeof words);
  const Vec first = (Vec)(words << 16), second = (Vec)(words & kSecond);
  const IntVec u = (IntVec)(first * first), v = (IntVec)(second * second);
  words = ((u + 0x7fff + ((u >> 16) & 1)) >> 16) | ((v + 0x7fff + ((v >> 16) & 1)) & kSecond);
  __builtin_memcpy(x, &words, sizeof words);
}

// pack_block after max(x, 0)^2. In usual blocks all squares are finite and ordered like x, so that only the two of largest x
// are squared.
template <class T>
S24_HD void pack_squares(const Quad<typename T::Bits>& in, Packed<typename T::Bits>& out) {
  using Bits = typename T::Bits;
  if constexpr (T::kInf == F16::kInf) {
    return pack_block<T, PackOp::kSquaredRelu>(in, in, out);
  } else {
    using Key = Signed<Bits>;
    Quad<Bits> y;
    alignas(64) Bits overflows[kLanes<Bits>];
    S24_LOOP
    for (int l = 0; l < kLanes<Bits>; ++l) {
      const Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
      Key a[4];
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        a[j] = Key(x[j] & T::kMagnitude);
        y.at[j][l] = squarable<T>(x[j]);
      }
      const Key high = a[0] < a[1] ? a[1] : a[0], other = a[2] < a[3] ? a[3] : a[2], highest = high < other ? other : high;
      overflows[l] = mask_if<Bits>(highest >= Key(kSquareOverflows<T>));
    }
    if (any_bit(overflows)) return pack_block<T, PackOp::kSquaredRelu>(in, in, out);
    S24_LOOP
    for (int l = 0; l < kLanes<Bits>; ++l) {
      Bits x[4] = {y.at[0][l], y.at[1][l], y.at[2][l], y.at[3][l]};
      Bits keep[4], pair[2];
      keep_two(x, keep);
      take_kept(x, keep, pair);
      out.nibbles[l] = nibble_of(keep);
      for (int k = 0; k < 2; ++k) out.pairs[k][l] = sizeof(Bits) == 4 ? Bits(square(pair[k])) : pair[k];
    }
    for (int k = 0; k < 2; ++k) square_words(out.pairs[k]);
  }
}

// The bytes of a mask as elements of a Quad, in the order of its lanes.
template <bool kRows, class B>
S24_HD void load_mask(const uint8_t* p, int64_t step, Quad<B>& v) {
  if (!kRows) {
    for (int j = 0; j < 4; ++j) load_bytes(p + j * step, v.at[j]);
    return;
  }
  constexpr int kMembers = int(sizeof(B));  // whose bytes one element holds
  B bytes[4 * kLanes<B> / kMembers];
  __builtin_memcpy(bytes, p, sizeof bytes);
  for (int l = 0; l < kLanes<B>; ++l) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j)
      v.at[j][l] = B((bytes[4 / kMembers * l + j / kMembers] >> (8 * (j % kMembers))) & 0xff);
  }
}

// Packs a dense array block by block. `draw` makes the random words of a range of groups (estimates alone need them); a call
// then loads the block at `from`, whose lane 0 takes the word at place l of that range.
template <class T, PackOp kOp>
struct Packer {
  using Bits = typename T::Bits;
  static constexpr bool kExact = kOp == PackOp::kMvueExact, kRandom = kExact || kOp == PackOp::kMvueSequential;

  explicit Packer(const PackArgs& a) : scale(kOp == PackOp::kSoft ? scale_of<T>(a.scale) : 1) {}
  S24_HD void draw(const Key& key, int64_t first, int64_t n) {
    if (!kRandom) return;
    w0 = words0.draw(key, uint64_t(first), n, 0);
    w1 = kExact ? w0 : words1.draw(key, uint64_t(first), n, 1);
  }
  template <bool kRows>
  S24_HD void run(const Bits* from, int64_t step, const uint8_t* mask, int64_t mask_step, int64_t l,
                  Packed<Bits>& out) const {
    Quad<Bits> in, other{};
    load_block<kRows, true>(from, step, in);
    if (kOp == PackOp::kMasked) load_mask<kRows>(mask, mask_step, other);
    if (kOp == PackOp::kSquaredRelu) return pack_squares<T>(in, out);
    if (kOp == PackOp::kSoft) {
      const bool finite = soft_block<T>(in, other);
      pack_block<T, PackOp::kPlain>(other, other, out);
      for (int k = 0; k < 2; ++k) multiply<T>(out.pairs[k], scale, finite);
      return;
    }
    if (!kRandom) return pack_block<T, kOp>(in, other, out);
    mvue_block<T, kExact>(w0 + l, w1 + l, in, other);
    pack_block<T, PackOp::kPlain>(other, other, out);
  }
  const float scale;
  DrawnWords<kPackTileLanes> words0, words1;
  const uint32_t *w0, *w1;
};

// ---- the group axis is the last one

static_assert(kPackGroups % kRow == 0 && kPackTileLanes >= kRow, "unit sizes");

S24_HD void store_nibbles(uint8_t nibbles[kRow], int64_t n, uint8_t* bytes) {
  if (n % 2) nibbles[n] = kEmptyNibble;
  uint8_t b[kRow / 2];
  for (int i = 0; i < kRow / 2; ++i) b[i] = uint8_t(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
  __builtin_memcpy(bytes, b, n == kRow ? sizeof b : size_t((n + 1) / 2));
}

// f(first group of the array, its offset in metadata, count) for runs of at most kRow groups of one row.
template <class F>
S24_HD void for_row_runs(const Groups& g, int64_t begin, int64_t end, F f) {
  const int64_t groups = g.len / 4, bytes = ceil_div(groups, 2), blocks = ceil_div(groups, kPackGroups);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / blocks, q0 = unit % blocks * kPackGroups;
    const int64_t q1 = q0 + kPackGroups < groups ? q0 + kPackGroups : groups;
    for (int64_t q = q0; q < q1; q += kRow)
      f(row * groups + q, row * bytes + q / 2, q1 - q < kRow ? q1 - q : int64_t{kRow});
  }
}

template <class T, PackOp kOp>
void pack_rows(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  constexpr int kCount = kLanes<Bits>;
  const Key key = read_key(a.draws);
  Packer<T, kOp> packer(a);
  for_row_runs(a.groups, begin, end, [&](int64_t q, int64_t byte, int64_t n) {
    Bits in[4 * kRow], pairs[2 * kRow];
    uint8_t some[4 * kRow], nibbles[kRow];
    const Bits* from = static_cast<const Bits*>(a.dense) + 4 * q;
    const uint8_t* mask = kOp == PackOp::kMasked ? a.mask + 4 * q : nullptr;
    Bits* values = static_cast<Bits*>(a.values) + 2 * q;
    Bits* to = n == kRow ? values : pairs;
    if (n < kRow) {
      __builtin_memcpy(in, from, size_t(4 * n) * sizeof(Bits));
      from = in;
      if (kOp == PackOp::kMasked) {
        __builtin_memcpy(some, mask, size_t(4 * n));
        mask = some;
      }
    }
    packer.draw(key, q, n);
    if (kOp == PackOp::kGather) load_nibbles(a.metadata + byte, n, nibbles);
    for (int l = 0; l < kRow; l += kCount) {
      Packed<Bits> out;
      if (kOp == PackOp::kGather)
        for (int i = 0; i < kCount; ++i) out.nibbles[i] = nibbles[l + i];
      packer.template run<true>(from + 4 * l, 1, mask + 4 * l, 1, l, out);
      store_pairs(out, to + 2 * l);
      if (kOp != PackOp::kGather)
        for (int i = 0; i < kCount; ++i) nibbles[l + i] = uint8_t(out.nibbles[i]);
    }
    if (n < kRow) __builtin_memcpy(values, pairs, size_t(2 * n) * sizeof(Bits));
    if (kOp != PackOp::kGather) store_nibbles(nibbles, n, a.metadata + byte);
  });
}

template <class T>
void unpack_rows(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  constexpr int kCount = kLanes<Bits>;
  for_row_runs(a.groups, begin, end, [&](int64_t q, int64_t byte, int64_t n) {
    Bits pairs[2 * kRow], all[4 * kRow];
    uint8_t nibbles[kRow];
    const Bits* values = static_cast<const Bits*>(a.values) + 2 * q;
    Bits* dense = static_cast<Bits*>(a.dense) + 4 * q;
    Bits* to = n == kRow ? dense : all;
    if (n < kRow) {
      __builtin_memcpy(pairs, values, size_t(2 * n) * sizeof(Bits));
      values = pairs;
    }
    load_nibbles(a.metadata + byte, n, nibbles);
    for (int l = 0; l < kRow; l += kCount) {
      Packed<Bits> in;
      Quad<Bits> out;
      for (int i = 0; i < kCount; ++i) in.nibbles[i] = nibbles[l + i];
      load_pairs(values + 2 * l, in);
      unpack_block<T>(in, out);
      store_block<true, true>(to + 4 * l, 1, out);
    }
    if (n < kRow) __builtin_memcpy(dense, all, size_t(4 * n) * sizeof(Bits));
  });
}

// ---- the group axis is not the last one: packing transposes, tile by tile

constexpr int kTile = kPackTileLanes;

template <class T, PackOp kOp>
void pack_tiles(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  constexpr int kCount = kLanes<Bits>;
  const int64_t groups = a.groups.len / 4, bytes = ceil_div(groups, 2), inner = a.groups.inner;
  const Key key = read_key(a.draws);
  Packer<T, kOp> packer(a);
  Bits in[4 * kTile] = {};
  uint8_t some[4 * kTile] = {};
  PackedTile<Bits> packed;
  for (int64_t unit = begin; unit < end; ++unit) {
    const PackTile t = pack_tile(a.groups, unit), soon = pack_tile(a.groups, unit + 1 < end ? unit + 1 : unit);
    const int64_t row0 = t.outer * inner + t.i0, count = t.q1 - t.q0;
    const int64_t after = (soon.outer * groups + soon.q0) * 4 * inner + soon.i0;
    Bits* values = static_cast<Bits*>(a.values) + row0 * 2 * groups + 2 * t.q0;
    uint8_t* metadata = a.metadata + row0 * bytes + t.q0 / 2;
    if (kOp == PackOp::kGather) {
      packed.load_metadata(metadata, bytes, t.n, count);
    } else {
      packed.clear_nibbles(count);
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t row = t.outer * groups + t.q0 + k, at = row * 4 * inner + t.i0;
      const Bits* from = static_cast<const Bits*>(a.dense) + at;
      const uint8_t* mask = kOp == PackOp::kMasked ? a.mask + at : nullptr;
      int64_t step = inner;
      if (t.n % kCount != 0) {
        copy_groups<false>(from, inner, t.n, in, kTile);
        if (kOp == PackOp::kMasked) copy_groups<false>(mask, inner, t.n, some, kTile);
        from = in;
        mask = some;
        step = kTile;
      }
      // Rows of the next group lie elsewhere, which hardware prefetchers do not see. Into the second-level cache: rows whose
      // distance is a power of two share few places in the first.
      const int64_t next = k + 1 < count ? at + 4 * inner : after;
      const Bits* ahead = static_cast<const Bits*>(a.dense) + next;
      const uint8_t* mask_ahead = kOp == PackOp::kMasked ? a.mask + next : nullptr;
      packer.draw(key, row * inner + t.i0, t.n);
      for (int64_t l = 0; l < t.n; l += kCount) {
        Packed<Bits> out;
        for (int j = 0; j < 4; ++j) {
          __builtin_prefetch(ahead + j * inner + l, 0, 2);
          if (kOp == PackOp::kMasked && l % 64 == 0) __builtin_prefetch(mask_ahead + j * inner + l, 0, 2);
        }
        if (kOp == PackOp::kGather) packed.get_nibbles(k, l, out.nibbles);
        packer.template run<false>(from + l, step, mask + l, step, l, out);
        packed.put(k, l, out.pairs);
        if (kOp != PackOp::kGather) packed.put_nibbles(k, l, out.nibbles);
      }
    }
    packed.store_values(values, 2 * groups, t.n, count, 2 * a.groups.count());
    if (kOp != PackOp::kGather) packed.store_metadata(metadata, bytes, t.n, count);
  }
}

template <class T>
void unpack_tiles(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  constexpr int kCount = kLanes<Bits>;
  const int64_t groups = a.groups.len / 4, bytes = ceil_div(groups, 2), inner = a.groups.inner;
  Bits all[4 * kTile];
  PackedTile<Bits> packed;
  for (int64_t unit = begin; unit < end; ++unit) {
    const PackTile t = pack_tile(a.groups, unit);
    const int64_t row0 = t.outer * inner + t.i0, count = t.q1 - t.q0;
    packed.load_values(static_cast<const Bits*>(a.values) + row0 * 2 * groups + 2 * t.q0, 2 * groups, t.n, count);
    packed.load_metadata(a.metadata + row0 * bytes + t.q0 / 2, bytes, t.n, count);
    for (int64_t k = 0; k < count; ++k) {
      Bits* dense = static_cast<Bits*>(a.dense) + (t.outer * groups + t.q0 + k) * 4 * inner + t.i0;
      const bool whole = t.n % kCount == 0;
      Bits* to = whole ? dense : all;
      const int64_t step = whole ? inner : int64_t{kTile};
      for (int64_t l = 0; l < t.n; l += kCount) {
        Packed<Bits> in;
        Quad<Bits> out;
        packed.get(k, l, in.pairs);
        packed.get_nibbles(k, l, in.nibbles);
        unpack_block<T>(in, out);
        store_block<false, true>(to + l, step, out);
      }
      if (!whole) copy_groups<false>(all, kTile, t.n, dense, inner);
    }
  }
}

template <class T, PackOp kOp>
void pack_either(const PackArgs& a, int64_t begin, int64_t end) {
  if (a.groups.inner == 1) return pack_rows<T, kOp>(a, begin, end);
  pack_tiles<T, kOp>(a, begin, end);
}

template <class T>
void pack_typed(const PackArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case PackOp::kPlain: return pack_either<T, PackOp::kPlain>(a, begin, end);
    case PackOp::kMasked: return pack_either<T, PackOp::kMasked>(a, begin, end);
    case PackOp::kSquaredRelu: return pack_either<T, PackOp::kSquaredRelu>(a, begin, end);
    case PackOp::kMvueExact: return pack_either<T, PackOp::kMvueExact>(a, begin, end);
    case PackOp::kMvueSequential: return pack_either<T, PackOp::kMvueSequential>(a, begin, end);
    case PackOp::kGather: return pack_either<T, PackOp::kGather>(a, begin, end);
    case PackOp::kUnpack: return a.groups.inner == 1 ? unpack_rows<T>(a, begin, end) : unpack_tiles<T>(a, begin, end);
    case PackOp::kSoft: return pack_either<T, PackOp::kSoft>(a, begin, end);
  }
}

template <>
void run(const PackArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return pack_typed<F32>(a, begin, end);
    case Dtype::kBF16: return pack_typed<BF16>(a, begin, end);
    case Dtype::kF16: return pack_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
