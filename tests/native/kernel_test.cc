// The kernels of ffi/cuda, thread by thread on a CPU, against the definitions of ffi/core and float64 products.
// Prints one line per check: its name, and how many cases were wrong.
#include <algorithm>
#include <vector>

#include "../../ffi/core/matmul_vnm.h"
#include "../../ffi/core/mvue.h"
#include "../../ffi/core/packed24.h"
#include "../../ffi/core/prune_check.h"
#include "../../ffi/core/soft.h"
#include "../../ffi/core/squared_relu.h"
#include "../../ffi/core/packed_vnm.h"
#include "../../ffi/cuda/launch.h"
#include "checks.h"

using namespace s24;

// What the definitions of core say for one block and group, element by element.
template <class T>
static void expected_columns(const std::vector<typename T::Bits>& x, const std::vector<uint8_t>* mask, bool exact, int v, int m,
                             int64_t at, int64_t row_step, int64_t column_step, uint8_t columns[4]) {
  const auto word = [&](int r, int c) { return T::to_f32(x[size_t(at + r * row_step + c * column_step)]); };
  if (!exact) {
    uint32_t keys[kVnmMaxM];
    for (int c = 0; c < m; ++c) {
      float lanes[kVnmLanes] = {};
      uint32_t largest = 0;
      for (int r = 0; r < v; ++r) {
        const int64_t i = at + r * row_step + c * column_step;
        const bool allowed = mask == nullptr || (*mask)[size_t(i)] != 0;
        lanes[r % kVnmLanes] += allowed ? column_addend(word(r, c)) : 0.0f;
        largest = max_u32(largest, allowed ? (word(r, c) & kF32Magnitude) | (mask == nullptr ? 0 : kAllowed) : 0);
      }
      keys[c] = allowed_first(add_lanes(lanes, 1), largest);
    }
    best_columns(keys, m, columns);
    return;
  }
  uint32_t top = 0;
  for (int c = 0; c < m; ++c)
    for (int r = 0; r < v; ++r) top = max_u32(top, word(r, c) & kF32Magnitude);
  float best = -1;
  for (int a = 0; a < m; ++a)
    for (int b = a + 1; b < m; ++b)
      for (int c = b + 1; c < m; ++c)
        for (int d = c + 1; d < m; ++d) {
          float lanes[kVnmLanes] = {};
          for (int r = 0; r < v; ++r) {
            const float s[4] = {search_score(word(r, a), top), search_score(word(r, b), top),
                                search_score(word(r, c), top), search_score(word(r, d), top)};
            lanes[r % kVnmLanes] += largest_two(s[0] > s[1] ? s[0] : s[1], s[0] > s[1] ? s[1] : s[0],
                                                s[2] > s[3] ? s[2] : s[3], s[2] > s[3] ? s[3] : s[2]);
          }
          const float sum = add_lanes(lanes, 1);
          if (sum > best) {
            best = sum;
            columns[0] = uint8_t(a), columns[1] = uint8_t(b), columns[2] = uint8_t(c), columns[3] = uint8_t(d);
          }
        }
}

static PackVnmArgs pack_vnm_args(PackVnmOp op, Dtype dtype, bool exact, bool depth_last, int64_t rows, int64_t depth, int64_t v,
                                 int64_t m) {
  PackVnmArgs a{};
  a.op = op, a.dtype = dtype, a.exact = exact, a.depth_last = depth_last;
  a.outer = 2, a.rows = rows, a.depth = depth, a.v = v, a.m = m;
  return a;
}

// Every operation on two matrices.
template <class T>
static void vnm_case(const std::string& name, Dtype dtype, bool exact, bool depth_last, int64_t rows, int64_t depth, int64_t v,
                     int64_t m) {
  using Bits = typename T::Bits;
  const int64_t outer = 2, all = depth / m, bytes = ceil_div(all, 2), total = outer * rows;
  std::vector<Bits> x(size_t(total * depth)), values(size_t(total * 2 * all)), want_values = values;
  for (Bits& b : x) b = draw<Bits>();
  std::vector<uint8_t> metadata(size_t(total * bytes)), columns(size_t(total / v * all * 4)), mask(x.size());
  std::vector<uint8_t> want_metadata = metadata, want_columns = columns, allowed(x.size());
  for (uint8_t& a : allowed) a = random_bits() % 3 == 0;
  const int64_t row_step = depth_last ? depth : 1, column_step = depth_last ? 1 : rows;
  PackVnmArgs a = pack_vnm_args(PackVnmOp::kPack, dtype, exact, depth_last, rows, depth, v, m);
  a.dense = x.data(), a.values = values.data(), a.metadata = metadata.data(), a.columns = columns.data();
  for (const bool masked : {false, true}) {
    if (masked && exact) break;
    std::vector<Bits> want_dense(x.size());
    std::vector<uint8_t> want_mask(x.size());
    for (int64_t row = 0; row < total; ++row) {
      for (int64_t g = 0; g < all; ++g) {
        const int64_t matrix = row / rows * rows * depth, block = row % rows / v * v;
        uint8_t* const four = &want_columns[size_t((row / v * all + g) * 4)];
        if (row % v == 0)
          expected_columns<T>(x, masked ? &allowed : nullptr, exact, int(v), int(m),
                              matrix + block * row_step + g * m * column_step, row_step, column_step, four);
        Bits y[4], given[4], keep[4], pair[2];
        int64_t at[4];
        for (int k = 0; k < 4; ++k) {
          at[k] = matrix + row % rows * row_step + (g * m + four[k]) * column_step;
          y[k] = x[size_t(at[k])];
          given[k] = allowed[size_t(at[k])];
        }
        masked ? keep24_masked<T>(y, given, keep) : keep24<T>(y, keep);
        take_kept<Bits>(y, keep, pair);
        const uint8_t nibble = uint8_t(nibble_of<Bits>(keep) & 15);
        for (int j = 0; j < 2; ++j) want_values[size_t((row * all + g) * 2 + j)] = pair[j];
        uint8_t& byte = want_metadata[size_t(row * bytes + g / 2)];
        byte = g % 2 ? uint8_t((byte & 15) | nibble << 4) : uint8_t(nibble | kEmptyNibble << 4);
        for (int k = 0; k < 4; ++k) {
          want_mask[size_t(at[k])] = keep[k] & 1;
          want_dense[size_t(at[k])] = y[k] & keep[k];
        }
      }
    }
    const std::string what = name + (masked ? " masked" : "");
    a.op = masked ? PackVnmOp::kPackMasked : PackVnmOp::kPack;
    a.mask = allowed.data();
    cuda::run(a, nullptr);
    if (!masked && !exact && depth_last && cuda::fits_pack_vnm_tiles(a)) {
      PackVnmArgs s = a;
      std::vector<Bits> squares(x.size()), squared(values.size());
      std::vector<uint8_t> squared_metadata(metadata.size()), squared_columns(columns.size());
      for (size_t i = 0; i < x.size(); ++i) squares[i] = squared_relu<T>(x[i]);
      s.values = squared.data(), s.metadata = squared_metadata.data(), s.columns = squared_columns.data();
      cuda::launch_squared_relu_vnm(s, nullptr);
      s = a, s.dense = squares.data();
      cuda::run(s, nullptr);
      report(what + " squares",
             (values != squared) + (metadata != squared_metadata) + (columns != squared_columns));
      cuda::run(a, nullptr);
    }
    report(what + " packs", (values != want_values) + (metadata != want_metadata) + (columns != want_columns));
    if (!masked) {
      a.op = PackVnmOp::kMask, a.mask = mask.data();
      cuda::run(a, nullptr);
      report(what + " masks", mask != want_mask);
    }
    std::vector<Bits> dense(x.size(), Bits(7)), gathered(values.size());
    a.op = PackVnmOp::kUnpack, a.dense = dense.data();
    cuda::run(a, nullptr);
    a.op = PackVnmOp::kGather, a.values = gathered.data();
    cuda::run(a, nullptr);
    report(what + " unpacks", (dense != want_dense) + (gathered != values));
    a.dense = x.data(), a.values = values.data();
  }
}

// Two of every M features of each token, packed along features and then along tokens.
static void repack_case(const std::string& name, Dtype dtype, bool strided, bool collected, int64_t tokens, int64_t features,
                        int64_t v, int64_t m) {
  std::vector<uint16_t> x(size_t(tokens * features)), moved = x, values(x.size() / m * 2), along = values, want = values;
  for (uint16_t& b : x) b = draw<uint16_t>();
  std::vector<uint8_t> metadata(x.size() / m / 2), along_metadata = metadata, want_metadata = metadata;
  std::vector<uint8_t> columns(x.size() / v / m * 4), along_columns = columns, want_columns = columns;
  PackVnmArgs a = pack_vnm_args(PackVnmOp::kPack, dtype, false, true, tokens, features, v, m);
  a.outer = 1, a.dense = x.data(), a.values = values.data(), a.metadata = metadata.data(), a.columns = columns.data();
  cuda::run(a, nullptr);
  a.op = PackVnmOp::kUnpack;
  cuda::run(a, nullptr);
  for (int64_t k = 0; k < tokens; ++k)
    for (int64_t r = 0; r < features; ++r) {
      const int64_t token = strided ? k % m * (tokens / m) + k / m : k, groups = features / m;
      moved[size_t(k * features + r)] = x[size_t(token * features + (collected ? r % groups * m + r / groups : r))];
    }
  PackVnmArgs b = pack_vnm_args(PackVnmOp::kPack, dtype, false, false, features, tokens, v, m);
  b.outer = 1, b.dense = moved.data(), b.values = want.data(), b.metadata = want_metadata.data();
  b.columns = want_columns.data();
  cuda::run(b, nullptr);
  const cuda::RepackArgs c = {dtype,           strided,        collected,    tokens,                features,
                              v,               m,              values.data(), metadata.data(),      columns.data(),
                              along.data(),    along_metadata.data(),         along_columns.data()};
  if (cuda::fits_repack_vnm(c)) cuda::launch_repack_vnm(c, nullptr);
  report(name + " again along tokens", (along != want) + (along_metadata != want_metadata) + (along_columns != want_columns));
}

// Small integers, whose sums are exact.
template <class T>
static void product_case(const std::string& name, Dtype dtype, int64_t rows, int64_t depth, int64_t cols, int64_t v, int64_t m) {
  using Bits = typename T::Bits;
  const auto small = [] { return T::from_f32(bits_of(float(int(random_bits() % 9) - 4))); };
  const int64_t groups = depth / m, bytes = ceil_div(groups, 2);
  std::vector<Bits> values(size_t(rows * 2 * groups)), dense(size_t(depth * cols)), turned(dense.size()), out(size_t(rows * cols));
  std::vector<uint8_t> metadata(size_t(rows * bytes), uint8_t(kEmptyNibble | kEmptyNibble << 4));
  std::vector<uint8_t> columns(size_t(rows / v * groups * 4));
  for (size_t i = 0; i < columns.size(); i += 4) {
    int set[4];
    set_of_four(int(random_bits() % unsigned(sets_of(int(m), 4))), int(m), set);
    for (size_t k = 0; k < 4; ++k) columns[i + k] = uint8_t(set[k]);
  }
  for (Bits& b : dense) b = small();
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < cols; ++n) turned[size_t(n * depth + k)] = dense[size_t(k * cols + n)];
  std::vector<double> want(out.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const uint32_t first = random_bits() % 3, second = first + 1 + random_bits() % (3 - first);
      uint8_t& byte = metadata[size_t(r * bytes + g / 2)];
      const int shift = int(g % 2 * 4);
      byte = uint8_t((byte & ~(15 << shift)) | (first | second << 2) << shift);
      for (int j = 0; j < 2; ++j) {
        Bits& value = values[size_t((r * groups + g) * 2 + j)];
        value = small();
        const int64_t k = g * m + columns[size_t((r / v * groups + g) * 4 + (j ? second : first))];
        for (int64_t n = 0; n < cols; ++n)
          want[size_t(r * cols + n)] += double(float_of(T::to_f32(value))) * float_of(T::to_f32(dense[size_t(k * cols + n)]));
      }
    }
  long wrong = 0;
  for (int layout = 0; layout < 4; ++layout) {
    if (layout % 2 == 1 && m != 4 && dtype != Dtype::kF32) continue;  // programs transpose D before
    MatmulVnmArgs a{};
    a.product = {dtype, dtype, values.data(), metadata.data(), nullptr, out.data(), rows, depth, cols, layout % 2 == 1, layout / 2 == 1};
    a.product.dense = a.product.dense_k_last ? turned.data() : dense.data();
    a.columns = columns.data(), a.v = v, a.m = m;
    for (const int major : {8, 9}) {  // mma.sp, and on Hopper wgmma.sp
      emulated::major = major;
      std::fill(out.begin(), out.end(), Bits(0));
      m == 4 ? cuda::run(a.product, nullptr)  // the columns of a group are all of them: also the 2:4 product
             : cuda::run(a, nullptr);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < cols; ++n) {
          const Bits got = out[size_t(a.product.out_packed_last ? n * rows + r : r * cols + n)];
          wrong += T::from_f32(bits_of(float(want[size_t(r * cols + n)]))) != got;
        }
    }
  }
  report(name, wrong);
}

// What operations draw by, of an array that is a shard if `width` is not zero: groups of a row.
static Draws draws_of(const Groups& g, int64_t width) { return {kKey, width != 0, width, g.count()}; }

// The number of group n of such an array in the whole array, counted row by row.
static int64_t number_of(const Draws& d, int64_t n) {
  if (!d.shard) return n;
  const int64_t rows = d.count / d.width, row = kKey[2] * rows + n / d.width, column = kKey[3] * d.width + n % d.width;
  return row * (kKey[4] * d.width) + column;
}

// Arrays that are no shards, and shards: if inner is 1, groups follow each other and rows may have any length.
static std::vector<Draws> all_draws(const Groups& g) {
  std::vector<Draws> all = {draws_of(g, 0)};
  if (g.inner > 1) return all.push_back(draws_of(g, g.inner)), all;
  for (const int64_t width : {3, 4, 5})
    if (g.count() % width == 0) all.push_back(draws_of(g, width));
  return all;
}

// The estimate of a group, or the group.
template <class T>
static void estimate(bool draws, bool exact, int64_t number, const typename T::Bits x[4], typename T::Bits y[4]) {
  const uint32_t words[2] = {group_word(kKey[0], kKey[1], uint64_t(number), 0), group_word(kKey[0], kKey[1], uint64_t(number), 1)};
  if (!draws)
    std::copy(x, x + 4, y);
  else if (exact)
    mvue24<T, true>(x, words[0], 0, y);
  else
    mvue24<T, false>(x, words[0], words[1], y);
}

// f(group's number, place of its first element, its packed row, its index there)
template <class F>
static void for_groups(const Groups& g, F f) {
  for (int64_t n = 0; n < g.count(); ++n) {
    const int64_t i = n % g.inner, q = n / g.inner % (g.len / 4), o = n / g.inner / (g.len / 4);
    f(n, (o * g.len + 4 * q) * g.inner + i, o * g.inner + i, q);
  }
}

template <class T>
static void pack_case(const std::string& name, Dtype dtype, Groups g) {
  using Bits = typename T::Bits;
  const int64_t total = g.count() * 4, bytes = ceil_div(g.len, 8), rows = g.outer * g.inner;
  alignas(64) static Bits x[1 << 16], values[1 << 15], dense[1 << 16];
  alignas(64) static uint8_t metadata[1 << 14], mask[1 << 16];
  long wrong[3] = {};
  for (const PackOp op : {PackOp::kPlain, PackOp::kMasked, PackOp::kSquaredRelu, PackOp::kMvueExact, PackOp::kMvueSequential})
  for (const Draws& draws : all_draws(g)) {
    const bool random = op == PackOp::kMvueExact || op == PackOp::kMvueSequential;
    if (draws.shard && !random) continue;
    for (int64_t i = 0; i < total; ++i) x[i] = draw<Bits>(), mask[i] = random_bits() % 2;
    std::vector<Bits> want_values(size_t(total / 2)), want_dense(size_t(total), Bits(0));
    std::vector<uint8_t> want_metadata(size_t(rows * bytes), uint8_t(kEmptyNibble << 4));
    for_groups(g, [&](int64_t n, int64_t at, int64_t row, int64_t q) {
      Bits y[4], given[4], allowed[4], keep[4], pair[2];
      for (int j = 0; j < 4; ++j) given[j] = x[at + j * g.inner], allowed[j] = mask[at + j * g.inner];
      estimate<T>(random, op == PackOp::kMvueExact, number_of(draws, n), given, y);
      if (op == PackOp::kSquaredRelu)
        for (Bits& b : y) b = squared_relu<T>(b);
      op == PackOp::kMasked ? keep24_masked<T>(y, allowed, keep) : keep24<T>(y, keep);
      take_kept<Bits>(y, keep, pair);
      std::copy(pair, pair + 2, &want_values[size_t(row * (g.len / 2) + 2 * q)]);
      uint8_t& byte = want_metadata[size_t(row * bytes + q / 2)];
      const uint8_t nibble = uint8_t(nibble_of<Bits>(keep) & 15);
      byte = q % 2 ? uint8_t((byte & 15) | nibble << 4) : uint8_t((byte & 0xf0) | nibble);
      for (int j = 0; j < 4; ++j) want_dense[size_t(at + j * g.inner)] = y[j] & keep[j];
    });
    PackArgs a = {op, dtype, x, mask, values, metadata, g, draws};
    cuda::run(a, nullptr);
    wrong[0] += !std::equal(want_values.begin(), want_values.end(), values);
    wrong[0] += !std::equal(want_metadata.begin(), want_metadata.end(), metadata);
    a.op = PackOp::kUnpack, a.dense = dense;
    cuda::run(a, nullptr);
    wrong[1] += !std::equal(want_dense.begin(), want_dense.end(), dense);
    a.op = PackOp::kGather;
    std::fill(values, values + total / 2, Bits(0));
    cuda::run(a, nullptr);
    wrong[2] += !std::equal(want_values.begin(), want_values.end(), values);
  }
  // Squared ReLU both ways, as one array after another.
  std::vector<Bits> row_values(size_t(total / 2)), want_rows = row_values, want_columns = row_values;
  std::vector<uint8_t> row_metadata(size_t(g.outer * g.len * ceil_div(g.inner, 8)), 1), want_bytes = row_metadata;
  std::vector<uint8_t> want_metadata(size_t(rows * bytes), 1);
  const Groups along = {g.outer * g.len, g.inner, 1};
  PackArgs r = {PackOp::kSquaredRelu, dtype, x, nullptr, want_rows.data(), want_bytes.data(), along};
  PackArgs c = {PackOp::kSquaredRelu, dtype, x, nullptr, want_columns.data(), want_metadata.data(), g};
  if (g.inner % 4 == 0) {
    cuda::run(r, nullptr);
    cuda::run(c, nullptr);
    r.values = row_values.data(), r.metadata = row_metadata.data(), c.values = values, c.metadata = metadata;
    cuda::launch_squared_relu_both(r, c, nullptr);
    wrong[0] += row_values != want_rows || row_metadata != want_bytes;
    wrong[0] += !std::equal(want_columns.begin(), want_columns.end(), values);
    wrong[0] += !std::equal(want_metadata.begin(), want_metadata.end(), metadata);
  }
  // Members of a group a quarter of the axis apart: as if their rows had been moved together.
  for (int64_t o = 0; o < g.outer; ++o) {
    for (int64_t k = 0; k < g.len; ++k)
      std::copy_n(x + (o * g.len + k % 4 * (g.len / 4) + k / 4) * g.inner, g.inner, dense + (o * g.len + k) * g.inner);
  }
  for (const PackOp op : {PackOp::kPlain, PackOp::kMvueExact, PackOp::kMvueSequential}) {
    if (g.inner == 1) break;  // of one column it is one long row
    PackArgs a = {op, dtype, dense, nullptr, want_columns.data(), want_metadata.data(), g, draws_of(g, g.inner)};
    cuda::run(a, nullptr);
    a.dense = x, a.values = values, a.metadata = metadata, a.strided = true;
    cuda::run(a, nullptr);
    wrong[0] += !std::equal(want_columns.begin(), want_columns.end(), values);
    wrong[0] += !std::equal(want_metadata.begin(), want_metadata.end(), metadata);
  }
  report(name + " packs 2:4", wrong[0]);
  report(name + " unpacks 2:4", wrong[1]);
  report(name + " gathers 2:4", wrong[2]);
}

template <class T>
static void groupwise_case(const std::string& name, Dtype dtype, Groups g) {
  using Bits = typename T::Bits;
  alignas(64) static Bits x[1 << 16], y[1 << 16];
  long wrong = 0;
  for (const GroupwiseOp op : {GroupwiseOp::kPrune, GroupwiseOp::kSoft, GroupwiseOp::kMvueExact, GroupwiseOp::kMvueSequential, GroupwiseOp::kMask})
  for (const Draws& draws : all_draws(g)) {
    if (draws.shard && op != GroupwiseOp::kMvueExact && op != GroupwiseOp::kMvueSequential) continue;
    for (int64_t i = 0; i < 4 * g.count(); ++i) x[i] = draw<Bits>();
    const GroupwiseArgs args = {op, dtype, x, y, g, draws};
    if (op == GroupwiseOp::kMask || op == GroupwiseOp::kPrune)
      cuda::run(SelectArgs{args}, nullptr);
    else if (op == GroupwiseOp::kSoft)
      cuda::run(SoftArgs{args}, nullptr);
    else
      cuda::run(MvueArgs{args}, nullptr);
    for_groups(g, [&](int64_t n, int64_t at, int64_t, int64_t) {
      Bits given[4], want[4], keep[4];
      for (int j = 0; j < 4; ++j) given[j] = x[at + j * g.inner];
      keep24<T>(given, keep);
      if (op == GroupwiseOp::kPrune)
        prune24<T>(given, want);
      else if (op == GroupwiseOp::kSoft)
        soft24<T>(given, want);
      else
        estimate<T>(op != GroupwiseOp::kMask, op == GroupwiseOp::kMvueExact, number_of(draws, n), given, want);
      long differ = 0;
      for (int j = 0; j < 4; ++j) {
        const int64_t i = at + j * g.inner;
        differ += op == GroupwiseOp::kMask ? reinterpret_cast<uint8_t*>(y)[i] != (keep[j] & 1) : y[i] != want[j];
      }
      if (differ != 0) show_first(wrong, name + " groupwise, operation " + std::to_string(int(op)), given, 4);
      wrong += differ;
    });
  }
  report(name + " groupwise", wrong);
}

// Zeros of both signs, the least subnormals and any other bits; bytes are 0 or 1.
template <class B>
static void prune_check_case(const std::string& name, Groups g) {
  constexpr B kSign = B(~(B(-1) >> 1));
  alignas(64) static B memory[(1 << 16) + 1];
  long wrong = 0;
  for (const int offset : {0, 1}) {  // aligned for wide accesses, and not
    B* const x = memory + offset;
    for (int64_t i = 0; i < 4 * g.count(); ++i)
      x[i] = sizeof(B) == 1 ? B(random_bits() % 2) : std::vector<B>{0, kSign, 1, B(random_bits() | 1)}[random_bits() % 4];
    int32_t want = 0, found = 7;
    for_groups(g, [&](int64_t, int64_t at, int64_t, int64_t) {
      int non_zeros = 0;
      for (int j = 0; j < 4; ++j) non_zeros += x[at + j * g.inner] != 0 && x[at + j * g.inner] != kSign;
      want += non_zeros > 2;
    });
    cuda::run(PruneCheckArgs{sizeof(B), x, &found, g}, nullptr);
    wrong += found != want + 7;
  }
  report(name + " checked", wrong);
}

int main() {
  // The large ones so that blocks repeat their work, and the last one ends early.
  const Groups shapes[] = {{1, 8 * 2208, 1}, {3, 20, 1}, {2, 384, 72}, {2, 12, 5}};
  for (const Groups& g : shapes) {
    const std::string shape = std::to_string(g.outer) + "x" + std::to_string(g.len) + "x" + std::to_string(g.inner);
    pack_case<BF16>("bfloat16 " + shape, Dtype::kBF16, g);
    pack_case<F32>("float32 " + shape, Dtype::kF32, g);
  }
  for (const Groups& g : {Groups{1101, 16, 1}, Groups{1, 20, 1}, Groups{2, 80, 216}, Groups{2, 8, 3}}) {
    const std::string shape = std::to_string(g.outer) + "x" + std::to_string(g.len) + "x" + std::to_string(g.inner);
    groupwise_case<F16>("float16 " + shape, Dtype::kF16, g);
    groupwise_case<BF16>("bfloat16 " + shape, Dtype::kBF16, g);
    groupwise_case<F32>("float32 " + shape, Dtype::kF32, g);
  }
  for (const Groups& g : {Groups{1101, 16, 1}, Groups{1, 20, 1}, Groups{2, 80, 216}, Groups{2, 144, 208}, Groups{2, 8, 3}}) {
    const std::string shape = std::to_string(g.outer) + "x" + std::to_string(g.len) + "x" + std::to_string(g.inner);
    prune_check_case<uint8_t>("bool " + shape, g);
    prune_check_case<uint16_t>("16 bit " + shape, g);
    prune_check_case<uint32_t>("32 bit " + shape, g);
  }
  vnm_case<BF16>("bfloat16 16:2:4 along rows", Dtype::kBF16, false, true, 48, 72, 16, 4);
  vnm_case<BF16>("bfloat16 128:2:8 along rows", Dtype::kBF16, false, true, 128, 160, 128, 8);
  vnm_case<BF16>("bfloat16 32:2:7 along columns", Dtype::kBF16, false, false, 160, 35, 32, 7);
  vnm_case<F16>("float16 256:2:16 along columns", Dtype::kF16, false, false, 256, 48, 256, 16);
  vnm_case<BF16>("bfloat16 64:2:8 in tiles along rows", Dtype::kBF16, false, true, 128, 256, 64, 8);
  vnm_case<BF16>("bfloat16 128:2:16 in tiles along columns", Dtype::kBF16, false, false, 256, 256, 128, 16);
  vnm_case<F16>("float16 128:2:32 in tiles along rows", Dtype::kF16, false, true, 128, 128, 128, 32);
  vnm_case<F16>("float16 64:2:16 in tiles along columns", Dtype::kF16, false, false, 64, 128, 64, 16);
  for (const bool strided : {false, true})
    for (const bool collected : {false, true}) {
      const std::string order = std::string(strided ? " strided" : "") + (collected ? " collected" : "");
      repack_case("bfloat16 64:2:16" + order, Dtype::kBF16, strided, collected, 256, 1024, 64, 16);
      repack_case("float16 128:2:8" + order, Dtype::kF16, strided, collected, 128, 2048, 128, 8);
    }
  repack_case("bfloat16 256:2:32", Dtype::kBF16, true, false, 256, 512, 256, 32);
  repack_case("bfloat16 64:2:32 collected", Dtype::kBF16, true, true, 128, 2048, 64, 32);
  vnm_case<F32>("float32 64:2:32 along columns", Dtype::kF32, false, false, 192, 160, 64, 32);
  vnm_case<F32>("float32 64:2:12 along rows", Dtype::kF32, false, true, 64, 132, 64, 12);
  vnm_case<BF16>("bfloat16 16:2:6 searched along rows", Dtype::kBF16, true, true, 32, 18, 16, 6);
  vnm_case<F32>("float32 32:2:9 searched along columns", Dtype::kF32, true, false, 64, 18, 32, 9);
  product_case<BF16>("bfloat16 128:2:8 product", Dtype::kBF16, 128, 128 * 8, 24, 128, 8);
  product_case<BF16>("bfloat16 64:2:16 product of two tiles", Dtype::kBF16, 128, 80 * 16, 264, 64, 16);
  product_case<BF16>("bfloat16 128:2:8 product of many tiles", Dtype::kBF16, 256, 128, 1288, 128, 8);
  product_case<F16>("float16 64:2:8 product of tiles of an odd number", Dtype::kF16, 320, 48 * 8, 136, 64, 8);
  product_case<BF16>("bfloat16 64:2:10 product of odd sizes", Dtype::kBF16, 128, 70, 13, 64, 10);
  product_case<F16>("float16 32:2:16 product", Dtype::kF16, 64, 512, 136, 32, 16);
  product_case<F32>("float32 16:2:5 product", Dtype::kF32, 32, 55, 70, 16, 5);
  product_case<F32>("float32 128:2:8 product", Dtype::kF32, 128, 88, 9, 128, 8);
  product_case<BF16>("bfloat16 2:4 product", Dtype::kBF16, 144, 200, 24, 16, 4);
  product_case<F32>("float32 2:4 product", Dtype::kF32, 80, 44, 70, 16, 4);
  return 0;
}
