// Copies of boxes of a matrix into shared memory, each of which one thread begins, on Hopper.
#pragma once
#include <cuda.h>

#include "clusters.cuh"

namespace s24 {
namespace cuda {

// A matrix (outer, inner) in memory, whose rows begin so many bytes apart, and the size of its boxes. The rows are in so many equal
// parts, and a box has one row of each part after the other, then the next ones.
struct BoxesOf {
  CUtensorMapDataType type;
  const void* data;
  int64_t inner, outer, row_bytes;
  int box_inner, box_outer;
  CUtensorMapSwizzle swizzle;
  int parts = 1;
};

// The driver's function that describes a matrix to the hardware; the module is not linked with the driver. Null if it has none.
inline decltype(&cuTensorMapEncodeTiled) box_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

// It only computes, so that it may do so while a graph is captured.
inline cudaError_t describe(const BoxesOf& m, CUtensorMap* map) {
  const auto encode = box_encoder();
  const cuuint64_t rows = cuuint64_t(m.outer / m.parts), sizes[] = {cuuint64_t(m.inner), cuuint64_t(m.parts), rows};
  const cuuint64_t strides[] = {rows * cuuint64_t(m.row_bytes), cuuint64_t(m.row_bytes)};
  const cuuint32_t box[] = {cuuint32_t(m.box_inner), cuuint32_t(m.parts), cuuint32_t(m.box_outer / m.parts)}, steps[] = {1, 1, 1};
  const bool made = encode != nullptr &&
                    encode(map, m.type, 3, const_cast<void*>(m.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                           m.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return made ? cudaSuccess : cudaErrorInvalidValue;
}

#if defined(__CUDACC__)
// Arrives, and lets the phase end no sooner than so many bytes have been copied.
__device__ __forceinline__ void arrive_expecting(Barrier* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}

// Copies the box that begins at (y, x), y a row of every part; zeros for what lies outside of the matrix. The barrier counts its
// bytes.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int x, int y, Barrier* b) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, 0, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(b))
      : "memory");
}

// The same for all of kBlocks blocks of the cluster, at the same place in each, counted by the barrier of each.
template <int kBlocks>
__device__ __forceinline__ void copy_box_for_all(void* to, const CUtensorMap* map, int x, int y, Barrier* b) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, 0, %3}], "
      "[%4], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(x), "r"(y), "r"(shared_address(b)), "h"(uint16_t((1 << kBlocks) - 1))
      : "memory");
}
#else  // the tests give them a meaning on a CPU
void arrive_expecting(Barrier* b, int bytes);
void copy_box(void* to, const CUtensorMap* map, int x, int y, Barrier* b);
template <int kBlocks>
void copy_box_for_all(void* to, const CUtensorMap* map, int x, int y, Barrier* b);
#endif

}  // namespace cuda
}  // namespace s24
