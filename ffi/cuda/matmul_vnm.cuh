// What the kernels for whole tiles of a V:2:M product share: how operands lie in shared memory, and what they write.
#pragma once
#include "matmul.cuh"

namespace s24 {
namespace cuda {

constexpr int kGatheredRows = 32;  // rows of D that one instruction contracts

// A tile of kGatheredRows gathered rows: 64 columns, one after the other; of each, a row is 128 bytes whose eight accesses
// change places with the row. Starts at a multiple of 1024 bytes.
constexpr int kSwizzledCols = 64;

// Where the eight elements of row k from column 8 * access on begin.
S24_HD int swizzled(int k, int access) {
  return access / 8 * kGatheredRows * kSwizzledCols + k * kSwizzledCols + ((access % 8) ^ (k % 8)) * 8;
}

// Values of P of two steps are 64 bytes a row. Eight rows of them, read at one access each, fall on all banks.
constexpr int kPairRow = 32;
__device__ __forceinline__ int values_access(int row, int access) { return (access ^ (row >> 1 & 3)) * 8; }

// Metadata of 16 rows and two steps, 8 bytes a row, as a warp's instructions take them.
__device__ __forceinline__ uint32_t pair_words(const uint8_t* metadata) {
  uint32_t words = 0;
  S24_UNROLL
  for (int half = 0; half < 2; ++half) {
    const MmaWord w = mma_sp_word(threadIdx.x % 32, half);
    words |= uint32_t(*reinterpret_cast<const uint16_t*>(metadata + w.row * 8 + 2 * w.column)) << (16 * half);
  }
  return words;
}

// Each quad of lanes holds eight columns of a row, eight lanes hold eight rows of a column.
template <class Out, int kMatrices, int kColumnTiles>
__device__ __forceinline__ void write_tile(const MatmulVnmArgs& args, int64_t row0, int64_t col0,
                                           const float (&acc)[kMatrices][kColumnTiles][4]) {
  using Bits = typename Out::Bits;
  const MatmulArgs& a = args.product;
  const int lane = threadIdx.x % 32;
  auto* const out = static_cast<Bits*>(a.out);
  Bits* lines[2 * kMatrices];  // of out
  S24_UNROLL
  for (int i = 0; i < 2 * kMatrices; ++i) lines[i] = out + args.collected.row(uint32_t(row0) + 8 * i + lane / 4) * a.cols;
  S24_UNROLL
  for (int n = 0; n < kColumnTiles; ++n) {
    const int64_t c = col0 + 8 * n + lane % 4 * 2;
    if (c >= a.cols) break;
    S24_UNROLL
    for (int i = 0; i < 2 * kMatrices; ++i) {
      const float* const two = acc[i / 2][n] + i % 2 * 2;
      const Vector<Bits, 2> v = {{round_number<Out>(bits_of(two[0])), round_number<Out>(bits_of(two[1]))}};
      if (a.out_packed_last) {
        const int64_t r = row0 + 8 * i + lane / 4;
        out[c * a.rows + r] = v.at[0];
        out[(c + 1) * a.rows + r] = v.at[1];
      } else {
        store(lines[i] + c, v);
      }
    }
  }
}

// Whether this device runs the kernels for Hopper.
bool has_matmul_vnm_sm90();
cudaError_t launch_matmul_vnm_sm90(const MatmulVnmArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace s24
