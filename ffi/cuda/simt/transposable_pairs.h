// What a transposable mask keeps of a 4x4 tile of 16-bit floats, as pairs along its rows and along its columns.
//
// A pair of a mask's row or column is named by its lowest three bits, which differ; four of them, in nibbles, select from
// tables of bytes at once.
#pragma once
#include "../../core/transposable.h"
#include "select.h"

namespace s24 {

enum class PairByte { kNibble, kFirst, kSecond };  // metadata; where select_bytes finds the elements

template <PairByte what>
constexpr uint64_t pair_table() {
  uint64_t table = 0;
  for (int p = 0; p < 6; ++p) {
    const uint32_t mask = pair_columns(p);
    const uint32_t first = mask & 1u ? 0u : mask & 2u ? 1u : 2u, second = mask & 8u ? 3u : mask & 4u ? 2u : 1u;
    const uint32_t place = what == PairByte::kFirst ? first : second;
    const uint32_t byte = what == PairByte::kNibble ? first | second << 2 : 0x10u + 0x22u * place;
    table |= uint64_t(byte) << (8 * (mask & 7u));
  }
  return table;
}

template <PairByte what>
constexpr uint64_t kPairTable = pair_table<what>();

// The bytes of four pairs, looked up in the table of `what`.
template <PairByte what>
S24_HD uint32_t bytes_of_pairs(uint32_t pairs) {
  return select_bytes(uint32_t(kPairTable<what>), uint32_t(kPairTable<what> >> 32), pairs);
}

// Four groups in packed form: a byte of `nibbles` and a word of `bits` for each.
struct FourPairs {
  uint32_t nibbles, bits[4];
};

S24_HD FourPairs take_pairs(const Words groups[4], uint32_t pairs) {
  const uint32_t first = bytes_of_pairs<PairByte::kFirst>(pairs), second = bytes_of_pairs<PairByte::kSecond>(pairs);
  FourPairs taken;
  taken.nibbles = bytes_of_pairs<PairByte::kNibble>(pairs);
  S24_UNROLL
  for (uint32_t i = 0; i < 4; ++i)
    taken.bits[i] = select_bytes(groups[i].low, groups[i].high, select_bytes(first, second, i | (4u + i) << 4));
  return taken;
}

// The sum of c and of the products of the four bytes of a and b.
S24_HD uint32_t dot(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  return __dp4a(a, b, c);
#else
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xffu) * (b >> i & 0xffu);
  return c;
#endif
}

// rows[i]: four bytes, 0 or 1, of a row of the mask. Whether each row and column has two ones.
S24_HD bool is_transposable(const uint32_t rows[4]) {
  const uint32_t lower = dot(rows[2], 0x19191919u, dot(rows[3], 0x7d7d7d7du, 0u));
  const uint32_t counts = dot(rows[0], 0x01010101u, dot(rows[1], 0x05050505u, lower));  // digits of base five
  return counts == 2u * (1u + 5u + 25u + 125u) && rows[0] + rows[1] + rows[2] + rows[3] == 0x02020202u;
}

S24_HD uint32_t pairs_of_rows(const uint32_t rows[4]) {
  const uint32_t low = dot(rows[0], 0x00040201u, dot(rows[1], 0x00402010u, 0u));
  return low + 256u * dot(rows[2], 0x00040201u, dot(rows[3], 0x00402010u, 0u));
}

S24_HD uint32_t pairs_of_columns(const uint32_t rows[4]) {
  const uint32_t pairs = rows[0] + 2u * rows[1] + 4u * rows[2];  // in bytes
  return select_bytes(pairs | pairs >> 4, 0u, 0x4420u);
}

// Byte i of four words.
S24_HD uint32_t byte_of_each(const uint32_t words[4], int i) {
  const uint32_t two = 0x0040u + 0x11u * uint32_t(i);
  return select_bytes(select_bytes(words[0], words[1], two), select_bytes(words[2], words[3], two), 0x5410u);
}

// The columns of a tile given by its rows.
S24_HD void transpose_tile(const Words rows[4], Words columns[4]) {
  S24_UNROLL
  for (int c = 0; c < 4; ++c) {
    const auto of = [&](int r) { return c < 2 ? rows[r].low : rows[r].high; };
    const uint32_t halves = c % 2 == 0 ? 0x5410u : 0x7632u;
    columns[c] = {select_bytes(of(0), of(1), halves), select_bytes(of(2), of(3), halves)};
  }
}

}  // namespace s24
