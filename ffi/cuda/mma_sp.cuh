// The instructions of the sparse product: asynchronous copies, matrix loads, mma.sp and where it wants its metadata.
#pragma once
#include <type_traits>

#include "vectors.cuh"

namespace s24 {
namespace cuda {

#if defined(__CUDACC__)
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Copies n bytes, or writes zeros.
template <int n>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
  const int bytes = valid ? n : 0;
  if constexpr (n == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes), "n"(n));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Waits until all but the newest n groups of copies have arrived.
template <int n>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

// Four 8x8 matrices of 16-bit elements; a lane gives the address of one row.
template <bool kTranspose>
__device__ __forceinline__ void load_matrices(const uint16_t* row, uint32_t m[4]) {
  if constexpr (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row)));
}

// Stored indices ascend within a group, which the newer form of the instruction may rely on.
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5)
#define S24_MMA_SP "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32."
#else
#define S24_MMA_SP "mma.sp.sync.aligned.m16n8k32.row.col.f32."
#endif
#define S24_MMA_OPERANDS \
  ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"

// acc(16, 8) += sparse(16, 32) dense(32, 8). kSelector: which pair of lanes of each quad holds the metadata.
template <class T, int kSelector>
__device__ __forceinline__ void mma_sp(float acc[4], const uint32_t sparse[4], const uint32_t dense[4], uint32_t words) {
  if constexpr (std::is_same_v<T, BF16>)
    asm volatile(S24_MMA_SP "bf16.bf16" S24_MMA_OPERANDS
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(sparse[0]), "r"(sparse[1]), "r"(sparse[2]), "r"(sparse[3]), "r"(dense[0]), "r"(dense[1]),
                   "r"(dense[2]), "r"(dense[3]), "r"(words), "n"(kSelector));
  else
    asm volatile(S24_MMA_SP "f16.f16" S24_MMA_OPERANDS
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(sparse[0]), "r"(sparse[1]), "r"(sparse[2]), "r"(sparse[3]), "r"(dense[0]), "r"(dense[1]),
                   "r"(dense[2]), "r"(dense[3]), "r"(words), "n"(kSelector));
}

#undef S24_MMA_SP
#undef S24_MMA_OPERANDS
#else  // the tests give them a meaning on a CPU
template <int n>
void copy_async(void* to, const void* from, bool valid);
void commit_copies();
template <int n>
void wait_copies();
template <bool kTranspose>
void load_matrices(const uint16_t* row, uint32_t m[4]);
template <class T, int kSelector>
void mma_sp(float acc[4], const uint32_t sparse[4], const uint32_t dense[4], uint32_t words);
#endif

// The metadata operand of mma.sp.m16n8k32 with 16-bit values and selector `pair`: the word of lane `lane` whose half
// `half` it fills holds 16 columns, number `column`, of row `row` of the 16 x 64 block.
struct MmaWord {
  int row, column;
};
S24_HD MmaWord mma_sp_word(int lane, int half) { return {lane / 4 + 8 * half, lane % 4}; }

// Eight 16-bit elements, of which `left` exist; zeros for the others.
template <bool kWhole>
__device__ __forceinline__ void copy8(uint16_t* to, const uint16_t* from, int64_t left) {
  if constexpr (kWhole) {
    copy_async<16>(to, from, left > 0);
  } else {
    S24_UNROLL
    for (int i = 0; i < 8; ++i) to[i] = i < left ? from[i] : uint16_t(0);
  }
}

}  // namespace cuda
}  // namespace s24
