// Packed arrays. Compiled once per instruction set, like maps.cc.
#include "../core/metadata.h"
#include "../core/select.h"
#include "../core/squared_relu.h"
#include "mvue_lanes.h"
#include "packed_tile.h"

namespace s24 {
namespace S24_ISA {

// One lane: x (its mask, its nibble for kGather) -> the kept pair and the nibble.
template <class T, PackOp kOp>
S24_HD void pack_lane(typename T::Bits x[4], const uint8_t mask[4], typename T::Bits& nibble,
                      typename T::Bits pair[2]) {
  using Bits = typename T::Bits;
  if (kOp == PackOp::kGather) return take_nibble(x, nibble, pair);
  if (kOp == PackOp::kSquaredRelu) {
    S24_UNROLL
    for (int j = 0; j < 4; ++j) x[j] = squared_relu<T>(x[j]);
  }
  Bits keep[4];
  if (kOp == PackOp::kMasked) {
    keep24_masked<T>(x, mask, keep);
  } else {
    keep24<T>(x, keep);
  }
  nibble = nibble_of(keep);
  take_kept(x, keep, pair);
}

// kLanes groups; first is the index of lane 0.
template <class T, PackOp kOp>
S24_HD void pack_lanes(Key key, int64_t first, const Quad<typename T::Bits>& in, const Quad<uint8_t>& mask,
                       uint8_t nibbles[kLanes], typename T::Bits pairs[2][kLanes]) {
  using Bits = typename T::Bits;
  if (kOp == PackOp::kMvueExact || kOp == PackOp::kMvueSequential) {
    Quad<Bits> estimate;
    mvue_lanes<T, kOp == PackOp::kMvueExact>(key, first, in, estimate);
    return pack_lanes<T, PackOp::kPlain>(key, first, estimate, mask, nibbles, pairs);
  }
  for (int l = 0; l < kLanes; ++l) {
    Bits x[4] = {in.at[0][l], in.at[1][l], in.at[2][l], in.at[3][l]};
    const uint8_t m[4] = {mask.at[0][l], mask.at[1][l], mask.at[2][l], mask.at[3][l]};
    Bits nibble = nibbles[l], pair[2];
    pack_lane<T, kOp>(x, m, nibble, pair);
    nibbles[l] = uint8_t(nibble);
    pairs[0][l] = pair[0];
    pairs[1][l] = pair[1];
  }
}

S24_HD void load_nibbles(const uint8_t* bytes, int64_t n, uint8_t nibbles[kLanes]) {
  const auto load = [&](int64_t b) {
    nibbles[2 * b] = bytes[b] & 0xf;
    nibbles[2 * b + 1] = bytes[b] >> 4;
  };
  if (n == kLanes) {
    for (int b = 0; b < kLanes / 2; ++b) load(b);
  } else {
    for (int64_t b = 0; b < (n + 1) / 2; ++b) load(b);
  }
}

S24_HD void store_nibbles(uint8_t* bytes, int64_t n, uint8_t nibbles[kLanes]) {
  const auto store = [&](int64_t b) { bytes[b] = uint8_t(nibbles[2 * b] | nibbles[2 * b + 1] << 4); };
  if (n == kLanes) {
    for (int b = 0; b < kLanes / 2; ++b) store(b);
  } else {
    nibbles[n] = kEmptyNibble;
    for (int64_t b = 0; b < (n + 1) / 2; ++b) store(b);
  }
}

template <class B>
S24_HD void load_pairs(const B* v, int64_t n, B pairs[2][kLanes]) {
  const auto load = [&](int64_t l) {
    pairs[0][l] = v[2 * l];
    pairs[1][l] = v[2 * l + 1];
  };
  if (n == kLanes) {
    for (int l = 0; l < kLanes; ++l) load(l);
  } else {
    for (int64_t l = 0; l < n; ++l) load(l);
  }
}

template <class B>
S24_HD void store_pairs(B* v, int64_t n, const B pairs[2][kLanes]) {
  const auto store = [&](int64_t l) {
    v[2 * l] = pairs[0][l];
    v[2 * l + 1] = pairs[1][l];
  };
  if (n == kLanes) {
    for (int l = 0; l < kLanes; ++l) store(l);
  } else {
    for (int64_t l = 0; l < n; ++l) store(l);
  }
}

// ---- the group axis is the last one

template <class T, PackOp kOp>
void pack_rows(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  const int64_t groups = a.groups.len / 4, bytes = ceil_div(groups, 2), blocks = ceil_div(groups, kPackGroups);
  Quad<Bits> in;
  Quad<uint8_t> mask{};
  uint8_t nibbles[kLanes] = {};
  Bits pairs[2][kLanes];
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / blocks, q0 = unit % blocks * kPackGroups;
    const int64_t q1 = q0 + kPackGroups < groups ? q0 + kPackGroups : groups;
    for (int64_t q = q0; q < q1; q += kLanes) {
      const int64_t n = q1 - q < kLanes ? q1 - q : kLanes;
      const int64_t at = row * groups + q;
      Bits* v = static_cast<Bits*>(a.values) + 2 * at;
      uint8_t* m = a.metadata + row * bytes + q / 2;
      load_quads(static_cast<const Bits*>(a.dense), a.groups, at, n, in);
      if (kOp == PackOp::kMasked) load_quads(a.mask, a.groups, at, n, mask);
      if (kOp == PackOp::kGather) load_nibbles(m, n, nibbles);
      pack_lanes<T, kOp>(a.key, at, in, mask, nibbles, pairs);
      store_pairs(v, n, pairs);
      if (kOp != PackOp::kGather) store_nibbles(m, n, nibbles);
    }
  }
}

// ---- the group axis is not the last one: packing transposes, tile by tile

template <class T, PackOp kOp>
void pack_tiles(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  const int64_t groups = a.groups.len / 4, bytes = ceil_div(groups, 2), inner = a.groups.inner;
  Quad<Bits> in;
  Quad<uint8_t> mask{};
  Bits pairs[2][kLanes];
  uint8_t nibbles[kLanes] = {};
  PackedTile<Bits> packed{};
  for (int64_t unit = begin; unit < end; ++unit) {
    const PackTile t = pack_tile(a.groups, unit), next = pack_tile(a.groups, unit + 1 < end ? unit + 1 : unit);
    const int64_t row0 = t.outer * inner + t.i0, count = t.q1 - t.q0;
    Bits* values = static_cast<Bits*>(a.values) + row0 * 2 * groups + 2 * t.q0;
    uint8_t* metadata = a.metadata + row0 * bytes + t.q0 / 2;
    if (kOp == PackOp::kGather) {
      packed.load_metadata(metadata, bytes, t.n, count);
    } else {
      // The group after the last of an odd number.
      const uint32_t after = count % 2 ? uint32_t(kEmptyNibble) << (4 * (count % 8)) : 0u;
      for (int h = 0; h < 2; ++h)
        for (int l = 0; l < kLanes; ++l) packed.nibbles[h][l] = h == count / 8 ? after : 0u;
    }
    for (int64_t k = 0; k < count; ++k) {
      const int64_t at = (t.outer * groups + t.q0 + k) * inner + t.i0;
      prefetch_group<false>(a.dense, sizeof(Bits), a.groups, next, k);
      for (int64_t l = 4 * k; l < 4 * k + 4 && l < t.n; ++l) __builtin_prefetch(values + l * 2 * groups, 1);
      load_quads(static_cast<const Bits*>(a.dense), a.groups, at, t.n, in);
      if (kOp == PackOp::kMasked) load_quads(a.mask, a.groups, at, t.n, mask);
      if (kOp == PackOp::kGather) packed.get_nibbles(k, nibbles);
      pack_lanes<T, kOp>(a.key, at, in, mask, nibbles, pairs);
      packed.put(k, pairs, nibbles);
    }
    packed.rows_to_lines();
    packed.store_values(values, 2 * groups, t.n, count);
    if (kOp != PackOp::kGather) packed.store_metadata(metadata, bytes, t.n, count);
  }
}

template <class T>
S24_HD void unpack_lanes(const uint8_t nibbles[kLanes], const typename T::Bits pairs[2][kLanes],
                         Quad<typename T::Bits>& out) {
  using Bits = typename T::Bits;
  for (int l = 0; l < kLanes; ++l) {
    const Bits pair[2] = {pairs[0][l], pairs[1][l]};
    Bits x[4];
    put_nibble(pair, Bits(nibbles[l]), x);
    for (int j = 0; j < 4; ++j) out.at[j][l] = x[j];
  }
}

template <class T>
void unpack_rows(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  const int64_t groups = a.groups.len / 4, bytes = ceil_div(groups, 2), blocks = ceil_div(groups, kPackGroups);
  Quad<Bits> out;
  uint8_t nibbles[kLanes] = {};
  Bits pairs[2][kLanes] = {};
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t row = unit / blocks, q0 = unit % blocks * kPackGroups;
    const int64_t q1 = q0 + kPackGroups < groups ? q0 + kPackGroups : groups;
    for (int64_t q = q0; q < q1; q += kLanes) {
      const int64_t n = q1 - q < kLanes ? q1 - q : kLanes;
      const int64_t at = row * groups + q;
      load_nibbles(a.metadata + row * bytes + q / 2, n, nibbles);
      load_pairs(static_cast<const Bits*>(a.values) + 2 * at, n, pairs);
      unpack_lanes<T>(nibbles, pairs, out);
      store_quads(static_cast<Bits*>(a.dense), a.groups, at, n, out);
    }
  }
}

template <class T>
void unpack_tiles(const PackArgs& a, int64_t begin, int64_t end) {
  using Bits = typename T::Bits;
  const int64_t groups = a.groups.len / 4, bytes = ceil_div(groups, 2), inner = a.groups.inner;
  Quad<Bits> out;
  Bits pairs[2][kLanes];
  uint8_t nibbles[kLanes];
  PackedTile<Bits> packed{};
  for (int64_t unit = begin; unit < end; ++unit) {
    const PackTile t = pack_tile(a.groups, unit);
    const int64_t row0 = t.outer * inner + t.i0, count = t.q1 - t.q0;
    packed.load_values(static_cast<const Bits*>(a.values) + row0 * 2 * groups + 2 * t.q0, 2 * groups, t.n, count);
    packed.load_metadata(a.metadata + row0 * bytes + t.q0 / 2, bytes, t.n, count);
    packed.lines_to_rows();
    for (int64_t k = 0; k < count; ++k) {
      packed.get(k, pairs);
      packed.get_nibbles(k, nibbles);
      unpack_lanes<T>(nibbles, pairs, out);
      store_quads(static_cast<Bits*>(a.dense), a.groups, (t.outer * groups + t.q0 + k) * inner + t.i0, t.n, out);
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
  }
}

void pack(const PackArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return pack_typed<F32>(a, begin, end);
    case Dtype::kBF16: return pack_typed<BF16>(a, begin, end);
    case Dtype::kF16: return pack_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
