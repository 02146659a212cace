// The kernels of this machine.
#pragma once
#include <vector>

#include "kernels.h"

namespace s24 {

// The tables of kernels of all instruction sets that the processor can run, the best first.
const std::vector<const Kernels*>& supported_kernels();

// The table in use: the best one, unless a test has asked for another.
const Kernels& kernels();
void use_kernels(const Kernels&);

}  // namespace s24
