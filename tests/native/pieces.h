// Included before handlers of the CPU: their work is split at random, and its pieces are done in any order.
#pragma once
#include <algorithm>
#include <random>
#include <vector>

#include "../../ffi/cpu/parallel.h"

extern std::mt19937 random_bits;  // which fuzz.cc seeds before each call

namespace s24 {

template <class F>
void in_random_pieces(xla::ffi::ThreadPool&, int64_t n, int64_t, F f) {
  FlushSubnormals flush;
  std::vector<int64_t> borders = {0, n};
  for (uint32_t i = random_bits() % 4; i > 0; --i) borders.push_back(int64_t(random_bits() % uint64_t(n + 1)));
  std::sort(borders.begin(), borders.end());
  std::vector<size_t> order(borders.size() - 1);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_bits);
  for (size_t i : order)
    if (borders[i] < borders[i + 1]) f(borders[i], borders[i + 1]);
}

}  // namespace s24

#define parallel_for in_random_pieces
