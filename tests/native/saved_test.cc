// The kernels of saved activations and of the choice of features, thread by thread on a CPU, where callers do not keep what Python
// promises: ranks that name no rows, and scores that are too large.
// Prints one line per check: its name, and how many cases were wrong.
#include <algorithm>
#include <vector>

#include "../../ffi/core/packed24.h"
#include "../../ffi/core/select.h"
#include "../../ffi/cuda/launch.h"
#include "checks.h"

using namespace s24;

// Squares and gradients as they occur, and anything.
template <class T>
static uint16_t draw(bool positive) {
  constexpr uint16_t kSpecial[] = {0, 0x8000, 1, 0x8001, 0x80, 0x0400, T::kInf, T::kInf | 0x8000, T::kInf + 1, 0xffff};
  const uint16_t word = uint16_t(random_bits());
  switch (random_bits() % 6) {
    case 0: return word;
    case 1: return kSpecial[word % 10];
    case 2: return 0;
    default: return uint16_t(T::kInf / 2 + int16_t(word) / 64) | (positive ? 0 : word & 0x8000);
  }
}

template <class T, Slope slope>
static void saved_case(const std::string& name, Dtype dtype, int64_t tokens, int64_t features, bool strided) {
  const size_t all = size_t(tokens * features), dense = 5;
  std::vector<uint16_t> y(all, 0), dy1(all, 0), dy2(all), values(all / 2);
  std::vector<uint8_t> metadata(all / 8, 0);
  std::vector<int32_t> ranks(size_t(features), -1);
  for (int32_t r = 0; r < int32_t(dense); ++r) ranks[size_t(features - 1 - 3 * (dense - r))] = r;
  ranks[1] = int32_t(dense), ranks[2] = INT32_MAX;  // no rows of the result
  for (uint16_t& d : dy2) d = draw<T>(false);
  std::vector<uint16_t> want_dy1(all / 2);
  for (size_t n = 0; n < all / 4; ++n) {
    const uint32_t first = random_bits() % 3, second = first + 1 + random_bits() % (3 - first);
    metadata[n / 2] |= uint8_t((first | second << 2) << (n % 2 * 4));
    for (size_t j = 0; j < 2; ++j) {
      const size_t i = 4 * n + (j ? second : first);
      y[i] = values[2 * n + j] = draw<T>(true);
      dy1[i] = want_dy1[2 * n + j] = sloped<T, slope>(y[i], dy2[i]);
    }
  }
  struct Results {
    std::vector<uint16_t> values, dense;
    std::vector<uint8_t> metadata;
  };
  const Results fresh = {std::vector<uint16_t>(all / 2), std::vector<uint16_t>(dense * size_t(tokens)),
                         std::vector<uint8_t>(all / 8)};
  const auto expected = [&](const std::vector<uint16_t>& from) {
    Results r = fresh;
    for (int64_t f = 0; f < features; ++f)
      for (int64_t q = 0; q < tokens / 4; ++q) {
        uint16_t x[4], keep[4];
        for (int64_t j = 0; j < 4; ++j) {
          x[j] = from[size_t((strided ? q + j * (tokens / 4) : 4 * q + j) * features + f)];
          if (ranks[size_t(f)] >= 0 && size_t(ranks[size_t(f)]) < dense) r.dense[size_t(ranks[size_t(f)] * tokens + 4 * q + j)] = x[j];
        }
        keep24<T>(x, keep);
        take_kept<uint16_t>(x, keep, &r.values[size_t(f * (tokens / 2) + 2 * q)]);
        r.metadata[size_t(f * (tokens / 8) + q / 2)] |= uint8_t((nibble_of<uint16_t>(keep) & 15) << (q % 2 * 4));
      }
    return r;
  };
  std::vector<uint16_t> got_dy1(all / 2);
  Results got[2] = {fresh, fresh};
  const auto to = [](Results& r) {
    return AlongTokens{r.values.data(), r.metadata.data(), r.dense.data()};
  };
  const SavedArgs args = {dtype, slope, strided, tokens, features, int64_t(dense), values.data(), metadata.data(), dy2.data(),
                          ranks.data(), got_dy1.data(), to(got[0]), to(got[1])};
  cuda::run(args, nullptr);
  long wrong = got_dy1 != want_dy1;
  for (const auto& [r, from] : {std::pair(&got[0], &y), std::pair(&got[1], &dy1)}) {
    const Results want = expected(*from);
    wrong += (r->values != want.values) + (r->metadata != want.metadata) + (r->dense != want.dense);
  }
  report(name + " saved", wrong);
}

// wild: most scores are negative or have more bits than said; they count as the nearest that have not.
static void top_features_case(const std::string& name, size_t count, size_t n, int bits, bool wild = false) {
  constexpr size_t kBehind = 4096;  // what is not a result
  std::vector<int32_t> scores(count), places(n + kBehind, -7), want(count), given;
  for (int32_t& s : scores) s = wild ? int32_t(random_bits()) : int32_t(random_bits() % (1u << bits));
  given = scores;
  for (int32_t& s : scores) s = std::clamp(s, 0, int32_t((1u << bits) - 1));
  for (size_t i = 0; i < count; ++i) want[i] = int32_t(i);
  std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) { return scores[size_t(a)] > scores[size_t(b)]; });
  want.resize(n);
  std::sort(want.begin(), want.end());
  want.resize(n + kBehind, -7);
  cuda::launch_features(given.data(), places.data(), int64_t(count), int64_t(n), bits, nullptr);
  report(name + " top features", places != want);
}

int main() {
  top_features_case("720 of 1100", 1100, 720, 3);
  top_features_case("7 of 7", 7, 7, 5);
  top_features_case("3 of 17000", 17000, 3, 15);
  top_features_case("300 zeros of 600", 600, 300, 0);
  top_features_case("300 of 600 too large", 600, 300, 1, true);
  top_features_case("17 of 1100 too large", 1100, 17, 30, true);
  top_features_case("900 of 1100 of 31 bits or negative", 1100, 900, 31, true);

  // So many tokens that blocks repeat their work, and the last one ends early; more strips of features than blocks share at a
  // time, and fewer at the end.
  saved_case<BF16, Slope::kSquaredRelu>("bfloat16 1152x392 strided", Dtype::kBF16, 1152, 392, true);
  saved_case<BF16, Slope::kRelu>("bfloat16 128x64 consecutive", Dtype::kBF16, 128, 64, false);
  saved_case<F16, Slope::kSquaredRelu>("float16 256x72 consecutive", Dtype::kF16, 256, 72, false);
  saved_case<F16, Slope::kRelu>("float16 128x24 strided", Dtype::kF16, 128, 24, true);
  return 0;
}
