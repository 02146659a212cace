// The CPU kernels on random calls under the address and undefined-behaviour sanitizers, which end the program at the first
// finding. Arguments: how many calls, number of the first one. Calls depend on their number alone.
//
// Buffers have the size of their array, to the byte, and the alignment of their elements; work is split at random. The
// instruction sets of S24_ISAS give the same bits. Sums differ in rounding, so products are compared where they are exact:
// in half of the calls, whose numbers are small and whole. Prints how many calls of each kernel were made, how many were
// compared, and in how many the bits differed.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "../../ffi/core/mvue.h"
#include "../../ffi/core/prune_check.h"
#include "../../ffi/core/soft.h"
#include "../../ffi/cpu/work.h"
#include "checks.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace s24;

static bool compared;  // whether the results of the call must be the same

static std::string now;  // what the call is

static int64_t upto(int64_t n) { return int64_t(random_bits() % uint64_t(n + 1)); }
template <class T>
static T one_of(std::initializer_list<T> all) {
  return all.begin()[upto(int64_t(all.size()) - 1)];
}

// Sizes around those at which kernels change their way, and small ones.
static int64_t size(int64_t most) {
  const int64_t near = one_of<int64_t>({1, 4, 8, 16, 32, 48, 64, 128, 256, 384, 512, 1024});
  return std::clamp<int64_t>(upto(2) == 0 ? 1 + upto(40) : near + upto(4) - 2, 1, most);
}

static int64_t bytes_of(Dtype d) { return d == Dtype::kF32 ? 4 : 2; }

// An array that ends where its memory ends.
class Array {
 public:
  Array(int64_t n, int64_t size) : bytes_(n * size), offset_(upto(16) * size), memory_(new char[size_t(bytes_ + offset_)]) {}
  char* data() { return memory_.get() + offset_; }
  uint8_t* bytes() { return reinterpret_cast<uint8_t*>(data()); }
  Array& floats(Dtype d) {
    if (d == Dtype::kF32) return fill([] { return draw<uint32_t>(); });
    return fill([d] { return uint16_t(draw<uint16_t>() ^ (d == Dtype::kF16 ? random_bits() & 0x4000 : 0)); });
  }
  // From -4 to 4.
  Array& whole(Dtype d) {
    const auto bits = [] { return bits_of(float(upto(8) - 4)); };
    if (d == Dtype::kF32) return fill(bits);
    return fill([=] { return d == Dtype::kF16 ? F16::from_f32(bits()) : BF16::from_f32(bits()); });
  }
  Array& random(uint32_t modulus = 256) {
    return fill([modulus] { return uint8_t(random_bits() % modulus); });
  }
  // Metadata of which each nibble names two places in order.
  Array& pairs() {
    const auto nibble = [] { return one_of<uint32_t>({0x4, 0x8, 0xc, 0x9, 0xd, 0xe}); };
    return fill([nibble] { return uint8_t(nibble() | nibble() << 4); });
  }
  bool operator==(Array& o) { return std::memcmp(data(), o.data(), size_t(bytes_)) == 0; }

 private:
  template <class F>
  Array& fill(F f) {
    for (int64_t i = 0; i < bytes_; i += int64_t(sizeof f())) {
      const auto value = f();
      std::memcpy(data() + i, &value, sizeof value);
    }
    return *this;
  }
  int64_t bytes_, offset_;
  std::unique_ptr<char[]> memory_;
};

// run(arguments, begin, end) over [0, n) in pieces, in any order.
template <class Args>
static void in_pieces(int64_t n, const Args& args, void (*run)(const Args&, int64_t begin, int64_t end)) {
  std::vector<int64_t> borders = {0, n};
  for (int64_t i = upto(3); i > 0; --i) borders.push_back(upto(n));
  std::sort(borders.begin(), borders.end());
  std::vector<size_t> order(borders.size() - 1);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_bits);
  for (size_t i : order)
    if (borders[i] < borders[i + 1]) run(args, borders[i], borders[i + 1]);
}

static std::string say(std::initializer_list<int64_t> numbers) {
  std::string all;
  for (int64_t n : numbers) all += " " + std::to_string(n);
  return all;
}

// A key, of an array or of a shard of one.
static Draws draws(const Groups& g) {
  const int64_t width = g.inner > 1 ? g.inner : g.len / 4;
  return {kKey, upto(1) == 1, width, g.count()};
}

static Groups groups(int64_t most) {
  Groups g;
  g.inner = upto(2) == 0 ? 1 : size(most);
  g.len = 4 * size(std::max<int64_t>(1, most / g.inner));
  g.outer = 1 + upto(std::min<int64_t>(3, most / (g.inner * g.len)));
  return g;
}

static Dtype dtype() { return one_of({Dtype::kF32, Dtype::kBF16, Dtype::kF16}); }

template <class T>
static bool differ(std::vector<T>& results) {
  return std::any_of(results.begin(), results.end(), [&](T& r) { return !(r == results.front()); });
}

// Each: a call for every instruction set; whether bits differ.

template <class Args>
static bool groupwise_by(GroupwiseOp op) {
  const Dtype d = dtype();
  const Groups g = groups(6000);
  const int64_t n = 4 * g.count(), out = op == GroupwiseOp::kMask ? 1 : bytes_of(d);
  now = "groupwise" + say({int64_t(op), int64_t(d), g.outer, g.len, g.inner});
  Array x(n, bytes_of(d));
  x.floats(d);
  const Draws by = draws(g);
  std::vector<Array> results;
  for (const auto run : kOfUnits<Args>) {
    const Args a = {{op, d, x.data(), results.emplace_back(n, out).data(), g, by}};
    in_pieces(g.count(), a, run);
  }
  return differ(results);
}

static bool groupwise() {
  switch (upto(4)) {
    case 0: return groupwise_by<SelectArgs>(GroupwiseOp::kMask);
    case 1: return groupwise_by<SelectArgs>(GroupwiseOp::kPrune);
    case 2: return groupwise_by<SoftArgs>(GroupwiseOp::kSoft);
    case 3: return groupwise_by<MvueArgs>(GroupwiseOp::kMvueExact);
    default: return groupwise_by<MvueArgs>(GroupwiseOp::kMvueSequential);
  }
}

static bool tiles() {
  const TileOp op = one_of({TileOp::kTransposableMask, TileOp::kPruneColumnsFirst, TileOp::kPruneRowsFirst});
  const Dtype d = dtype();
  const int64_t rows = 4 * (1 + upto(8)), cols = 4 * size(100), out = op == TileOp::kTransposableMask ? 1 : bytes_of(d);
  now = "tile" + say({int64_t(op), int64_t(d), rows, cols});
  Array w(rows * cols, bytes_of(d));
  w.floats(d);
  std::vector<Array> results;
  for (const auto run : kOfUnits<TileArgs>) {
    const TileArgs a = {op, d, w.data(), results.emplace_back(rows * cols, out).data(), rows, cols};
    in_pieces(rows / 4, a, run);
  }
  return differ(results);
}

static bool packs() {
  const PackOp op = one_of({PackOp::kPlain, PackOp::kMasked, PackOp::kSquaredRelu, PackOp::kMvueExact, PackOp::kMvueSequential,
                            PackOp::kGather, PackOp::kUnpack});
  const Dtype d = dtype();
  const Groups g = groups(12000);
  const int64_t n = 4 * g.count(), metadata = g.outer * g.inner * ceil_div(g.len, 8);
  now = "pack" + say({int64_t(op), int64_t(d), g.outer, g.len, g.inner});
  Array x(n, bytes_of(d)), mask(n, 1), values(n / 2, bytes_of(d)), places(metadata, 1);
  x.floats(d), mask.random(2), values.floats(d), places.random();
  const Draws by = draws(g);
  std::vector<Array> dense, kept, made;
  for (const auto run : kOfUnits<PackArgs>) {
    const bool unpacks = op == PackOp::kUnpack, reads = unpacks || op == PackOp::kGather;
    dense.emplace_back(n, bytes_of(d)), kept.emplace_back(n / 2, bytes_of(d)), made.emplace_back(metadata, 1);
    const PackArgs a = {op, d, unpacks ? dense.back().data() : x.data(), mask.bytes(),
                        unpacks ? values.data() : kept.back().data(), reads ? places.bytes() : made.back().bytes(), g, by};
    in_pieces(pack_units(g), a, run);
  }
  if (op == PackOp::kUnpack) return differ(dense);
  return differ(kept) || (op != PackOp::kGather && differ(made));
}

static bool saved() {
  SavedArgs a{};
  a.dtype = dtype(), a.slope = one_of({Slope::kRelu, Slope::kSquaredRelu}), a.strided = upto(1) != 0;
  a.features = 4 * size(200), a.tokens = 4 * size(std::max<int64_t>(1, 20000 / a.features)), a.dense_rows = upto(9);
  now = "saved" + say({int64_t(a.dtype), int64_t(a.slope), a.strided, a.tokens, a.features, a.dense_rows});
  const int64_t n = a.tokens * a.features, size = bytes_of(a.dtype);
  Array values(n / 2, size), metadata(a.tokens * ceil_div(a.features, 8), 1), dy2(n, size), ranks(a.features, 4);
  a.values = values.floats(a.dtype).data(), a.metadata = metadata.random().bytes(), a.dy2 = dy2.floats(a.dtype).data();
  auto* const rank = reinterpret_cast<int32_t*>(ranks.data());
  a.ranks = rank;
  for (int64_t i = 0; i < a.features; ++i) rank[i] = -1;
  for (int32_t r = 0; r < int32_t(a.dense_rows) + 2; ++r) rank[upto(a.features - 1)] = r;  // two name no row
  std::vector<Array> results[7];
  for (const auto run : kOfUnits<SavedArgs>) {
    const auto made = [&](int i, int64_t count, int64_t each) -> Array& {
      Array& to = results[i].emplace_back(count, each);
      std::memset(to.data(), 0, size_t(count * each));  // a row that no rank names is left as it is
      return to;
    };
    const auto along = [&](int i) {
      return AlongTokens{made(i, n / 2, size).data(), made(i + 1, a.features * ceil_div(a.tokens, 8), 1).bytes(),
                         made(i + 2, a.dense_rows * a.tokens, size).data()};
    };
    a.dy1 = made(0, n / 2, size).data(), a.y2_along = along(1), a.dy1_along = along(4);
    in_pieces(work_of(a, 1, 1).units, a, run);
  }
  return std::any_of(std::begin(results), std::end(results), [](std::vector<Array>& of) { return differ(of); });
}

static bool prune_checks() {
  const int64_t width = one_of<int64_t>({1, 2, 4});
  const Groups g = groups(6000);
  now = "prune check" + say({width, g.outer, g.len, g.inner});
  Array x(4 * g.count(), width);
  x.random(2);
  std::vector<int32_t> results;
  for (const auto run : kOfUnits<PruneCheckArgs>) {
    const PruneCheckArgs a = {width, x.data(), &results.emplace_back(0), g};
    in_pieces(g.count(), a, run);
  }
  return differ(results);
}

static int64_t height() { return one_of<int64_t>({16, 32, 64, 128, 256}); }
static int64_t width(int64_t most) { return 4 + upto(most - 4); }

static bool blocks() {
  PackVnmArgs a{};
  a.op = one_of({PackVnmOp::kMask, PackVnmOp::kPack, PackVnmOp::kPackMasked, PackVnmOp::kGather, PackVnmOp::kUnpack});
  a.dtype = dtype();
  a.exact = (a.op == PackVnmOp::kMask || a.op == PackVnmOp::kPack) && upto(7) == 0;
  a.depth_last = upto(1) != 0;
  a.v = a.exact ? 16 : height();
  a.m = upto(1) != 0 ? one_of<int64_t>({8, 16, a.exact ? 4 : 32}) : width(a.exact ? 8 : kVnmMaxM);
  a.outer = 1 + upto(1);
  a.rows = a.v * (1 + upto(256 / a.v));
  a.depth = a.m * (a.exact ? 1 + upto(3) : size(std::max<int64_t>(1, 30000 / a.rows / a.m)));
  const int64_t all = a.depth / a.m, n = a.outer * a.rows * a.depth, size = bytes_of(a.dtype);
  const int64_t values = a.outer * a.rows * 2 * all, metadata = a.outer * a.rows * ceil_div(all, 2);
  const int64_t columns = a.outer * a.rows / a.v * all * 4;
  now = "vnm" + say({int64_t(a.op), int64_t(a.dtype), a.exact, a.depth_last, a.v, a.m, a.outer, a.rows, a.depth});
  Array x(n, size), allowed(n, 1), given_values(values, size), given_metadata(metadata, 1), given_columns(columns, 1);
  x.floats(a.dtype), allowed.random(2), given_values.floats(a.dtype), given_metadata.random(), given_columns.random(40);
  std::vector<Array> dense, mask, kept, places, chosen;
  for (const auto run : kOfUnits<PackVnmArgs>) {
    const bool unpacks = a.op == PackVnmOp::kUnpack, reads = unpacks || a.op == PackVnmOp::kGather;
    PackVnmArgs b = a;
    b.dense = unpacks ? dense.emplace_back(n, size).data() : x.data();
    b.mask = a.op == PackVnmOp::kMask ? mask.emplace_back(n, 1).bytes() : allowed.bytes();
    b.values = unpacks ? given_values.data() : kept.emplace_back(values, size).data();
    b.metadata = reads ? given_metadata.bytes() : places.emplace_back(metadata, 1).bytes();
    b.columns = reads ? given_columns.bytes() : chosen.emplace_back(columns, 1).bytes();
    in_pieces(work_of(b, 1, 1).units, b, run);
  }
  if (a.op == PackVnmOp::kMask) return differ(mask);
  if (a.op == PackVnmOp::kUnpack) return differ(dense);
  return differ(kept) || (a.op != PackVnmOp::kGather && (differ(places) || differ(chosen)));
}

static void* scratch() {
  static void* const memory = std::aligned_alloc(64, kScratch);
  return memory;
}

// Every block of a product's result.
template <class Args>
static void in_blocks(const Grid& grid, const Args& args, void (*run)(const Args&, const Block&, void* scratch)) {
  for (int64_t unit = 0; unit < grid.units(); ++unit) run(args, grid.block(unit), scratch());
}

// What a product multiplies.
static char* numbers(Array& x, Dtype d) { return (compared ? x.whole(d) : x.floats(d)).data(); }

static uint8_t* places(Array& x) { return (compared ? x.pairs() : x.random()).bytes(); }

static MatmulArgs product(int64_t rows, int64_t depth, int64_t cols) {
  MatmulArgs a{};
  a.in = dtype(), a.out_dtype = upto(1) != 0 ? a.in : Dtype::kF32;
  a.rows = rows, a.depth = depth, a.cols = cols;
  a.dense_k_last = upto(1) != 0, a.out_packed_last = upto(1) != 0;
  return a;
}

static bool products() {
  MatmulArgs a = product(size(400), 4 * size(upto(9) == 0 ? 300 : 40), size(upto(9) == 0 ? 600 : 80));
  now = "matmul" + say({int64_t(a.in), int64_t(a.out_dtype), a.rows, a.depth, a.cols, a.dense_k_last, a.out_packed_last});
  Array values(a.rows * a.depth / 2, bytes_of(a.in)), metadata(a.rows * ceil_div(a.depth, 8), 1);
  Array dense(a.depth * a.cols, bytes_of(a.in));
  a.values = numbers(values, a.in), a.metadata = places(metadata), a.dense = numbers(dense, a.in);
  const int64_t rows = 16 * (1 + upto(kMatmulRows / 16 - 1)), cols = 64 * (1 + upto(kMatmulCols / 64 - 1));
  std::vector<Array> results;
  for (const auto run : kOfBlocks<MatmulArgs>) {
    a.out = results.emplace_back(a.rows * a.cols, bytes_of(a.out_dtype)).data();
    in_blocks({a.rows, a.cols, rows, cols}, a, run);
  }
  return compared && differ(results);
}

static bool block_products() {
  const int64_t v = height(), m = upto(1) != 0 ? one_of<int64_t>({4, 8, 16, 32}) : width(kVnmMaxM);
  const bool deep = upto(19) == 0;  // more than one panel
  const int64_t groups = deep ? 1 + upto(5000 / m) : size(600 / m), rows = v * (deep ? 1 + upto(1) : 1 + upto(512 / v));
  MatmulVnmArgs a{product(rows, groups * m, size(deep ? 20 : 80)), nullptr, v, m};
  MatmulArgs& p = a.product;
  now = "vnm_matmul" + say({int64_t(p.in), int64_t(p.out_dtype), rows, p.depth, p.cols, v, m, p.dense_k_last, p.out_packed_last});
  Array values(rows * 2 * groups, bytes_of(p.in)), metadata(rows * ceil_div(groups, 2), 1), columns(rows / v * groups * 4, 1);
  Array dense(p.depth * p.cols, bytes_of(p.in));
  p.values = numbers(values, p.in), p.metadata = places(metadata), p.dense = numbers(dense, p.in);
  a.columns = columns.random(40).bytes();
  const int64_t most = (p.depth > kVnmMatmulDepth ? kVnmMatmulRows / 2 : kVnmMatmulRows) / v, high = v * (1 + upto(most - 1));
  std::vector<Array> results;
  for (const auto run : kOfBlocks<MatmulVnmArgs>) {
    p.out = results.emplace_back(rows * p.cols, bytes_of(p.out_dtype)).data();
    in_blocks({rows, p.cols, high, kVnmMatmulCols}, a, run);
  }
  return compared && differ(results);
}

static bool samples() {
  const int64_t v = height(), m = width(kVnmMaxM), rows = v * (1 + upto(128 / v));
  const int64_t groups = size(upto(9) == 0 ? 140 : 12), cols = groups * m;
  SampledArgs a{};
  a.dtype = dtype(), a.rows = rows, a.depth = upto(9) == 0 ? 0 : size(140), a.cols = cols, a.v = v, a.m = m;
  now = "sampled" + say({int64_t(a.dtype), rows, a.depth, cols, v, m});
  Array x(rows * a.depth, bytes_of(a.dtype)), y(cols * a.depth, bytes_of(a.dtype));
  Array metadata(rows * ceil_div(groups, 2), 1), columns(rows / v * groups * 4, 1);
  a.a = numbers(x, a.dtype), a.b = numbers(y, a.dtype);
  a.metadata = metadata.random().bytes(), a.columns = columns.random(40).bytes();
  std::vector<Array> results;
  for (const auto run : kOfBlocks<SampledArgs>) {
    a.values = results.emplace_back(rows * 2 * groups, bytes_of(a.dtype)).data();
    in_blocks(work_of(a, 1, 1), a, run);
  }
  return compared && differ(results);
}

int main(int, char** arguments) {
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "the call: %s\n", now.c_str()); });
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040u);  // as in handlers
#endif
  const uint32_t first = uint32_t(std::atoi(arguments[2])), end = first + uint32_t(std::atoi(arguments[1]));
  struct Kind {
    const char* name;
    bool (*run)();
    long calls = 0, compared = 0, wrong = 0;
  } kinds[] = {{"groupwise", groupwise}, {"tiles", tiles}, {"packs", packs}, {"blocks", blocks},
               {"prune checks", prune_checks}, {"saved", saved}, {"products", products},
               {"products of blocks", block_products}, {"samples", samples}};
  for (uint32_t number = first; number < end; ++number) {
    random_bits.seed(number);
    Kind& kind = kinds[number % 9];
    compared = number % 9 < 6 || upto(1) != 0;
    const bool differs = kind.run();
    ++kind.calls, kind.compared += compared;
    if (differs && kind.wrong++ == 0) std::fprintf(stderr, "bits differ: number %u, %s\n", number, now.c_str());
  }
  for (const Kind& kind : kinds) {
    report(std::string(kind.name) + " called", kind.calls);
    report(std::string(kind.name) + " compared", kind.compared);
    report(std::string(kind.name) + " that differ", kind.wrong);
  }
  return 0;
}
