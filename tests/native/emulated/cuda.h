// The driver's description of a matrix of which boxes are copied, for kernels on a CPU: what the manual demands of it.
#pragma once
#include <stdint.h>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT32 = 2, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Rows of every part follow each other, a row of each part after the other.
struct CUtensorMap {
  const uint8_t* data;
  int64_t element, inner, parts, outer, part_bytes, row_bytes;  // bytes of an element; sizes in elements; rows of a part
  int box_inner, box_outer, swizzled;                           // bytes of a row that is swizzled, or 0
};

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4 : 2, swizzled = swizzle == 0 ? 0 : 16 << swizzle;
  const uint64_t most = uint64_t(1) << 32, row = box[0] * uint64_t(element);
  bool fits = rank == 3 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[1] == sizes[1];
  for (int i = 0; i < 2; ++i) fits = fits && strides[i] % 16 == 0 && strides[i] < most << 8;
  for (int i = 0; i < 3; ++i)
    fits = fits && sizes[i] > 0 && sizes[i] <= most && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
  if (!fits || row % 16 != 0 || (swizzled != 0 && row > uint64_t(swizzled))) return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<const uint8_t*>(data), element, int64_t(sizes[0]), int64_t(sizes[1]), int64_t(sizes[2]), int64_t(strides[0]),
          int64_t(strides[1]), int(box[0]), int(box[2]), swizzled};
  return CUDA_SUCCESS;
}
