// Operands of 2:4 products on Hopper: a sparse matrix (R, K) of 16-bit floats, compressed as cuSPARSELt has it here, of which the contracted
// axis is copied in stages by boxes.
#pragma once
#include "../simt/select.h"
#include "boxes.cuh"
#include "wgmma_sp.cuh"

namespace s24 {
namespace cuda {

constexpr int kStageDepth = 64, kStepDepth = 32;  // of K: of a stage, of an instruction

// Boxes of a stage, of so many rows: of the values, and of the metadata behind them, of which 64 rows are one.
inline cudaError_t describe_compressed(const void* compressed, int64_t rows, int64_t depth, int box_rows, CUtensorMap* values,
                                       CUtensorMap* metadata) {
  const auto* const first = static_cast<const uint16_t*>(compressed);
  const cudaError_t e = describe(
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, first, depth / 2, rows, depth, kStageDepth / 2, box_rows, CU_TENSOR_MAP_SWIZZLE_64B},
      values);
  if (e != cudaSuccess) return e;
  return describe({CU_TENSOR_MAP_DATA_TYPE_UINT32, first + rows * depth / 2, 2 * depth, rows / 64, 8 * depth, 2 * kStageDepth,
                   box_rows / 64, CU_TENSOR_MAP_SWIZZLE_NONE},
                  metadata);
}

// Where a lane finds eight bytes of metadata of a stage in the library's order: those of 64 columns and the rows lane / 4 and
// lane / 4 + 8 of its warp, or half of them.
__device__ __forceinline__ int metadata_of(int warp, int lane) { return lane % 4 / 2 * 256 + warp * 64 + lane / 4 * 8; }

// The operand of wgmma of them: 16 columns of the first row in its low half, of the second one in its high half. Lanes 0 and 1
// of four have those of the first instruction, lanes 2 and 3 of the second one.
__device__ __forceinline__ uint32_t metadata_word(const Vector<uint32_t, 2>& eight, int lane) {
  const uint32_t own = select_bytes(eight.at[0], eight.at[1], lane % 2 == 0 ? 0x6420u : 0x7531u);
  const uint32_t rows = (own & 0xf00ff00fu) | (own << 4 & 0x0f000f00u) | (own >> 4 & 0x00f000f0u);
  return select_bytes(rows, 0, 0x3120u);
}

// Where a warpgroup of a block finds its part of the first stage.
template <class S, class Stages>
struct StageOperands {
  uint64_t values, dense;
  const uint8_t* metadata;

  __device__ __forceinline__ StageOperands(Stages& shared, int group, uint64_t dense) : dense(dense) {
    values = swizzled_rows<kStageDepth>(shared.values[0] + group * 64 * kStageDepth / 2);
    metadata = shared.metadata[0] + group * 512 + metadata_of(threadIdx.x % 128 / 32, threadIdx.x % 32);
  }
};

// acc = the products of so many stages, an even number, each of which is given back while the next one is multiplied. kColumns:
// whether the dense operand has columns together, see `swizzled_columns`.
template <class T, class S, bool kColumns, class Stages>
__device__ __forceinline__ void multiply_stages(float acc[kWgmmaCols / 8][4], const StageOperands<S, Stages>& operands, int stages,
                                                Stages& shared, StagePlace<S::kStages>& place) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  constexpr int kNextValues = sizeof(Stages::values[0]) / 16, kNextDense = sizeof(Stages::dense[0]) / 16;  // stage
  constexpr int kNextStep = kColumns ? kStepDepth * kSwizzledCols * 2 / 16 : 2 * kStepDepth / 16;
  // A warp tells one of the blocks that this warpgroup needs a stage no more.
  const auto give_back = [&](int stage) {
    if (lane == 0 && warp < S::kBlocks) arrive_at(&shared.empty[stage], warp);
  };
  uint32_t words[2] = {0, 0};
  bool begun = false;
#pragma unroll 1
  for (; stages > 0; stages -= 2) {
    S24_UNROLL
    for (int i = 0; i < 2; ++i, begun = true) {  // words of the products under way keep their registers
      const int stage = place.stage;
      wait_barrier(&shared.full[stage], place.round);
      const uint8_t* const metadata = operands.metadata + stage * sizeof(Stages::metadata[0]);
      words[i] = metadata_word(load<uint32_t, 2>(reinterpret_cast<const uint32_t*>(metadata)), lane);
      begin_wgmma();
      const uint64_t a = operands.values + uint64_t(stage * kNextValues), b = operands.dense + uint64_t(stage * kNextDense);
      wgmma_sp_memory<T, 0, kColumns>(acc, a, b, words[i], begun);
      wgmma_sp_memory<T, 1, kColumns>(acc, a + kStepDepth / 16, b + kNextStep, words[i], 1);
      commit_wgmma();
      wait_wgmma<1>();
      hold(words[i ^ 1]);
      if (begun) give_back(place.before());
      place.advance();
    }
  }
  wait_wgmma<0>();
  hold(words[1]);
  give_back(place.before());
}

}  // namespace cuda
}  // namespace s24
