// What the programs that check kernels share.
#pragma once
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

inline std::mt19937 random_bits(24);
// A key; and, if it is one of a shard: the second shard from above and the third from the left, of five side by side.
static const uint32_t kKey[5] = {0x12345678u, 0x9abcdef0u, 1, 2, 5};

static void report(const std::string& name, long wrong) { std::printf("%s %ld\n", name.c_str(), wrong); }

// Shows the bits of the input on stderr if this is the first wrong case of a check.
template <class B>
static void show_first(long wrong_before, const std::string& name, const B* input, int n) {
  if (wrong_before != 0) return;
  std::fprintf(stderr, "%s, first wrong input:", name.c_str());
  for (int i = 0; i < n; ++i) std::fprintf(stderr, " %0*x", int(2 * sizeof(B)), unsigned(input[i]));
  std::fprintf(stderr, "\n");
}

// Floats of any kind, as bits.

template <class B>
static B similar() {
  return B(B(0x3f80) << (8 * sizeof(B) - 16)) ^ B(uint32_t(random_bits()) & 0x7f);
}

template <class B>
static B draw() {
  const uint32_t word = uint32_t(random_bits());
  switch (random_bits() % 4) {
    case 0: return B(word);                                                   // anything
    case 1: return B(word & (B(-1) >> 9));                                    // subnormals of float32, zeros
    case 2: return B((uint64_t(word % 3) << (8 * sizeof(B) - 3)) | (word & (B(1) << (8 * sizeof(B) - 1))));  // ties
    default: return similar<B>();
  }
}
