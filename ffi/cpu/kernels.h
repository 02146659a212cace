// The kernels, which are compiled once per instruction set, each in a namespace of its own: nothing may be merged across them.
//
// A kernel is the specialisation of `run` for its arguments. In a file *.simd.cc it does the units [begin, end) of its work (work.h),
// in *.fma.cc one block of a product's result with kScratch bytes of scratch, aligned to 64. Any split of the work
// over threads gives the same bits.
//
// S24_ISAS(X), which the compiler is given, is X(name) for each instruction set of the module. A file of kernels sees its own,
// S24_ISA.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace s24 {

// Rows and columns of a product's result.
struct Block {
  int64_t row0, row1, col0, col1;
};

constexpr size_t kScratch = 2 << 20;

#if defined(S24_ISA)
#define S24_ISAS(X) X(S24_ISA)
#endif

#define S24_DECLARE(isa)                                  \
  namespace isa {                                         \
  template <class Args>                                   \
  void run(const Args&, int64_t begin, int64_t end);      \
  template <class Args>                                   \
  void run(const Args&, const Block&, void* scratch);     \
  }
S24_ISAS(S24_DECLARE)
#undef S24_DECLARE

#if !defined(S24_ISA)
// The kernels for these arguments, in the order of S24_ISAS. Tiles of AMX multiply, and do nothing else: files *.simd.cc are not
// compiled for it.
#define S24_UNITS_generic generic
#define S24_UNITS_avx2 avx2
#define S24_UNITS_avx512 avx512
#define S24_UNITS_amx avx512
#define S24_KERNEL(isa) S24_UNITS_##isa::run<Args>,
template <class Args>
constexpr void (*kOfUnits[])(const Args&, int64_t begin, int64_t end) = {S24_ISAS(S24_KERNEL)};
#undef S24_KERNEL
#define S24_KERNEL(isa) isa::run<Args>,
template <class Args>
constexpr void (*kOfBlocks[])(const Args&, const Block&, void* scratch) = {S24_ISAS(S24_KERNEL)};
#undef S24_KERNEL
#endif

}  // namespace s24
