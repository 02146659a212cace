// The table of one instruction set.
#include "variant.h"

#define S24_STRING_(x) #x
#define S24_STRING(x) S24_STRING_(x)

namespace s24 {
namespace S24_ISA {

extern const Kernels kKernels;
#define S24_VALUE(name, parameters) name,
const Kernels kKernels = {S24_STRING(S24_ISA), S24_KERNELS(S24_VALUE)};
#undef S24_VALUE

}  // namespace S24_ISA
}  // namespace s24
