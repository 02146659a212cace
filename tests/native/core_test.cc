// The shared core on the CPU: kept pairs against masks, soft thresholds, tiles and random words.
// Prints one line per check: its name, and how many cases were wrong; and some random words.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../ffi/cuda/simt/mvue.h"
#include "../../ffi/cuda/simt/soft.h"
#include "../../ffi/cuda/simt/transposable.h"

using namespace s24;

static void report(const char* name, long wrong) { std::printf("%s %ld\n", name, wrong); }

// Any bits; special values; ties; similar magnitudes; many subnormals and zeros; any ratio of magnitudes; a largest that is
// nearly the sum of the others.
template <class T>
static void draw_group(std::mt19937& random, uint16_t x[4]) {
  const uint16_t inf = T::kInf;
  const uint16_t special[] = {0, 1, 2, 0x7f, 0x80, 0x81, 0x3ff, 0x400, 0x3c00, 0x3f80, uint16_t(inf - 1),
                              inf, uint16_t(inf + 1), 0x7fff};
  const uint16_t ties[] = {0, 0x3f80, 0x4000, 0x4040};
  const unsigned kind = random() % 7, base = random();
  const int bits = inf == 0x7f80 ? 7 : 10;  // of a significand
  for (int i = 0; i < 4; ++i) {
    const uint16_t any = uint16_t(random()), sign = any & 0x8000;
    switch (kind) {
      case 0: x[i] = any; break;
      case 1: x[i] = special[random() % 14] | sign; break;
      case 2: x[i] = ties[random() % 4] | sign; break;
      case 3: x[i] = uint16_t(0x3f00 + (any & 0xff)) | sign; break;
      case 4: x[i] = random() % 3 ? any & 0x83ff : any; break;
      default: {
        const int exponent = int(base % unsigned(inf >> bits)) - int(random() % (kind == 5 ? 140 : 12));
        x[i] = uint16_t(std::max(exponent, 0) << bits | (any & ((1 << bits) - 1))) | sign;
        break;
      }
    }
  }
  if (kind != 6) return;
  const unsigned top = base >> 30;
  float sum = 0;
  for (unsigned i = 0; i < 4; ++i) sum += i == top ? 0.0f : float_of(T::to_f32(x[i] & T::kMagnitude));
  x[top] = uint16_t(T::from_f32_number(bits_of(sum)) + random() % 3 - 1);
}

template <class T>
static bool differs(const uint16_t x[4], const uint16_t keep[4], PackedGroup got) {
  uint16_t pair[2];
  take_kept<uint16_t>(x, keep, pair);
  return got.nibble != (nibble_of<uint16_t>(keep) & 15u) || got.bits != (pair[0] | uint32_t(pair[1]) << 16);
}

// Any word, or one of those where a sum decides.
static uint32_t draw_word(std::mt19937& random) {
  const uint32_t words[] = {0, ~0u, 0x80000000u, uint32_t(random()) & 0x3fff, uint32_t(random()) & 0xc0000000u};
  const uint32_t any = uint32_t(random());
  return any % 8 < 5 ? words[any % 8] : any;
}

// Wrong estimates; and wrong groups made of them.
template <class T, bool kExact>
static long wrong_estimates(std::mt19937& random, const uint16_t x[4]) {
  const uint32_t words[2] = {draw_word(random), draw_word(random)};
  uint16_t y[4], keep[4];
  mvue24<T, kExact>(x, words[0], words[1], y);
  keep24<T>(y, keep);
  const PackedGroup kept = pack_estimate<T, kExact>(words_of(x), words[0], words[1]);
  const Words put = put_nibble(kept), spread = Chosen::of(kept).spread();
  return differs<T>(y, keep, kept) || put.low != spread.low || put.high != spread.high;
}

// How many common groups, of similar magnitudes and zeros, are left to the definition, which is slow.
template <class T, bool kExact>
static long left_estimates(long count) {
  std::mt19937 random(7);
  long left = 0;
  for (long n = 0; n < count; ++n) {
    uint16_t x[4];
    for (uint16_t& v : x) v = random() % 3 == 0 ? 0 : uint16_t(0x3800 + random() % 0x800) | uint16_t(random() & 0x8000);
    Chosen chosen;
    Common common;
    choose_estimate<T, kExact>(numbers_of<T>(words_of(x)), uint32_t(random()), uint32_t(random()), chosen, common);
    left += !common.all();
  }
  return left;
}

template <class T>
static void packed_groups(const char* type, long count) {
  std::mt19937 random(24);
  long largest = 0, together = 0, masked = 0, squared = 0, exact = 0, sequential = 0, unpacked = 0;
  for (long n = 0; n < count; ++n) {
    uint16_t x[4], y[4], keep[4];
    draw_group<T>(random, x);
    const Words w = words_of(x);
    keep24<T>(x, keep);
    largest += differs<T>(x, keep, pack_largest<T>(w));

    uint16_t other[4];
    uint32_t both[4];
    draw_group<T>(random, other);
    for (int i = 0; i < 4; ++i) both[i] = x[i] | uint32_t(other[i]) << 16;
    const TwoPacked two = two_largest_of_both<T>(both);
    const auto is_nan = [](uint16_t v) { return (v & T::kMagnitude) > T::kInf; };
    const bool nan = std::any_of(x, x + 4, is_nan) || std::any_of(other, other + 4, is_nan);
    together += has_nan<T>(two.magnitude) != nan;
    if (!nan) {
      together += differs<T>(x, keep, {two.nibbles & 0xffffu, two.bits[0]});
      keep24<T>(other, keep);
      together += differs<T>(other, keep, {two.nibbles >> 16, two.bits[1]});
    }

    for (int i = 0; i < 4; ++i) y[i] = squared_relu<T>(x[i]);
    keep24<T>(y, keep);
    squared += differs<T>(y, keep, pack_squared_relu<T>(w));

    exact += wrong_estimates<T, true>(random, x);
    sequential += wrong_estimates<T, false>(random, x);

    const uint32_t mask = random() & 0x01010101u;
    uint16_t allowed[4];
    for (int i = 0; i < 4; ++i) allowed[i] = mask >> (8 * i) & 1;
    std::memcpy(y, x, sizeof y);
    keep24_masked<T>(y, allowed, keep);
    const PackedGroup kept = pack_by_mask<T>(w, mask);
    masked += differs<T>(y, keep, kept);

    const uint16_t pair[2] = {uint16_t(kept.bits), uint16_t(kept.bits >> 16)};
    put_nibble<uint16_t>(pair, uint16_t(kept.nibble), y);
    const Words put = put_nibble(kept), want = words_of(y);
    unpacked += put.low != want.low || put.high != want.high;
  }
  const std::string name = type;
  report((name + " largest").c_str(), largest);
  report((name + " largest of two").c_str(), together);
  report((name + " masked").c_str(), masked);
  report((name + " squared").c_str(), squared);
  report((name + " drawn exactly").c_str(), exact);
  report((name + " drawn in sequence").c_str(), sequential);
  report((name + " drawn by definition").c_str(), left_estimates<T, true>(count / 4) + left_estimates<T, false>(count / 4));
  report((name + " unpacked").c_str(), unpacked);
}

// Wrong masks of the searches by numbers and in integers; the latter must find some of the tiles.
template <class T>
static long wrong_tiles(long count) {
  std::mt19937 random(24);
  long wrong = 0, found = 0;
  for (long n = 0; n < count; ++n) {
    uint16_t x[16];
    uint32_t wide[16], words[8], mask;
    for (int r = 0; r < 4; ++r) draw_group<T>(random, x + 4 * r);
    if (n % 4 == 1)  // rows of the same magnitudes
      for (int i = 4; i < 16; ++i) x[i] = x[(i * 5 + i / 4) % 4];
    if (n % 4 > 1)  // exponents around the limits of what is exact
      for (int i = 0; i < 16; ++i)
        x[i] = uint16_t((x[i] & ~T::kInf) + (T::kInf / 2 & T::kInf) - random() % 16 * (T::kInf & (0u - T::kInf)));
    for (int i = 0; i < 16; ++i) wide[i] = T::to_f32(x[i]);
    for (int i = 0; i < 8; ++i) words[i] = x[2 * i] | uint32_t(x[2 * i + 1]) << 16;
    float numbers[16], largest = 0;
    for (int i = 0; i < 16; ++i) {
      numbers[i] = float_of(wide[i]);
      largest = larger_magnitude(largest, numbers[i]);
    }
    if (largest < 0x1p127f) wrong += best_tile_mask_of_numbers(numbers, largest) != best_tile_mask(wide);
    if (!search_tile<T>(words, mask)) continue;
    ++found;
    wrong += best_tile_mask(wide) != mask;
  }
  return wrong + (found < count / 8);
}

// Two groups at once against the definition; and how many of common groups, of similar magnitudes, are left to it.
template <class T>
static void soft_thresholds(const std::string& type, long count) {
  std::mt19937 random(5);
  long wrong = 0, left = 0;
  for (long n = 0; n < count; ++n) {
    uint16_t groups[2][4], want[2][4];
    uint32_t x[4], y[4];
    for (int g = 0; g < 2; ++g) {
      draw_group<T>(random, groups[g]);
      if (n % 8 == 0)
        for (uint16_t& v : groups[g]) v = uint16_t(0x3800 + random() % 0x800) | uint16_t(random() & 0x8000);
      soft24<T>(groups[g], want[g]);
    }
    for (int i = 0; i < 4; ++i) x[i] = groups[0][i] | uint32_t(groups[1][i]) << 16;
    const bool done = soft24_two<T>(x, y);
    left += n % 8 == 0 && !done;
    for (int i = 0; i < 4; ++i) wrong += done && y[i] != (want[0][i] | uint32_t(want[1][i]) << 16);
  }
  report((type + " softened").c_str(), wrong);
  report((type + " softened by definition").c_str(), left);
}

// How often a difference that is rounded to float32 and then to T is not what rounding it once gives.
template <class T>
static long rounded_otherwise(long count) {
  std::mt19937 random(6);
  long wrong = 0;
  for (long n = 0; n < count; ++n) {
    uint16_t group[4];
    draw_group<T>(random, group);
    const uint32_t m = flushed_magnitude(T::to_f32(group[0])), k = flushed_magnitude(T::to_f32(group[1]));
    const float a = float_of(max_u32(m, k)), t = float_of(min_u32(m, k)), d = a - t;
    if (max_u32(m, k) >= kF32Inf || bits_of(d) < kF32MinNormal) continue;
    const float error = (a - d) - t;  // exact: Dekker's
    // Odd where it is not exact, so that no middle of two numbers of T is met.
    const uint32_t odd = error == 0 || bits_of(d) % 2 != 0 ? bits_of(d) : error > 0 ? bits_of(d) + 1 : bits_of(d) - 1;
    wrong += T::from_f32_number(odd) != T::from_f32_number(bits_of(d));
  }
  return wrong;
}

int main() {
  soft_thresholds<BF16>("bfloat16", 400000);
  soft_thresholds<F16>("float16", 400000);
  report("bfloat16 rounded otherwise", rounded_otherwise<BF16>(4000000));
  report("float16 rounded otherwise", rounded_otherwise<F16>(4000000));
  packed_groups<BF16>("bfloat16", 1000000);
  packed_groups<F16>("float16", 1000000);
  report("bfloat16 tiles", wrong_tiles<BF16>(200000));
  report("float16 tiles", wrong_tiles<F16>(200000));
  for (uint32_t draw = 0; draw < 2; ++draw)
    for (uint64_t group = 0; group < 9; ++group) {
      const std::string name = "word " + std::to_string(draw) + " " + std::to_string(group);
      report(name.c_str(), long(group_word(0x12345678u, 0x9abcdef0u, group, draw)));
    }
  return 0;
}
