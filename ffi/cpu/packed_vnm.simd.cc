// V:N:M arrays: masks, packing, unpacking.
//
// A unit of work first chooses the columns of its tiles, which reads everything, then goes over the chosen columns only,
// which are still in cache.
#include "packed24_tile.h"
#include "packed_vnm_gather.h"

namespace s24 {
namespace S24_ISA {
namespace {

// ---- two of four

// Loops over this many lanes become full vectors, whatever the size of an element.
constexpr int kTileRows = 64;

// The four elements of kTileRows lanes (their nibbles for kGather) -> nibbles and pairs; back for kUnpack.
template <class B>
struct TileLanes {
  B four[4][kTileRows], pair[2][kTileRows];
  B allowed[4][kTileRows];
  uint8_t nibble[kTileRows];
};

template <class T, PackVnmOp kOp>
S24_HD void keep_lanes(TileLanes<typename T::Bits>& v) {
  using Bits = typename T::Bits;
  for (int l = 0; l < kTileRows; ++l) {
    Bits x[4] = {v.four[0][l], v.four[1][l], v.four[2][l], v.four[3][l]}, pair[2] = {v.pair[0][l], v.pair[1][l]};
    Bits nibble = v.nibble[l], keep[4];
    if (kOp == PackVnmOp::kUnpack) {
      put_nibble(pair, nibble, x);
    } else if (kOp == PackVnmOp::kGather) {
      take_nibble(x, nibble, pair);
    } else {
      const Bits allowed[4] = {v.allowed[0][l], v.allowed[1][l], v.allowed[2][l], v.allowed[3][l]};
      if (kOp == PackVnmOp::kPackMasked) {
        keep24_masked<T>(x, allowed, keep);
      } else {
        keep24<T>(x, keep);
      }
      nibble = nibble_of(keep);
      take_kept(x, keep, pair);
      if (kOp == PackVnmOp::kMask)
        for (int k = 0; k < 4; ++k) v.allowed[k][l] = Bits(keep[k] & 1);
    }
    v.nibble[l] = uint8_t(nibble);
    for (int k = 0; k < 2; ++k) v.pair[k][l] = pair[k];
    if (kOp == PackVnmOp::kUnpack)
      for (int k = 0; k < 4; ++k) v.four[k][l] = x[k];
  }
}

constexpr bool packs(PackVnmOp op) { return op == PackVnmOp::kPack || op == PackVnmOp::kPackMasked; }

// The lanes of one row, from `lane` on, to or from values and metadata.
template <class B>
S24_HD void store_row(TileLanes<B>& v, int64_t lane, int64_t groups, bool streams, B* values, uint8_t* metadata) {
  constexpr int kWords = int(kVnmGroups * 2 * sizeof(B)) / 4;
  alignas(64) uint32_t line[kWords];
  B* to = streams ? reinterpret_cast<B*>(line) : values;
  const auto pair = [&](int64_t g) {
    to[2 * g] = v.pair[0][lane + g];
    to[2 * g + 1] = v.pair[1][lane + g];
  };
  const auto byte = [&](int64_t b) {
    metadata[b] = uint8_t(v.nibble[lane + 2 * b] | v.nibble[lane + 2 * b + 1] << 4);
  };
  if (groups == kVnmGroups) {
    S24_LANES
    for (int g = 0; g < int(kVnmGroups); ++g) pair(g);
    if (streams) stream_words<kWords>(line, values);
    if (metadata == nullptr) return;
    S24_LANES
    for (int b = 0; b < int(kVnmGroups) / 2; ++b) byte(b);
  } else {
    for (int64_t g = 0; g < groups; ++g) pair(g);
    if (metadata == nullptr) return;
    v.nibble[lane + groups] = kEmptyNibble;
    for (int64_t b = 0; b < ceil_div(groups, 2); ++b) byte(b);
  }
}

template <class B>
S24_HD void load_row(TileLanes<B>& v, int64_t lane, int64_t groups, const B* values, const uint8_t* metadata) {
  for (int64_t g = 0; g < groups; ++g) {
    v.nibble[lane + g] = uint8_t(metadata[g / 2] >> (4 * (g % 2))) & 0xf;
    if (values == nullptr) continue;
    for (int k = 0; k < 2; ++k) v.pair[k][lane + g] = values[2 * g + k];
  }
}

// Lanes are the groups of a few rows, from row r of the unit on.
template <class T, PackVnmOp kOp>
S24_HD void keep_along_rows(const PackVnmArgs& a, const Unit& u, int64_t r, const Gather<typename T::Bits>& gather,
                            TileLanes<typename T::Bits>& v) {
  using Bits = typename T::Bits;
  constexpr int kCount = int(kVnmGroups), kRows = kTileRows / kCount;
  const int64_t all = a.depth / a.m, bytes = ceil_div(all, 2), width = u.groups * a.m, first = dense_at(a, u) + r * a.depth;
  const int64_t row0 = u.outer * a.rows + u.row0 + r;
  Bits* dense = static_cast<Bits*>(a.dense) + first;
  uint8_t* mask = a.mask + first;
  const auto values = [&](int q) { return static_cast<Bits*>(a.values) + ((row0 + q) * all + u.group0) * 2; };
  const auto metadata = [&](int q) { return a.metadata + (row0 + q) * bytes + u.group0 / 2; };
  for (int q = 0; q < kRows; ++q) {
    if (kOp == PackVnmOp::kGather) load_row<Bits>(v, q * kCount, u.groups, nullptr, metadata(q));
    if (kOp == PackVnmOp::kUnpack) load_row<Bits>(v, q * kCount, u.groups, values(q), metadata(q));
  }
  if (kOp != PackVnmOp::kUnpack) gather.template take<Bits, kRows>(dense, a.depth, v.four);
  if (kOp == PackVnmOp::kPackMasked) gather.template take<uint8_t, kRows>(mask, a.depth, v.allowed);
  keep_lanes<T, kOp>(v);
  const bool lined = (reinterpret_cast<uintptr_t>(a.values) | size_t(all) * 2 * sizeof(Bits)) % 64 == 0;
  const bool streams = lined && u.groups == kVnmGroups && a.outer * a.rows * all * 2 * int64_t(sizeof(Bits)) > kStreamBytes;
  for (int q = 0; q < kRows; ++q) {
    const int64_t row = q * a.depth, lane = q * kCount;
    if (kOp == PackVnmOp::kMask) __builtin_memset(mask + row, 0, size_t(width));
    if (kOp == PackVnmOp::kUnpack) __builtin_memset(dense + row, 0, size_t(width) * sizeof(Bits));
    for (int k = 0; k < 4; ++k) {
      const int32_t* at = gather.at[k];
      for (int64_t g = 0; g < u.groups && kOp == PackVnmOp::kMask; ++g) mask[row + at[g]] = uint8_t(v.allowed[k][lane + g]);
      for (int64_t g = 0; g < u.groups && kOp == PackVnmOp::kUnpack; ++g) dense[row + at[g]] = v.four[k][lane + g];
    }
    if (kOp == PackVnmOp::kGather) store_row<Bits>(v, lane, u.groups, streams, values(q), nullptr);
    if (packs(kOp)) store_row<Bits>(v, lane, u.groups, streams, values(q), metadata(q));
  }
}

// f(lane, index in dense) for the runs of 16 lanes in column k of a group.
template <class F>
S24_HD void for_lanes(const PackVnmArgs& a, const Unit& u, int64_t row, int64_t lanes, int64_t g, int k, const Columns columns,
                      F f) {
  for (int64_t l = 0; l < lanes; l += kVnmLanes)
    f(l, dense_at(a, u) + (g * a.m + columns[(row + l) / a.v][g][k]) * a.rows + row + l);
}

// Packing transposes, by tiles of kTileRows rows.
template <class B>
using RowsTile = PackedTile<B, kTileRows, kVnmGroups>;

// Lanes are the rows [row, row + n) of one group.
template <class T, PackVnmOp kOp>
void keep_along_columns(const PackVnmArgs& a, const Unit& u, int64_t row, int64_t n, int64_t g, const Columns columns,
                        TileLanes<typename T::Bits>& v, RowsTile<typename T::Bits>& packed) {
  auto* dense = static_cast<typename T::Bits*>(a.dense);
  if (kOp == PackVnmOp::kUnpack) packed.get(g, 0, v.pair);
  if (kOp == PackVnmOp::kGather || kOp == PackVnmOp::kUnpack) packed.get_nibbles(g, 0, v.nibble);
  for (int k = 0; k < 4 && kOp != PackVnmOp::kUnpack; ++k) {
    for_lanes(a, u, row, n, g, k, columns, [&](int64_t l, int64_t i) {
      __builtin_memcpy(&v.four[k][l], dense + i, kVnmLanes * sizeof *dense);
      S24_LANES
      for (int lane = 0; lane < kVnmLanes && kOp == PackVnmOp::kPackMasked; ++lane) v.allowed[k][l + lane] = a.mask[i + lane];
    });
  }
  keep_lanes<T, kOp>(v);
  if (packs(kOp) || kOp == PackVnmOp::kGather) packed.put(g, 0, v.pair);
  if (packs(kOp)) packed.put_nibbles(g, 0, v.nibble);
  if (packs(kOp) || kOp == PackVnmOp::kGather) return;
  for (int64_t i = 0; i < a.m; ++i) {
    const int64_t line = dense_at(a, u) + (g * a.m + i) * a.rows + row;
    if (kOp == PackVnmOp::kMask) __builtin_memset(a.mask + line, 0, size_t(n));
    if (kOp == PackVnmOp::kUnpack) __builtin_memset(dense + line, 0, size_t(n) * sizeof *dense);
  }
  for (int k = 0; k < 4; ++k) {
    for_lanes(a, u, row, n, g, k, columns, [&](int64_t l, int64_t i) {
      S24_LANES
      for (int lane = 0; lane < kVnmLanes && kOp == PackVnmOp::kMask; ++lane) a.mask[i + lane] = uint8_t(v.allowed[k][l + lane]);
      if (kOp == PackVnmOp::kUnpack) __builtin_memcpy(dense + i, &v.four[k][l], kVnmLanes * sizeof *dense);
    });
  }
}

template <class B>
struct PackedUnit {
  RowsTile<B> tiles[kStrip / kTileRows];
  LineSums sums;
};

// Group by group: the distance between lines is often a power of two, and a cache holds only few such lines.
template <class T, PackVnmOp kOp>
void unit_along_columns(const PackVnmArgs& a, const Unit& u, const Unit& next, Columns columns,
                        PackedUnit<typename T::Bits>& packed) {
  using Bits = typename T::Bits;
  constexpr bool kReads = kOp == PackVnmOp::kGather || kOp == PackVnmOp::kUnpack;
  const int64_t all = a.depth / a.m, bytes = ceil_div(all, 2), at = u.outer * a.rows + u.row0;
  Bits* values = static_cast<Bits*>(a.values) + at * 2 * all + 2 * u.group0;
  uint8_t* metadata = a.metadata + at * bytes + u.group0 / 2;
  TileLanes<Bits> v = {};
  const auto for_tiles = [&](auto f) {
    for (int64_t row = 0; row < u.rows; row += kTileRows)
      f(row, u.rows - row < kTileRows ? u.rows - row : kTileRows, packed.tiles[row / kTileRows]);
  };
  for_tiles([&](int64_t row, int64_t n, RowsTile<Bits>& tile) {
    if (kReads) tile.load_metadata(metadata + row * bytes, bytes, n, u.groups);
    if (kOp == PackVnmOp::kUnpack) {
      tile.load_values(values + row * 2 * all, 2 * all, n, u.groups);
    }
    if (packs(kOp)) {
      const uint32_t after = u.groups % 2 ? uint32_t(kEmptyNibble) << (4 * (u.groups % 8)) : 0u;
      for (int h = 0; h < 2; ++h)
        for (int l = 0; l < kTileRows; ++l) tile.nibbles[h][l] = h == u.groups / 8 ? after : 0u;
    }
  });
  for (int64_t g = 0; g < u.groups; ++g) {
    const Unit& soon = g + 1 < u.groups ? u : next;
    const int64_t ahead = dense_at(a, soon) + (g + 1) % u.groups * a.m * a.rows;
    if (!kReads && !a.exact) {
      constexpr bool kMasked = kOp == PackVnmOp::kPackMasked;
      a.v == 16   ? choose_along_columns<T, kMasked, 1>(a, u, g, packed.sums, ahead, columns)
      : a.v == 32 ? choose_along_columns<T, kMasked, 2>(a, u, g, packed.sums, ahead, columns)
                  : choose_along_columns<T, kMasked, 4>(a, u, g, packed.sums, ahead, columns);
    }
    for_tiles([&](int64_t row, int64_t n, RowsTile<Bits>& tile) {
      if (kOp == PackVnmOp::kGather && row < soon.rows) prefetch<T>(a, ahead + row, n, a.m, a.rows);
      keep_along_columns<T, kOp>(a, u, row, n, g, columns, v, tile);
    });
  }
  if (kOp == PackVnmOp::kMask || kOp == PackVnmOp::kUnpack) return;
  for_tiles([&](int64_t row, int64_t n, RowsTile<Bits>& tile) {
    tile.store_values(values + row * 2 * all, 2 * all, n, u.groups, a.outer * a.rows * 2 * all);
    if (packs(kOp)) tile.store_metadata(metadata + row * bytes, bytes, n, u.groups);
  });
}

static_assert(kVnmLeast % kTileRows == 0, "a packed tile is a part of a unit");

// How many units from `index` on form a strip.
int64_t units_of_strip(const PackVnmArgs& a, int64_t index, int64_t end) {
  const int64_t height = vnm_unit_rows(a), width = kVnmGroups * a.m;
  const int64_t row = a.depth_last ? ceil_div(a.depth / a.m, kVnmGroups) : ceil_div(a.rows, height);
  const int64_t limits[] = {a.depth_last ? kStripElements / (width * height) : end, kStrip / (a.depth_last ? width : height),
                            row - index % row, end - index};
  int64_t n = limits[0];
  for (const int64_t limit : limits) n = limit < n ? limit : n;
  return n < 1 ? 1 : n;
}

// u are the units together.
template <class T, PackVnmOp kOp>
void strip_along_rows(const PackVnmArgs& a, const Unit& u, const Unit& next, Columns columns) {
  using Bits = typename T::Bits;
  constexpr bool kReads = kOp == PackVnmOp::kGather || kOp == PackVnmOp::kUnpack, kMasked = kOp == PackVnmOp::kPackMasked;
  if (!kReads && !a.exact) {
    a.v == 16   ? choose_along_rows<T, kMasked, 1>(a, u, dense_at(a, next), columns)
    : a.v == 32 ? choose_along_rows<T, kMasked, 2>(a, u, dense_at(a, next), columns)
                : choose_along_rows<T, kMasked, 4>(a, u, dense_at(a, next), columns);
  }
  constexpr int kMaxUnits = kStrip / (4 * kVnmGroups);
  const int64_t units = ceil_div(u.groups, kVnmGroups);
  Gather<Bits> gathers[kMaxUnits];
  Unit parts[kMaxUnits];
  for (int64_t i = 0; i < units; ++i) {
    const int64_t begin = i * kVnmGroups, left = u.groups - begin;
    parts[i] = {u.outer, u.row0, u.rows, u.group0 + begin, left < kVnmGroups ? left : kVnmGroups};
    gathers[i].set(a.m, parts[i].groups, columns[i]);
  }
  TileLanes<Bits> v = {};
  constexpr int64_t kRows = kTileRows / kVnmGroups;
  for (int64_t r = 0; r < u.rows; r += kRows) {
    for (int64_t i = 0; i < units; ++i) {
      const int64_t part = i * kVnmGroups;
      if (kOp == PackVnmOp::kGather && part < next.groups)
        prefetch<T>(a, dense_at(a, next) + r * a.depth + part * a.m, parts[i].groups * a.m, kRows, a.depth);
      keep_along_rows<T, kOp>(a, parts[i], r, gathers[i], v);
    }
  }
  end_streams();
}

template <class T, PackVnmOp kOp>
void vnm_units_of(const PackVnmArgs& a, int64_t begin, int64_t end) {
  constexpr bool kReads = kOp == PackVnmOp::kGather || kOp == PackVnmOp::kUnpack;
  const int64_t all = a.depth / a.m;
  PackedUnit<typename T::Bits> packed;
  if (!a.depth_last) packed = {};
  const auto strip_at = [&](int64_t index) {
    Unit u = unit_at(a, index);
    const int64_t units = units_of_strip(a, index, end), groups = units * kVnmGroups, rows = units * vnm_unit_rows(a);
    if (a.depth_last) u.groups = all - u.group0 < groups ? all - u.group0 : groups;
    if (!a.depth_last) u.rows = a.rows - u.row0 < rows ? a.rows - u.row0 : rows;
    return u;
  };
  for (int64_t index = begin; index < end;) {
    const Unit u = strip_at(index);
    const int64_t after = index + units_of_strip(a, index, end);
    const Unit next = strip_at(after < end ? after : index);
    index = after;
    Columns columns = {};
    uint8_t* given = a.columns + ((u.outer * a.rows + u.row0) / a.v * all + u.group0) * 4;
    const int64_t blocks = u.rows / a.v;
    for (int64_t b = 0; b < blocks && kReads; ++b)
      for (int64_t g = 0; g < u.groups; ++g)
        for (int k = 0; k < 4; ++k)
          columns[b + g / kVnmGroups][g % kVnmGroups][k] = uint8_t(min_u32(given[b * 4 * all + 4 * g + k], uint32_t(a.m) - 1u));
    if (!kReads && a.exact) choose_by_search<T>(a, u, columns);
    if (a.depth_last) {
      strip_along_rows<T, kOp>(a, u, next, columns);
    } else {
      unit_along_columns<T, kOp>(a, u, next, columns, packed);
    }
    for (int64_t b = 0; b < blocks && packs(kOp); ++b)
      __builtin_memcpy(given + b * 4 * all, columns[b], size_t(4 * u.groups));
  }
}

template <class T>
void vnm_typed(const PackVnmArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case PackVnmOp::kMask: return vnm_units_of<T, PackVnmOp::kMask>(a, begin, end);
    case PackVnmOp::kPack: return vnm_units_of<T, PackVnmOp::kPack>(a, begin, end);
    case PackVnmOp::kPackMasked: return vnm_units_of<T, PackVnmOp::kPackMasked>(a, begin, end);
    case PackVnmOp::kGather: return vnm_units_of<T, PackVnmOp::kGather>(a, begin, end);
    case PackVnmOp::kUnpack: return vnm_units_of<T, PackVnmOp::kUnpack>(a, begin, end);
  }
}

}  // namespace

template <>
void run(const PackVnmArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return vnm_typed<F32>(a, begin, end);
    case Dtype::kBF16: return vnm_typed<BF16>(a, begin, end);
    case Dtype::kF16: return vnm_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
