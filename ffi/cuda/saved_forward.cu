// Packing of an activation that is saved for the backward pass.
//
// Operands: x (tokens, features); its squared ReLU or x itself packed 2:4 along features; counts (tokens / kSavedTokens,
// features) of the entries that are kept and not zero; and, if asked for, the metadata in cuSPARSELt's order.
// Steps: a block takes kSavedTokens tokens. A thread packs its eight features of some of them and counts in bytes; the counts
// of a block are summed, and the metadata reordered, in shared memory.
// Constraints: 16-bit floats, tokens a multiple of kSavedTokens, features of 8.
#include "metadata_order.cuh"
#include "packed24.cuh"

namespace s24 {
namespace cuda {
namespace {

constexpr int kTogether = 4;  // tokens that a thread reads before it packs them
constexpr unsigned kAcross = 64;  // threads side by side, eight features each
constexpr unsigned kDown = kThreads / kAcross;

// A block takes kSavedTokens tokens; a thread packs its eight features of one in kDown of them, and counts in bytes.
// bytes: of metadata in a row; columns: blocks side by side; behind: see PackArgs.
template <class Order, PackOp op, class T>
__global__ void __launch_bounds__(kThreads, op == PackOp::kSquaredRelu ? 5 : 4)
    pack_counted(const uint32_t* dense, uint32_t* values, uint8_t* metadata, uint8_t* counts, uint8_t* behind, unsigned bytes,
                 unsigned columns) {
  using Pairs = Vector<uint32_t, 2>;
  __shared__ Pairs sums[kDown][kAcross];
  __shared__ uint32_t words[kSavedTokens][kAcross / 4 + 1];  // of metadata; one more, against bank conflicts
  const unsigned across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const unsigned part = blockIdx.x / columns, b = blockIdx.x % columns * kAcross + across;
  const bool inside = b < bytes;
  const auto write = [&](unsigned t, uint64_t at, const Pairs& pairs, uint8_t byte) {
    store(values + 2 * at, pairs);
    metadata[at] = byte;
    reinterpret_cast<uint8_t*>(words[t])[across] = byte;
  };
  Pairs found = {};
#pragma unroll 1
  for (unsigned t = kTogether * down; inside && t < kSavedTokens; t += kTogether * kDown) {
    const uint64_t at = (uint64_t(part) * kSavedTokens + t) * bytes + b;
    Vector<uint32_t, 4> in[kTogether];
    S24_UNROLL
    for (int j = 0; j < kTogether; ++j) in[j] = load<uint32_t, 4>(dense + 4 * (at + j * bytes));
    Pairs kept[kTogether], more = found;
    uint32_t selectors[2][kTogether], largest = 0;
    S24_UNROLL
    for (int j = 0; j < kTogether; ++j) {
      S24_UNROLL
      for (int i = 0; i < 2; ++i) {
        Words x = {in[j].at[2 * i], in[j].at[2 * i + 1]};
        if constexpr (op == PackOp::kSquaredRelu) x = {squared_relu_pair<T>(x.low), squared_relu_pair<T>(x.high)};
        const Largest two = two_largest(x);
        selectors[i][j] = two.take();
        kept[j].at[i] = select_bytes(x.low, x.high, selectors[i][j]);
        // Squares that are zero have no sign.
        const uint32_t size = op == PackOp::kSquaredRelu ? kept[j].at[i] : kept[j].at[i] & 0x7fff7fffu;
        more.at[i] += select_bytes(non_zero_halves(size), 0, two.put());
        largest = max_u32(largest, two.key);
      }
    }
    if (Largest{0, largest}.magnitude() <= T::kInf) {
      found = more;
      const uint32_t made = selected_nibbles(selectors[0]) | selected_nibbles(selectors[1]) << 4;
      S24_UNROLL
      for (int j = 0; j < kTogether; ++j) write(t + j, at + j * bytes, kept[j], uint8_t(made >> (8 * j)));
      continue;
    }
    // Different NaN are rare. Read again, so that what is common keeps its registers.
#pragma unroll 1
    for (int j = 0; j < kTogether; ++j) {
      const Vector<uint32_t, 4> again = load<uint32_t, 4>(dense + 4 * (at + j * bytes));
      Pairs pairs;
      uint32_t byte = 0;
      S24_UNROLL
      for (int i = 0; i < 2; ++i) {
        const Words x = {again.at[2 * i], again.at[2 * i + 1]};
        const PackedGroup pair = op == PackOp::kSquaredRelu ? pack_squared_relu<T>(x) : pack_largest<T>(x);
        const uint32_t ones = non_zero_halves(pair.bits & 0x7fff7fffu);
        found.at[i] += shift_left(ones & 1u, pair.nibble << 3 & 24u) + shift_left(ones >> 16, pair.nibble << 1 & 24u);
        pairs.at[i] = pair.bits;
        byte |= pair.nibble << (4 * i);
      }
      write(t + j, at + j * bytes, pairs, uint8_t(byte));
    }
  }
  sums[down][across] = found;
  __syncthreads();
  static_assert(kSavedTokens % Order::kRows == 0, "no padding");
  using Share = typename Order::Of16Bits;
  const Share own = Share::of(int(threadIdx.x));
  const unsigned word = blockIdx.x % columns * (kAcross / 4) + own.word;
  if (behind != nullptr && 4 * word < bytes) {
    S24_UNROLL
    for (int first = 0; first < int(kSavedTokens); first += kTileRows) {
      const int64_t m = int64_t(part) * kSavedTokens + first + own.row;
      const int64_t n = Share::at(m, 8 * int64_t(word), 8 * int64_t(bytes));
      store(reinterpret_cast<uint32_t*>(behind + n / 2), own.made([&](int row, int w) { return words[first + row][w]; }));
    }
  }
  if (down != 0 || !inside) return;
  S24_UNROLL
  for (unsigned d = 1; d < kDown; ++d) {
    S24_UNROLL
    for (int i = 0; i < 2; ++i) found.at[i] += sums[d][across].at[i];
  }
  store(reinterpret_cast<uint32_t*>(counts) + 2 * (uint64_t(part) * bytes + b), found);
}

template <class Order, PackOp op, class T>
cudaError_t launch(const PackArgs& a, int64_t features, uint8_t* counts, cudaStream_t stream) {
  static_assert(kThreads == 16 * kAcross / 4, "a tile of metadata is 16 bytes of each thread");
  const int64_t bytes = features / 8, rows = a.groups.count() / (2 * bytes);
  const unsigned columns = blocks_for(bytes, kAcross);
  return start(pack_counted<Order, op, T>, dim3(unsigned(rows / kSavedTokens) * columns), kThreads, 0, stream,
               static_cast<const uint32_t*>(a.dense), static_cast<uint32_t*>(a.values), a.metadata, counts, a.behind,
               unsigned(bytes), columns);
}

}  // namespace

cudaError_t launch_pack_counted(const PackArgs& a, int64_t features, uint8_t* counts, cudaStream_t stream) {
  if (a.groups.count() == 0) return cudaSuccess;
  return with_order([&](auto order) {
    using Order = decltype(order);
    const bool half = a.dtype == Dtype::kF16;
    const auto squares = half ? launch<Order, PackOp::kSquaredRelu, F16> : launch<Order, PackOp::kSquaredRelu, BF16>;
    const auto plain = half ? launch<Order, PackOp::kPlain, F16> : launch<Order, PackOp::kPlain, BF16>;
    return (a.op == PackOp::kSquaredRelu ? squares : plain)(a, features, counts, stream);
  });
}

}  // namespace cuda
}  // namespace s24
