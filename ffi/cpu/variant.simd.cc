// The table of one instruction set.
#include "variant.h"

#define S24_STRING_(x) #x
#define S24_STRING(x) S24_STRING_(x)

namespace s24 {
namespace S24_ISA {

extern const Kernels kKernels;
const Kernels kKernels = {S24_STRING(S24_ISA), map, tile, pack, matmul, vnm, vnm_matmul, sampled};

}  // namespace S24_ISA
}  // namespace s24
