// V:N:M arrays: masks, packing, unpacking. Compiled once per instruction set, like maps.cc.
//
// A unit of work first chooses the columns of its tiles, which reads everything, then goes over the chosen columns only,
// which are still in cache.
#include "../core/vnm.h"

#include "packed_tile.h"

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kMaxWidth = int(kVnmGroups) * kVnmMaxM;
constexpr int kMaxBlocks = int(kVnmLeast) / kVnmLanes;  // blocks of V rows in a unit
constexpr uint32_t kAllowed = 0x80000000u;

using Columns = uint8_t[kMaxBlocks][kVnmGroups][4];

// Rows [row0, row0 + rows) and groups [group0, group0 + groups) of one matrix.
struct Unit {
  int64_t outer, row0, rows, group0, groups;
};

Unit unit_at(const VnmArgs& a, int64_t index) {
  const int64_t height = vnm_unit_rows(a), row_units = ceil_div(a.rows, height);
  const int64_t all = a.depth / a.m, group_units = ceil_div(all, kVnmGroups), within = index % (row_units * group_units);
  // Neighbours in memory come first.
  const int64_t r = a.depth_last ? within / group_units : within % row_units;
  const int64_t g = a.depth_last ? within % group_units : within / row_units;
  Unit u;
  u.outer = index / (row_units * group_units);
  u.row0 = r * height;
  u.rows = a.rows - u.row0 < height ? a.rows - u.row0 : height;
  u.group0 = g * kVnmGroups;
  u.groups = all - u.group0 < kVnmGroups ? all - u.group0 : kVnmGroups;
  return u;
}

// Index of the unit's first element in an array of the shape of dense.
S24_HD int64_t dense_at(const VnmArgs& a, const Unit& u) {
  const int64_t k = u.group0 * a.m;
  return u.outer * a.rows * a.depth + (a.depth_last ? u.row0 * a.depth + k : k * a.rows + u.row0);
}

// ---- which columns

// The addend and the magnitude of one element; what the mask forbids is no element.
template <class T, bool kMasked>
S24_HD void count_element(typename T::Bits x, const uint8_t* allowed, float& addend, uint32_t& magnitude) {
  uint32_t u = T::to_f32(x);
  uint32_t flag = 0;
  if (kMasked) {
    flag = mask_if<uint32_t>(*allowed != 0);
    u &= flag;
  }
  addend = column_addend(u);
  magnitude = (u & kF32Magnitude) | (flag & kAllowed);
}

S24_HD uint32_t allowed_first(float sum, uint32_t largest) {
  return column_key(sum, largest & kF32Magnitude) | (largest & kAllowed);
}

// Columns are contiguous: lanes are columns.
template <class T, bool kMasked>
void choose_along_rows(const VnmArgs& a, const Unit& u, Columns columns) {
  const int64_t width = u.groups * a.m, first = dense_at(a, u);
  alignas(64) float sums[kVnmLanes][kMaxWidth];
  alignas(64) uint32_t largest[kMaxWidth], keys[kMaxWidth];
  const auto add_row = [&](int64_t r, auto add) {
    const auto* x = static_cast<const typename T::Bits*>(a.dense) + first + r * a.depth;
    const uint8_t* allowed = kMasked ? a.mask + first + r * a.depth : nullptr;
    float* s = sums[r % kVnmLanes];
    for (int64_t c = 0; c < width; ++c) {
      float addend;
      uint32_t magnitude;
      count_element<T, kMasked>(x[c], allowed + (kMasked ? c : 0), addend, magnitude);
      add(s[c], addend);
      largest[c] = max_u32(largest[c], magnitude);
    }
  };
  for (int64_t c = 0; c < width; ++c) largest[c] = 0;
  for (int64_t r = 0; r < kVnmLanes; ++r) add_row(r, [](float& s, float addend) { s = addend; });
  for (int64_t r = kVnmLanes; r < a.v; ++r) add_row(r, [](float& s, float addend) { s += addend; });
  for (int64_t c = 0; c < width; ++c) keys[c] = allowed_first(add_lanes(&sums[0][c], kMaxWidth), largest[c]);
  for (int64_t g = 0; g < u.groups; ++g) best_columns(keys + g * a.m, int(a.m), columns[0][g]);
}

// Rows are contiguous: lanes are partial sums, turned so that they become columns.
template <class T, bool kMasked>
void choose_along_columns(const VnmArgs& a, const Unit& u, Columns columns) {
  const int64_t first = dense_at(a, u), blocks = u.rows / a.v;
  alignas(64) float sums[kMaxBlocks][kVnmMaxM][kVnmLanes] = {}, sums_turned[kVnmLanes][kVnmMaxM];
  alignas(64) uint32_t largest[kMaxBlocks][kVnmMaxM][kVnmLanes] = {}, largest_turned[kVnmLanes][kVnmMaxM];
  uint32_t keys[kVnmMaxM];
  for (int64_t g = 0; g < u.groups; ++g) {
    for (int64_t i = 0; i < a.m; ++i) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = first + (g * a.m + i) * a.rows + b * a.v;
        const auto* x = static_cast<const typename T::Bits*>(a.dense) + at;
        const uint8_t* allowed = kMasked ? a.mask + at : nullptr;
        float s[kVnmLanes];
        uint32_t most[kVnmLanes];
        for (int l = 0; l < kVnmLanes; ++l) count_element<T, kMasked>(x[l], allowed + (kMasked ? l : 0), s[l], most[l]);
        for (int64_t r = kVnmLanes; r < a.v; r += kVnmLanes) {
          for (int l = 0; l < kVnmLanes; ++l) {
            float addend;
            uint32_t magnitude;
            count_element<T, kMasked>(x[r + l], allowed + (kMasked ? r + l : 0), addend, magnitude);
            s[l] += addend;
            most[l] = max_u32(most[l], magnitude);
          }
        }
        for (int l = 0; l < kVnmLanes; ++l) sums[b][i][l] = s[l];
        for (int l = 0; l < kVnmLanes; ++l) largest[b][i][l] = most[l];
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t i = 0; i < a.m; i += kWidth) {
        for (int l = 0; l < kVnmLanes; l += kWidth) {
          transpose(&sums[b][i][l], kVnmLanes, &sums_turned[l][i], kVnmMaxM);
          transpose(&largest[b][i][l], kVnmLanes, &largest_turned[l][i], kVnmMaxM);
        }
      }
      for (int i = 0; i < kVnmMaxM; ++i) {
        uint32_t most = 0;
        S24_UNROLL
        for (int l = 0; l < kVnmLanes; ++l) most = max_u32(most, largest_turned[l][i]);
        keys[i] = allowed_first(add_lanes(&sums_turned[0][i], kVnmMaxM), most);
      }
      best_columns(keys, int(a.m), columns[b][g]);
    }
  }
}

using Scores = float[kVnmMaxExactM][kVnmMaxV];

// All sets of four columns, in lexicographic order.
void search(const Scores scores, int m, int64_t v, uint8_t columns[4]) {
  alignas(64) float high[kVnmMaxV], low[kVnmMaxV], sums[kVnmLanes];
  float best = -1.0f;
  for (int c0 = 0; c0 < m; ++c0) {
    for (int c1 = c0 + 1; c1 < m; ++c1) {
      for (int64_t r = 0; r < v; ++r) {
        const bool first = scores[c0][r] > scores[c1][r];
        high[r] = first ? scores[c0][r] : scores[c1][r];
        low[r] = first ? scores[c1][r] : scores[c0][r];
      }
      for (int c2 = c1 + 1; c2 < m; ++c2) {
        for (int c3 = c2 + 1; c3 < m; ++c3) {
          for (int l = 0; l < kVnmLanes; ++l) sums[l] = 0.0f;
          for (int64_t r = 0; r < v; r += kVnmLanes) {
            for (int l = 0; l < kVnmLanes; ++l) {
              const float x = scores[c2][r + l], y = scores[c3][r + l];
              sums[l] += largest_two(high[r + l], low[r + l], x > y ? x : y, x > y ? y : x);
            }
          }
          const float sum = add_lanes(sums, 1);
          if (sum > best) {
            best = sum;
            const int set[4] = {c0, c1, c2, c3};
            for (int k = 0; k < 4; ++k) columns[k] = uint8_t(set[k]);
          }
        }
      }
    }
  }
}

template <class T>
void choose_by_search(const VnmArgs& a, const Unit& u, Columns columns) {
  const int64_t row_step = a.depth_last ? a.depth : 1, column_step = a.depth_last ? 1 : a.rows;
  alignas(64) Scores scores;
  for (int64_t b = 0; b < u.rows / a.v; ++b) {
    for (int64_t g = 0; g < u.groups; ++g) {
      const auto* x = static_cast<const typename T::Bits*>(a.dense) + dense_at(a, u) + b * a.v * row_step + g * a.m * column_step;
      uint32_t top = 0;
      for (int64_t i = 0; i < a.m; ++i)
        for (int64_t r = 0; r < a.v; ++r)
          top = max_u32(top, T::to_f32(x[r * row_step + i * column_step]) & kF32Magnitude);
      for (int64_t i = 0; i < a.m; ++i)
        for (int64_t r = 0; r < a.v; ++r) scores[i][r] = search_score(T::to_f32(x[r * row_step + i * column_step]), top);
      search(scores, int(a.m), a.v, columns[b][g]);
    }
  }
}

// ---- two of four

// The four elements of kCount lanes (their nibbles for kGather) -> nibbles and pairs; back for kUnpack.
template <class B, int kCount>
struct Lanes {
  B four[4][kCount], pair[2][kCount];
  uint8_t allowed[4][kCount], nibble[kCount];
};

template <class T, VnmOp kOp, int kCount>
S24_HD void keep_lanes(Lanes<typename T::Bits, kCount>& v) {
  using Bits = typename T::Bits;
  for (int l = 0; l < kCount; ++l) {
    Bits x[4] = {v.four[0][l], v.four[1][l], v.four[2][l], v.four[3][l]}, pair[2] = {v.pair[0][l], v.pair[1][l]};
    Bits nibble = v.nibble[l], keep[4];
    if (kOp == VnmOp::kUnpack) {
      put_nibble(pair, nibble, x);
    } else if (kOp == VnmOp::kGather) {
      take_nibble(x, nibble, pair);
    } else {
      const uint8_t allowed[4] = {v.allowed[0][l], v.allowed[1][l], v.allowed[2][l], v.allowed[3][l]};
      if (kOp == VnmOp::kPackMasked) {
        keep24_masked<T>(x, allowed, keep);
      } else {
        keep24<T>(x, keep);
      }
      nibble = nibble_of(keep);
      take_kept(x, keep, pair);
      if (kOp == VnmOp::kMask)
        for (int k = 0; k < 4; ++k) v.allowed[k][l] = uint8_t(keep[k] & 1);
    }
    v.nibble[l] = uint8_t(nibble);
    for (int k = 0; k < 2; ++k) v.pair[k][l] = pair[k];
    if (kOp == VnmOp::kUnpack)
      for (int k = 0; k < 4; ++k) v.four[k][l] = x[k];
  }
}

constexpr bool packs(VnmOp op) { return op == VnmOp::kPack || op == VnmOp::kPackMasked; }

// Lanes are the groups of a row.
template <class T, VnmOp kOp>
void keep_along_rows(const VnmArgs& a, const Unit& u, const Columns columns) {
  using Bits = typename T::Bits;
  constexpr int kCount = int(kVnmGroups);
  const int64_t all = a.depth / a.m, bytes = ceil_div(all, 2), width = u.groups * a.m, first = dense_at(a, u);
  int32_t at[4][kCount] = {};
  for (int64_t g = 0; g < u.groups; ++g)
    for (int k = 0; k < 4; ++k) at[k][g] = int32_t(g * a.m + columns[0][g][k]);
  Lanes<Bits, kCount> v = {};
  for (int64_t r = 0; r < u.rows; ++r) {
    const int64_t row = u.outer * a.rows + u.row0 + r;
    Bits* x = static_cast<Bits*>(a.dense) + first + r * a.depth;
    uint8_t* mask = a.mask + (a.mask != nullptr ? first + r * a.depth : 0);
    Bits* values = static_cast<Bits*>(a.values) + row * 2 * all + 2 * u.group0;
    uint8_t* metadata = a.metadata + row * bytes + u.group0 / 2;
    if (kOp == VnmOp::kGather || kOp == VnmOp::kUnpack) {
      for (int64_t g = 0; g < u.groups; ++g) v.nibble[g] = uint8_t(metadata[g / 2] >> (4 * (g % 2))) & 0xf;
    }
    if (kOp == VnmOp::kUnpack) {
      for (int64_t g = 0; g < u.groups; ++g)
        for (int k = 0; k < 2; ++k) v.pair[k][g] = values[2 * g + k];
    } else {
      for (int k = 0; k < 4; ++k)
        for (int g = 0; g < kCount; ++g) v.four[k][g] = x[at[k][g]];
    }
    if (kOp == VnmOp::kPackMasked)
      for (int k = 0; k < 4; ++k)
        for (int g = 0; g < kCount; ++g) v.allowed[k][g] = mask[at[k][g]];
    keep_lanes<T, kOp>(v);
    if (kOp == VnmOp::kMask) {
      for (int64_t c = 0; c < width; ++c) mask[c] = 0;
      for (int k = 0; k < 4; ++k)
        for (int64_t g = 0; g < u.groups; ++g) mask[at[k][g]] = v.allowed[k][g];
    } else if (kOp == VnmOp::kUnpack) {
      for (int64_t c = 0; c < width; ++c) x[c] = 0;
      for (int k = 0; k < 4; ++k)
        for (int64_t g = 0; g < u.groups; ++g) x[at[k][g]] = v.four[k][g];
    } else {
      for (int64_t g = 0; g < u.groups; ++g)
        for (int k = 0; k < 2; ++k) values[2 * g + k] = v.pair[k][g];
    }
    if (packs(kOp)) {
      if (u.groups % 2) v.nibble[u.groups] = kEmptyNibble;
      for (int64_t b = 0; b < ceil_div(u.groups, 2); ++b)
        metadata[b] = uint8_t(v.nibble[2 * b] | v.nibble[2 * b + 1] << 4);
    }
  }
}

// f(lane, index in dense) for the runs of 16 lanes in column k of a group.
template <class F>
S24_HD void for_lanes(const VnmArgs& a, const Unit& u, int64_t row, int64_t lanes, int64_t g, int k, const Columns columns,
                      F f) {
  for (int64_t l = 0; l < lanes; l += kVnmLanes)
    f(l, dense_at(a, u) + (g * a.m + columns[(row + l) / a.v][g][k]) * a.rows + row + l);
}

// Lanes are rows; packing transposes.
template <class T, VnmOp kOp>
void keep_along_columns(const VnmArgs& a, const Unit& u, const Columns columns) {
  using Bits = typename T::Bits;
  const int64_t all = a.depth / a.m, bytes = ceil_div(all, 2);
  Bits* dense = static_cast<Bits*>(a.dense);
  Lanes<Bits, kLanes> v = {};
  PackedTile<Bits> packed{};
  for (int64_t row = 0; row < u.rows; row += kLanes) {
    const int64_t n = u.rows - row < kLanes ? u.rows - row : kLanes, at = u.outer * a.rows + u.row0 + row;
    Bits* values = static_cast<Bits*>(a.values) + at * 2 * all + 2 * u.group0;
    uint8_t* metadata = a.metadata + at * bytes + u.group0 / 2;
    if (kOp == VnmOp::kGather || kOp == VnmOp::kUnpack) packed.load_metadata(metadata, bytes, n, u.groups);
    if (kOp == VnmOp::kUnpack) {
      packed.load_values(values, 2 * all, n, u.groups);
      packed.lines_to_rows();
    }
    if (packs(kOp)) {
      const uint32_t after = u.groups % 2 ? uint32_t(kEmptyNibble) << (4 * (u.groups % 8)) : 0u;
      for (int h = 0; h < 2; ++h)
        for (int l = 0; l < kLanes; ++l) packed.nibbles[h][l] = h == u.groups / 8 ? after : 0u;
    }
    for (int64_t g = 0; g < u.groups; ++g) {
      if (kOp == VnmOp::kUnpack) packed.get(g, v.pair);
      if (kOp == VnmOp::kGather || kOp == VnmOp::kUnpack) packed.get_nibbles(g, v.nibble);
      for (int k = 0; k < 4 && kOp != VnmOp::kUnpack; ++k) {
        for_lanes(a, u, row, n, g, k, columns, [&](int64_t l, int64_t i) {
          for (int j = 0; j < kVnmLanes; ++j) v.four[k][l + j] = dense[i + j];
          if (kOp == VnmOp::kPackMasked)
            for (int j = 0; j < kVnmLanes; ++j) v.allowed[k][l + j] = a.mask[i + j];
        });
      }
      keep_lanes<T, kOp>(v);
      if (kOp == VnmOp::kMask || kOp == VnmOp::kUnpack) {
        for (int64_t i = 0; i < a.m; ++i) {
          const int64_t line = dense_at(a, u) + (g * a.m + i) * a.rows + row;
          for (int64_t l = 0; l < n && kOp == VnmOp::kMask; ++l) a.mask[line + l] = 0;
          for (int64_t l = 0; l < n && kOp == VnmOp::kUnpack; ++l) dense[line + l] = 0;
        }
        for (int k = 0; k < 4; ++k) {
          for_lanes(a, u, row, n, g, k, columns, [&](int64_t l, int64_t i) {
            for (int j = 0; j < kVnmLanes && kOp == VnmOp::kMask; ++j) a.mask[i + j] = v.allowed[k][l + j];
            for (int j = 0; j < kVnmLanes && kOp == VnmOp::kUnpack; ++j) dense[i + j] = v.four[k][l + j];
          });
        }
      } else if (packs(kOp)) {
        packed.put(g, v.pair, v.nibble);
      } else {
        const uint8_t none[kLanes] = {};
        packed.put(g, v.pair, none);
      }
    }
    if (kOp == VnmOp::kMask || kOp == VnmOp::kUnpack) continue;
    packed.rows_to_lines();
    packed.store_values(values, 2 * all, n, u.groups);
    if (packs(kOp)) packed.store_metadata(metadata, bytes, n, u.groups);
  }
}

static_assert(kVnmGroups == kPackTileGroups && kVnmLeast == kLanes, "a packed tile is a part of a unit");

template <class T, VnmOp kOp>
void vnm_units_of(const VnmArgs& a, int64_t begin, int64_t end) {
  for (int64_t index = begin; index < end; ++index) {
    const Unit u = unit_at(a, index);
    constexpr bool kMasked = kOp == VnmOp::kPackMasked;
    Columns columns = {};
    const int64_t blocks = u.rows / a.v, all = a.depth / a.m;
    uint8_t* stored = a.columns + ((u.outer * a.rows + u.row0) / a.v * all + u.group0) * 4;
    const auto copy = [&](auto f) {
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t g = 0; g < u.groups; ++g)
          for (int k = 0; k < 4; ++k) f(columns[b][g][k], stored[(b * all + g) * 4 + k]);
    };
    if (kOp == VnmOp::kGather || kOp == VnmOp::kUnpack) {
      copy([&](uint8_t& own, uint8_t& given) { own = given < a.m ? given : uint8_t(a.m - 1); });
    } else if (a.exact) {
      choose_by_search<T>(a, u, columns);
    } else if (a.depth_last) {
      choose_along_rows<T, kMasked>(a, u, columns);
    } else {
      choose_along_columns<T, kMasked>(a, u, columns);
    }
    if (packs(kOp)) copy([](uint8_t& own, uint8_t& given) { given = own; });
    if (a.depth_last) {
      keep_along_rows<T, kOp>(a, u, columns);
    } else {
      keep_along_columns<T, kOp>(a, u, columns);
    }
  }
}

template <class T>
void vnm_typed(const VnmArgs& a, int64_t begin, int64_t end) {
  switch (a.op) {
    case VnmOp::kMask: return vnm_units_of<T, VnmOp::kMask>(a, begin, end);
    case VnmOp::kPack: return vnm_units_of<T, VnmOp::kPack>(a, begin, end);
    case VnmOp::kPackMasked: return vnm_units_of<T, VnmOp::kPackMasked>(a, begin, end);
    case VnmOp::kGather: return vnm_units_of<T, VnmOp::kGather>(a, begin, end);
    case VnmOp::kUnpack: return vnm_units_of<T, VnmOp::kUnpack>(a, begin, end);
  }
}

}  // namespace

void vnm(const VnmArgs& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case Dtype::kF32: return vnm_typed<F32>(a, begin, end);
    case Dtype::kBF16: return vnm_typed<BF16>(a, begin, end);
    case Dtype::kF16: return vnm_typed<F16>(a, begin, end);
  }
}

}  // namespace S24_ISA
}  // namespace s24
