// The product of a warpgroup, four warps, on Hopper: sparse A in registers or in shared memory, or dense A in shared memory, B in
// shared memory, sums in registers.
#pragma once
#include "../matmul_vnm.cuh"

namespace s24 {
namespace cuda {

// A tile of B, kGatheredRows x kWgmmaCols elements, lies as `swizzled` says.
constexpr int kWgmmaCols = 256;

// Whether what is compiled here may have these instructions.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kWithWgmma = false;
#else
constexpr bool kWithWgmma = true;
#endif

#if defined(__CUDACC__)
// The instruction sees after this what is in shared memory for this thread.
__device__ __forceinline__ void publish_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the newest n groups are done.
template <int n>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}

#define S24_SUMS(n) "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
#define S24_SUMS4(n) S24_SUMS(n), S24_SUMS(n + 1), S24_SUMS(n + 2), S24_SUMS(n + 3)
// `operands` are %128 and on, `scales` what is behind the predicate `more`, which is operand number `more`.
#define S24_WGMMA(kind, depth, type, more, operands, scales)                                     \
  "{.reg .pred more; setp.ne.b32 more, %" more ", 0; wgmma.mma_async" kind ".sync.aligned.m64n256" depth ".f32." \
  type "." type " {" \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, " \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
  "}, " operands ", more, " scales ";}"
#define S24_FROM_REGISTERS(type) S24_WGMMA(".sp", "k32", type, "135", "{%128, %129, %130, %131}, %132, %133, %134", "1, 1, 1")
#define S24_FROM_MEMORY(type) S24_WGMMA(".sp", "k32", type, "132", "%128, %129, %130, %131", "1, 1, 0, %133")
#define S24_DENSE(type) S24_WGMMA("", "k16", type, "130", "%128, %129", "1, 1, 0, 0")
#define S24_ALL_SUMS                                                                                                      \
  S24_SUMS4(0), S24_SUMS4(4), S24_SUMS4(8), S24_SUMS4(12), S24_SUMS4(16), S24_SUMS4(20), S24_SUMS4(24), S24_SUMS4(28)

// Registers that an instruction under way reads are not given to others before this.
__device__ __forceinline__ void hold(const uint32_t (&x)[4]) { asm volatile("" ::"r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])); }

__device__ __forceinline__ void hold(uint32_t x) { asm volatile("" ::"r"(x)); }

// acc = sparse(64, 32) dense(32, 256), plus acc if there is `more` to it. Not before wait_wgmma.
template <class T, int kSelector>
__device__ __forceinline__ void wgmma_sp(float acc[32][4], const uint32_t sparse[4], uint64_t dense, uint32_t words, int more) {
  if constexpr (std::is_same_v<T, BF16>)
    asm volatile(S24_FROM_REGISTERS("bf16")
                 : S24_ALL_SUMS
                 : "r"(sparse[0]), "r"(sparse[1]), "r"(sparse[2]), "r"(sparse[3]), "l"(dense), "r"(words), "n"(kSelector),
                   "r"(more));
  else
    asm volatile(S24_FROM_REGISTERS("f16")
                 : S24_ALL_SUMS
                 : "r"(sparse[0]), "r"(sparse[1]), "r"(sparse[2]), "r"(sparse[3]), "l"(dense), "r"(words), "n"(kSelector),
                   "r"(more));
}

// Rows of the contracted axis, of kBytes bytes (64 or 128), as copy_box swizzles them. Sixteen bytes further on are one more.
template <int kBytes>
__device__ __forceinline__ uint64_t swizzled_rows(const uint16_t* first) {
  constexpr uint64_t kNextEight = 8 * kBytes / 16, kLayout = kBytes == 128 ? 1 : 2;
  return uint64_t((shared_address(first) & 0x3ffffu) / 16) | uint64_t(1) << 16 | kNextEight << 32 | kLayout << 62;
}

// The same of columns of D, 64 together, so many rows (of the contracted axis) of them below each other: 32 rows further on are
// 32 * 128 bytes.
template <int kRows>
__device__ __forceinline__ uint64_t swizzled_columns(const uint16_t* first) {
  constexpr uint64_t kNextCols = kRows * kSwizzledCols * 2 / 16, kNextRows = 8 * kSwizzledCols * 2 / 16;
  return uint64_t((shared_address(first) & 0x3ffffu) / 16) | kNextCols << 16 | kNextRows << 32 | uint64_t(1) << 62;
}

// The same product of sparse values in memory, 64 swizzled rows of 64 bytes, and of 256 swizzled rows of 128 bytes or
// of swizzled columns.
template <class T, int kSelector, bool kColumns>
__device__ __forceinline__ void wgmma_sp_memory(float acc[32][4], uint64_t sparse, uint64_t dense, uint32_t words, int more) {
  if constexpr (std::is_same_v<T, BF16>)
    asm volatile(S24_FROM_MEMORY("bf16")
                 : S24_ALL_SUMS
                 : "l"(sparse), "l"(dense), "r"(words), "n"(kSelector), "r"(more), "n"(int(kColumns)));
  else
    asm volatile(S24_FROM_MEMORY("f16")
                 : S24_ALL_SUMS
                 : "l"(sparse), "l"(dense), "r"(words), "n"(kSelector), "r"(more), "n"(int(kColumns)));
}

// acc = a(64, 16) b(256, 16)^T, plus acc if there is `more` to it, of rows of 128 bytes as `swizzled_rows` has them.
template <class T>
__device__ __forceinline__ void wgmma_rows(float acc[32][4], uint64_t a, uint64_t b, int more) {
  if constexpr (std::is_same_v<T, BF16>)
    asm volatile(S24_DENSE("bf16") : S24_ALL_SUMS : "l"(a), "l"(b), "r"(more));
  else
    asm volatile(S24_DENSE("f16") : S24_ALL_SUMS : "l"(a), "l"(b), "r"(more));
}

#undef S24_ALL_SUMS
#undef S24_DENSE
#undef S24_FROM_MEMORY
#undef S24_FROM_REGISTERS
#undef S24_WGMMA
#undef S24_SUMS4
#undef S24_SUMS

// Four 8 x 8 matrices of 16-bit elements, transposed on their way into shared memory; a lane gives the address of one row.
__device__ __forceinline__ void store_matrices_transposed(uint16_t* row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}
#else  // the tests give them a meaning on a CPU
inline void publish_copies() {}
inline void begin_wgmma() {}
void commit_wgmma();
template <int n>
void wait_wgmma();
inline void hold(const uint32_t (&)[4]) {}
inline void hold(uint32_t) {}
template <class T, int kSelector>
void wgmma_sp(float acc[32][4], const uint32_t sparse[4], uint64_t dense, uint32_t words, int more);
template <int kBytes>
uint64_t swizzled_rows(const uint16_t* first);
template <int kRows>
uint64_t swizzled_columns(const uint16_t* first);
template <class T, int kSelector, bool kColumns>
void wgmma_sp_memory(float acc[32][4], uint64_t sparse, uint64_t dense, uint32_t words, int more);
template <class T>
void wgmma_rows(float acc[32][4], uint64_t a, uint64_t b, int more);
void store_matrices_transposed(uint16_t* row, const uint32_t (&m)[4]);
#endif

}  // namespace cuda
}  // namespace s24
