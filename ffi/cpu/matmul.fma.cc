// out = P D with P packed to 2:4 along the contraction axis; sums are in float32.
//
// The position of a kept element is one scalar per (row, kept k), so vectors of D need no permutation: a panel of D lies
// in cache as float32 [k][kPanel], P is decoded into (value, offset into the panel), and each kept element costs one
// broadcast and one FMA with a memory operand per vector of columns. That is half of the dense FMAs. Where a processor
// multiplies pairs of bfloat16, an entry is a pair (matmul_pairs.h); where it multiplies tiles of them, P is unpacked
// (matmul_tiles.h).
//
// Blocking: a task owns rows x cols of the output. For each block of kBlock along K it fills the panels, then for each
// chunk of kChunk rows decodes P once and goes over the panels, one of which fits into a first-level cache, over tiles of
// kTileRows rows (registers). Every output element sums in order of k with fixed block borders, whatever the tasks are.
#include "matmul_pairs.h"
#include "matmul_tiles.h"
#include "panels.h"

namespace s24 {
namespace S24_ISA {
namespace {

// kTileRows x (kVectors * kWidth) sums over `kept` entries per row.
template <class Entry, int kVectors>
void multiply(const Entries& e, int64_t row, int64_t kept, const float* __restrict__ panel, float* __restrict__ sums,
              bool accumulate) {
  Vec acc[kTileRows][kVectors];
  S24_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = accumulate ? *reinterpret_cast<const Vec*>(sums + r * kPanel + v * kWidth) : Vec{};
  }
  const auto add = [&](int64_t j, int entries) __attribute__((always_inline)) {
    S24_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      const Offsets offsets(e.offsets[row + r] + j);
      const Values<F32> values(reinterpret_cast<const uint32_t*>(e.values[row + r] + j), entries);
      S24_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (i >= entries) break;
        const Vec a = values.splat(i);
        const Vec* d = reinterpret_cast<const Vec*>(reinterpret_cast<const char*>(panel) + offsets[i]);
        S24_UNROLL
        for (int v = 0; v < kVectors; ++v) Entry::add(acc[r][v], a, d[v]);
      }
    }
  };
  int64_t j = 0;
  for (; j + 4 <= kept; j += 4) add(j, 4);
  if (kept & 2) add(j, 2), j += 2;
  if (Entry::kOdd && kept & 1) add(j, 1);
  S24_UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    S24_UNROLL
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vec*>(sums + r * kPanel + v * kWidth) = acc[r][v];
  }
}

// Rows [row0, row1) of P at k0..k1 -> entries; rows that fill up the last tile get zeros.
template <class T>
void decode_elements(const MatmulArgs& a, int64_t row0, int64_t row1, int64_t k0, int64_t k1, Scratch& s) {
  const int64_t kept = (k1 - k0) / 2, value_step = a.depth / 2, byte_step = ceil_div(a.depth, 8);
  constexpr int32_t kStep = kPanel * sizeof(float);
  typedef uint16_t OffsetVec __attribute__((vector_size(2 * kWidth)));
  IntVec shift, base;
  for (int j = 0; j < kWidth; ++j) {
    shift[j] = 2 * j;
    base[j] = j / 2 * 4 * kStep;
  }
  for (int64_t i = 0; i < ceil_div(row1 - row0, kTileRows) * kTileRows; ++i) {
    float* const values = s.entries.values[i];
    uint16_t* const offsets = s.entries.offsets[i];
    if (row0 + i >= row1) {
      for (int64_t j = 0; j < kept; ++j) values[j] = 0.0f, offsets[j] = 0;
      continue;
    }
    const auto* row = static_cast<const typename T::Bits*>(a.values) + (row0 + i) * value_step + k0 / 2;
    const uint8_t* m = a.metadata + (row0 + i) * byte_step + k0 / 8;
    if (row0 + i + kChunk < a.rows) {  // the next chunk's, while this one is multiplied
      prefetch(row + kChunk * value_step, kept * int64_t(sizeof *row));
      prefetch(m + kChunk * byte_step, 1);
    }
    widen<T>(row, kept, values);
    int64_t j = 0;
    // The positions of consecutive kept elements are consecutive fields of two bits.
    for (; j + kWidth <= kept; j += kWidth) {
      uint32_t fields = 0;
      __builtin_memcpy(&fields, m + j / 4, kWidth / 4);
      const IntVec index = ((IntVec{} + int32_t(fields)) >> shift) & 3;
      const auto narrow = __builtin_convertvector(index * kStep + base + int32_t(j * 2 * kStep), OffsetVec);
      __builtin_memcpy(offsets + j, &narrow, sizeof narrow);
    }
    for (; j < kept; ++j) offsets[j] = uint16_t((j / 2 * 4 + ((m[j / 4] >> (2 * (j % 4))) & 3)) * kStep);
  }
}

// ---- a task -------------------------------------------------------------------------------------------------------

// An entry is a kept element.
template <class T>
struct Elements {
  static constexpr int kBlock = s24::S24_ISA::kBlock, kPerEntry = 2;
  static constexpr bool kOdd = false;
  S24_HD static void add(Vec& sum, Vec a, const Vec& d) { sum += a * d; }
  static constexpr auto fill = fill_panels<T>;
  static constexpr auto decode = decode_elements<T>;
};

template <class Entry>
void multiply_tile(const Entries& e, int64_t row, int64_t kept, const float* panel, float* sums, int64_t cols,
                   bool accumulate) {
  switch (ceil_div(cols < kPanel ? cols : kPanel, kWidth)) {
    case 1: return multiply<Entry, 1>(e, row, kept, panel, sums, accumulate);
    case 2: return multiply<Entry, 2>(e, row, kept, panel, sums, accumulate);
    case 3: return multiply<Entry, 3>(e, row, kept, panel, sums, accumulate);
    default: return multiply<Entry, 4>(e, row, kept, panel, sums, accumulate);
  }
}

template <class Entry>
void matmul_by(const MatmulArgs& a, const Block& m, Scratch& s) {
  const int64_t rows = m.row1 - m.row0, cols = m.col1 - m.col0;
  for (int64_t k0 = 0; k0 < a.depth; k0 += Entry::kBlock) {
    const int64_t k1 = a.depth - k0 < Entry::kBlock ? a.depth : k0 + Entry::kBlock;
    Entry::fill(a, m, k0, k1, s);
    for (int64_t r0 = 0; r0 < rows; r0 += kChunk) {
      const int64_t r1 = rows - r0 < kChunk ? rows : r0 + kChunk;
      Entry::decode(a, m.row0 + r0, m.row0 + r1, k0, k1, s);
      for (int64_t c = 0; c < cols; c += kPanel) {
        float(*sums)[kPanel] = s.sums + c / kPanel * kRows + r0;
        for (int64_t r = 0; r < r1 - r0; r += kTileRows)
          multiply_tile<Entry>(s.entries, r, (k1 - k0) / Entry::kPerEntry, s.panels[c / kPanel * kDepth], sums[r], cols - c,
                               k0 > 0);
        if (k1 == a.depth)
          write_any(a, sums, m.row0 + r0, r1 - r0, m.col0 + c, cols - c < kPanel ? cols - c : kPanel);
      }
    }
  }
}

}  // namespace

template <>
void run(const MatmulArgs& a, const Block& m, void* scratch) {
  Scratch& s = *static_cast<Scratch*>(scratch);
  switch (a.in) {
    case Dtype::kF32: return matmul_by<Elements<F32>>(a, m, s);
    case Dtype::kBF16:
#if defined(S24_TILES)
      return matmul_by_tiles(a, m, s);
#elif defined(__AVX512F__)
      if (Pairs::here()) return matmul_by<Pairs>(a, m, s);
#endif
      return matmul_by<Elements<BF16>>(a, m, s);
    case Dtype::kF16: return matmul_by<Elements<F16>>(a, m, s);
  }
}

}  // namespace S24_ISA
}  // namespace s24
