// Blocks of groups as lanes: element j of kLanes groups becomes one contiguous row, so that the scalar definitions of
// ffi/core, called in a loop over lanes, become vector code.
//
// Everything lives in the namespace of the instruction set: nothing may be merged across them.
#pragma once
#include "variant.h"

namespace s24 {
namespace S24_ISA {

constexpr int kLanes = 64;

template <class B>
struct Quad {
  B at[4][kLanes];
};

// Call f(array offset of the first element, lane, count) for each run of lanes that lies contiguous in an
// (outer, len, inner) array, inner > 1; groups are [q, q + n).
template <class F>
S24_HD void for_runs(const Groups& g, int64_t q, int64_t n, F f) {
  int64_t row = q / g.inner, i = q - row * g.inner;
  for (int64_t lane = 0; lane < n;) {
    const int64_t run = g.inner - i < n - lane ? g.inner - i : n - lane;
    f(row * 4 * g.inner + i, lane, run);
    lane += run;
    i = 0;
    ++row;
  }
}

template <class B>
S24_HD void load_quads(const B* x, const Groups& g, int64_t q, int64_t n, Quad<B>& v) {
  if (n < kLanes) v = Quad<B>{};
  if (g.inner == 1) {
    const B* p = x + 4 * q;
    if (n == kLanes) {
      for (int l = 0; l < kLanes; ++l)
        for (int j = 0; j < 4; ++j) v.at[j][l] = p[4 * l + j];
    } else {
      for (int64_t l = 0; l < n; ++l)
        for (int j = 0; j < 4; ++j) v.at[j][l] = p[4 * l + j];
    }
    return;
  }
  for_runs(g, q, n, [&](int64_t offset, int64_t lane, int64_t run) {
    for (int j = 0; j < 4; ++j) {
      const B* p = x + offset + j * g.inner;
      if (run == kLanes) {
        __builtin_memcpy(v.at[j], p, sizeof v.at[j]);
      } else {
        for (int64_t l = 0; l < run; ++l) v.at[j][lane + l] = p[l];
      }
    }
  });
}

template <class B>
S24_HD void store_quads(B* x, const Groups& g, int64_t q, int64_t n, const Quad<B>& v) {
  if (g.inner == 1) {
    B* p = x + 4 * q;
    if (n == kLanes) {
      for (int l = 0; l < kLanes; ++l)
        for (int j = 0; j < 4; ++j) p[4 * l + j] = v.at[j][l];
    } else {
      for (int64_t l = 0; l < n; ++l)
        for (int j = 0; j < 4; ++j) p[4 * l + j] = v.at[j][l];
    }
    return;
  }
  for_runs(g, q, n, [&](int64_t offset, int64_t lane, int64_t run) {
    for (int j = 0; j < 4; ++j) {
      B* p = x + offset + j * g.inner;
      if (run == kLanes) {
        __builtin_memcpy(p, v.at[j], sizeof v.at[j]);
      } else {
        for (int64_t l = 0; l < run; ++l) p[l] = v.at[j][lane + l];
      }
    }
  });
}

}  // namespace S24_ISA
}  // namespace s24
