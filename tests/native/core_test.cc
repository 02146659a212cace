// The shared core on the CPU: kept pairs against masks, layouts of metadata, and an emulated mma.sp.
// Prints one line per check: its name, and how many cases were wrong; and some random words.
#include <cstdio>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../../ffi/core/metadata_layouts.h"
#include "../../ffi/core/pairs.h"

using namespace s24;

static void report(const char* name, long wrong) { std::printf("%s %ld\n", name, wrong); }

// Any bits; special values; ties; similar magnitudes; many subnormals and zeros.
template <class T>
static void draw_group(std::mt19937& random, uint16_t x[4]) {
  const uint16_t inf = T::kInf;
  const uint16_t special[] = {0, 1, 2, 0x7f, 0x80, 0x81, 0x3ff, 0x400, 0x3c00, 0x3f80, uint16_t(inf - 1),
                              inf, uint16_t(inf + 1), 0x7fff};
  const uint16_t ties[] = {0, 0x3f80, 0x4000, 0x4040};
  const unsigned kind = random() % 5;
  for (int i = 0; i < 4; ++i) {
    const uint16_t any = uint16_t(random()), sign = any & 0x8000;
    switch (kind) {
      case 0: x[i] = any; break;
      case 1: x[i] = special[random() % 14] | sign; break;
      case 2: x[i] = ties[random() % 4] | sign; break;
      case 3: x[i] = uint16_t(0x3f00 + (any & 0xff)) | sign; break;
      default: x[i] = random() % 3 ? any & 0x83ff : any; break;
    }
  }
}

template <class T>
static bool differs(const uint16_t x[4], const uint16_t keep[4], KeptPair got) {
  uint16_t pair[2];
  take_kept<uint16_t>(x, keep, pair);
  return got.nibble != (nibble_of<uint16_t>(keep) & 15u) || got.bits != (pair[0] | uint32_t(pair[1]) << 16);
}

template <class T>
static void kept_pairs(const char* type, long count) {
  std::mt19937 random(24);
  long largest = 0, masked = 0, squared = 0, drawn = 0, unpacked = 0;
  for (long n = 0; n < count; ++n) {
    uint16_t x[4], y[4], keep[4];
    draw_group<T>(random, x);
    const Words w = words_of(x);
    keep24<T>(x, keep);
    largest += differs<T>(x, keep, keep_largest<T>(w));

    for (int i = 0; i < 4; ++i) y[i] = squared_relu<T>(x[i]);
    keep24<T>(y, keep);
    squared += differs<T>(y, keep, keep_squared_relu<T>(w));

    const uint32_t word = uint32_t(random());
    mvue24<T, true>(x, word, 0, y);
    keep24<T>(y, keep);
    drawn += differs<T>(y, keep, keep_drawn<T>(w, word));

    const uint32_t mask = random() & 0x01010101u;
    uint16_t allowed[4];
    for (int i = 0; i < 4; ++i) allowed[i] = mask >> (8 * i) & 1;
    std::memcpy(y, x, sizeof y);
    keep24_masked<T>(y, allowed, keep);
    const KeptPair kept = keep_masked<T>(w, mask);
    masked += differs<T>(y, keep, kept);

    const uint16_t pair[2] = {uint16_t(kept.bits), uint16_t(kept.bits >> 16)};
    put_nibble<uint16_t>(pair, uint16_t(kept.nibble), y);
    const Words put = put_nibble(kept), want = words_of(y);
    unpacked += put.low != want.low || put.high != want.high;
  }
  const std::string name = type;
  report((name + " largest").c_str(), largest);
  report((name + " masked").c_str(), masked);
  report((name + " squared").c_str(), squared);
  report((name + " drawn").c_str(), drawn);
  report((name + " unpacked").c_str(), unpacked);
}

// Positions of a layout are a permutation of [0, rows * depth / 4).
template <class Layout>
static long not_a_permutation(int64_t rows, int64_t depth, Layout layout) {
  std::set<int64_t> seen;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t q = 0; q < depth / 4; ++q) seen.insert(layout(m, q));
  return long(rows * depth / 4 - int64_t(seen.size())) + (*seen.begin() != 0) + (*seen.rbegin() != rows * depth / 4 - 1);
}

// One mma.sp.m16n8k32 of 16-bit floats on the registers of 32 lanes, as the PTX manual assigns them; the metadata of
// kSelector stand in the words of lanes 2 * kSelector and 2 * kSelector + 1 of every quad.
static void emulate_mma_sp(int selector, const uint16_t a[32][8], const uint16_t b[32][8], const uint32_t words[32],
                           float c[32][4]) {
  float left[16][32] = {}, right[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = g + i / 2 % 2 * 8, kept = 2 * t + i % 2 + i / 4 * 8;  // of 16 kept columns
      const int quad = kept / 8, source = 4 * g + 2 * selector + quad;
      const uint32_t word = words[source] >> (row >= 8 ? 16 : 0);
      const int group = kept % 8 / 2, index = word >> (4 * group + 2 * (kept % 2)) & 3;
      left[row][16 * quad + 4 * group + index] = float_of(BF16::to_f32(a[lane][i]));
      right[2 * t + i % 2 + i / 2 * 8][g] = float_of(BF16::to_f32(b[lane][i]));
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < 32; ++k) c[lane][i] += left[lane / 4 + i / 2 * 8][k] * right[k][lane % 4 * 2 + i % 2];
}

// A 16 x 64 x 8 product from stored values and metadata, addressed as the kernel addresses them.
static long emulated_product() {
  std::mt19937 random(7);
  uint16_t values[16][32], dense[64][8];
  uint8_t metadata[16][8] = {};
  float expanded[16][64] = {};
  for (auto& row : dense)
    for (auto& v : row) v = BF16::from_f32(bits_of(float(int(random() % 17) - 8)));
  for (int r = 0; r < 16; ++r) {
    for (int q = 0; q < 16; ++q) {
      const uint32_t first = random() % 3, second = first + 1 + random() % (3 - first);
      metadata[r][q / 2] |= uint8_t((first | second << 2) << (q % 2 * 4));
      for (int j = 0; j < 2; ++j) {
        const float v = float(int(random() % 9) - 4);
        values[r][2 * q + j] = BF16::from_f32(bits_of(v));
        expanded[r][4 * q + (j ? second : first)] = v;
      }
    }
  }
  uint32_t words[32] = {};
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < 2; ++half) {
      const MmaWord w = mma_sp_word(lane, half);
      words[lane] |= (metadata[w.row][2 * w.column] | uint32_t(metadata[w.row][2 * w.column + 1]) << 8) << (16 * half);
    }
  float c[32][4] = {};
  for (int step = 0; step < 2; ++step) {
    uint16_t a[32][8], b[32][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) {
        // ldmatrix: matrix i / 2 holds rows (i / 2 % 2) and kept columns (i / 4), or rows k of the dense operand.
        a[lane][i] = values[lane / 4 + i / 2 % 2 * 8][16 * step + lane % 4 * 2 + i % 2 + i / 4 * 8];
        b[lane][i] = dense[32 * step + lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4];
      }
    emulate_mma_sp(step, a, b, words, c);
  }
  long wrong = 0;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int r = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
      float want = 0;
      for (int k = 0; k < 64; ++k) want += expanded[r][k] * float_of(BF16::to_f32(dense[k][n]));
      wrong += want != c[lane][i];
    }
  return wrong;
}

int main() {
  kept_pairs<BF16>("bfloat16", 1000000);
  kept_pairs<F16>("float16", 1000000);
  report("cusparselt 16 bit", not_a_permutation(128, 192, [](int64_t m, int64_t q) {
           return cusparselt_sm90_16bit(m, q, 192);
         }));
  report("cusparselt 8 bit", not_a_permutation(128, 192, [](int64_t m, int64_t q) {
           return cusparselt_sm90_8bit(m, q, 192);
         }));
  report("cutlass sm80", not_a_permutation(96, 128, [](int64_t m, int64_t q) { return cutlass_sm80_16bit(m, q, 96); }));
  report("emulated product", emulated_product());
  for (uint32_t draw = 0; draw < 2; ++draw)
    for (uint64_t group = 0; group < 9; ++group) {
      const std::string name = "word " + std::to_string(draw) + " " + std::to_string(group);
      report(name.c_str(), long(group_word(0x12345678u, 0x9abcdef0u, group, draw)));
    }
  return 0;
}
