// Counts the groups of four with more than two non-zeros.
#include "../core/prune_check.h"
#include "lanes.h"

namespace s24 {
namespace S24_ISA {
namespace {

constexpr int kCounted = 128;  // groups whose number is counted in an element of any width

template <class B, bool kRows>
int32_t count(const PruneCheckArgs& a, int64_t begin, int64_t end) {
  const int64_t member = kRows ? 1 : a.groups.inner, group = kRows ? 4 : 1;
  int32_t all = 0;
  for_blocks<kCounted, kRows>(a.groups, begin, end, [&](int64_t, int64_t at, int64_t n) {
    const B* const from = static_cast<const B*>(a.x) + at;
    B found = 0;
    for (int64_t l = 0; l < n; ++l) {
      const B* const p = from + l * group;
      const B x[4] = {p[0], p[member], p[2 * member], p[3 * member]};
      found = B(found + more_than_two(x));
    }
    all += int32_t(found);
  });
  return all;
}

template <class B>
int32_t count_either(const PruneCheckArgs& a, int64_t begin, int64_t end) {
  return a.groups.inner == 1 ? count<B, true>(a, begin, end) : count<B, false>(a, begin, end);
}

}  // namespace

template <>
void run(const PruneCheckArgs& a, int64_t begin, int64_t end) {
  const int32_t found = a.width == 4   ? count_either<uint32_t>(a, begin, end)
                        : a.width == 2 ? count_either<uint16_t>(a, begin, end)
                                       : count_either<uint8_t>(a, begin, end);
  __atomic_fetch_add(a.found, found, __ATOMIC_RELAXED);  // threads share it, and integers add up in any order
}

}  // namespace S24_ISA
}  // namespace s24
