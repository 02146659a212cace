// What the programs that check kernels share.
#pragma once
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

static std::mt19937 random_bits(24);
static const uint32_t kKey[2] = {0x12345678u, 0x9abcdef0u};

static void report(const std::string& name, long wrong) { std::printf("%s %ld\n", name.c_str(), wrong); }

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
