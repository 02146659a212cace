// Packing and unpacking: groups of neighbours, and every case that fits no tile. Compiled without contraction of products
// and sums.
#include "pack_groups.cuh"

namespace s24 {
namespace cuda {
namespace {

// Whole metadata bytes of one long row: a thread takes one byte, two groups, per access, several accesses apart by a block.
template <PackOp op, class T>
__global__ void __launch_bounds__(kThreads) pack_rows(typename T::Bits* dense, const uint8_t* mask,
                                                      typename T::Bits* values, uint8_t* metadata, int64_t bytes,
                                                      const uint32_t* key_words) {
  using Bits = typename T::Bits;
  constexpr int kAccesses = kHeavy<op> ? 1 : 4;
  const int64_t first = int64_t(blockIdx.x) * kThreads * kAccesses + threadIdx.x;
  const Key key = read_key(key_words);
  Vector<Bits, 4> in[kAccesses][2];
  Vector<uint8_t, 8> allowed[kAccesses];
  uint8_t nibbles[kAccesses];
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t b = first + int64_t(a) * kThreads;
    if (b >= bytes) break;
    if constexpr (op == PackOp::kUnpack) {
      in[a][0] = load<Bits, 4>(values + 4 * b);
    } else if constexpr (sizeof(Bits) == 2) {
      const Vector<Bits, 8> v = load<Bits, 8>(dense + 8 * b);
      S24_UNROLL
      for (int i = 0; i < 8; ++i) in[a][i / 4].at[i % 4] = v.at[i];
    } else {
      in[a][0] = load<Bits, 4>(dense + 8 * b);
      in[a][1] = load<Bits, 4>(dense + 8 * b + 4);
    }
    if constexpr (op == PackOp::kMasked) allowed[a] = load<uint8_t, 8>(mask + 8 * b);
    if constexpr (op == PackOp::kGather || op == PackOp::kUnpack) nibbles[a] = metadata[b];
  }
  S24_UNROLL
  for (int a = 0; a < kAccesses; ++a) {
    const int64_t b = first + int64_t(a) * kThreads;
    if (b >= bytes) break;
    if constexpr (op == PackOp::kUnpack) {
      Vector<Bits, 4> out[2];
      put_nibble<Bits>(in[a][0].at, Bits(nibbles[a] & 15), out[0].at);
      put_nibble<Bits>(in[a][0].at + 2, Bits(nibbles[a] >> 4), out[1].at);
      if constexpr (sizeof(Bits) == 2) {
        Vector<Bits, 8> v;
        S24_UNROLL
        for (int i = 0; i < 8; ++i) v.at[i] = out[i / 4].at[i % 4];
        store(dense + 8 * b, v);
      } else {
        store(dense + 8 * b, out[0]);
        store(dense + 8 * b + 4, out[1]);
      }
    } else {
      Vector<Bits, 4> kept;
      uint32_t byte = 0;
      S24_UNROLL
      for (int i = 0; i < 2; ++i)
        byte |= encode<op, T>(in[a][i].at, allowed[a].at + 4 * i, nibbles[a] >> (4 * i) & 15, key, 2 * b + i,
                              kept.at + 2 * i)
                << (4 * i);
      store(values + 4 * b, kept);
      if constexpr (op != PackOp::kGather) metadata[b] = uint8_t(byte);
    }
  }
}

// Any shape and alignment: a thread takes one metadata byte, element by element. Neighbouring threads are neighbours along
// inner.
template <PackOp op, class T>
__global__ void __launch_bounds__(kThreads) pack_any(typename T::Bits* dense, const uint8_t* mask,
                                                     typename T::Bits* values, uint8_t* metadata, Groups g,
                                                     const uint32_t* key_words) {
  using Bits = typename T::Bits;
  const int64_t bytes = ceil_div(g.len, 8), unit = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= g.outer * bytes * g.inner) return;
  int64_t i, b;
  const int64_t row = divide(unit, g.inner, &i), o = divide(row, bytes, &b);
  const Key key = read_key(key_words);
  const int64_t packed_row = o * g.inner + i;
  Bits* const kept = values + packed_row * (g.len / 2) + 4 * b;
  uint32_t byte = 0;
  if constexpr (op == PackOp::kGather || op == PackOp::kUnpack) byte = metadata[packed_row * bytes + b];
  uint32_t made = 0;
  for (int n = 0; n < 2; ++n) {
    const int64_t q = 2 * b + n;
    if (q >= g.len / 4) {
      made |= uint32_t(kEmptyNibble) << (4 * n);
      break;
    }
    const int64_t at = (o * g.len + 4 * q) * g.inner + i;
    const uint32_t nibble = byte >> (4 * n) & 15;
    Bits x[4], pair[2];
    if constexpr (op == PackOp::kUnpack) {
      pair[0] = kept[2 * n];
      pair[1] = kept[2 * n + 1];
      put_nibble<Bits>(pair, Bits(nibble), x);
      S24_UNROLL
      for (int j = 0; j < 4; ++j) dense[at + j * g.inner] = x[j];
    } else {
      uint8_t allowed[4] = {};
      S24_UNROLL
      for (int j = 0; j < 4; ++j) {
        x[j] = dense[at + j * g.inner];
        if constexpr (op == PackOp::kMasked) allowed[j] = mask[at + j * g.inner];
      }
      made |= encode<op, T>(x, allowed, nibble, key, (o * (g.len / 4) + q) * g.inner + i, pair) << (4 * n);
      kept[2 * n] = pair[0];
      kept[2 * n + 1] = pair[1];
    }
  }
  if constexpr (op != PackOp::kGather && op != PackOp::kUnpack) metadata[packed_row * bytes + b] = uint8_t(made);
}

template <PackOp op, class T>
struct Launch {
  static cudaError_t run(const PackArgs& a, const uint32_t* key, cudaStream_t stream) {
    using Bits = typename T::Bits;
    auto* dense = static_cast<Bits*>(a.dense);
    auto* values = static_cast<Bits*>(a.values);
    const Groups& g = a.groups;
    const bool whole = g.inner == 1 && g.len % 8 == 0 && aligned(dense, 16) && aligned(values, 16) && aligned(a.mask, 8);
    if (whole) {
      const int64_t bytes = g.outer * g.len / 8;
      pack_rows<op, T><<<blocks_for(bytes, kThreads * (kHeavy<op> ? 1 : 4)), kThreads, 0, stream>>>(
          dense, a.mask, values, a.metadata, bytes, key);
    } else {
      const int64_t units = g.outer * ceil_div(g.len, 8) * g.inner;
      pack_any<op, T><<<blocks_for(units, kThreads), kThreads, 0, stream>>>(dense, a.mask, values, a.metadata, g, key);
    }
    return cudaGetLastError();
  }
};

}  // namespace

cudaError_t launch_pack(const PackArgs& a, const uint32_t* key, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return fits_columns(a) ? launch_pack_columns(a, key, stream) : for_pack<Launch>(a, key, stream);
}

}  // namespace cuda
}  // namespace s24
