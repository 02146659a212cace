// What one instruction set provides (S24_ISA names it); variant.simd.cc puts it into a table.
#pragma once
#include "kernels.h"

namespace s24 {
namespace S24_ISA {

#define S24_DECLARE(name, parameters) void name parameters;
S24_KERNELS(S24_DECLARE)
#undef S24_DECLARE

}  // namespace S24_ISA
}  // namespace s24
