// The kernels of this machine.
#pragma once
#include <vector>

#include "kernels.h"

namespace s24 {

// All that the processor can run, best first.
const std::vector<const Kernels*>& supported_kernels();

// Those in use: the best, unless a test has asked for others.
const Kernels& kernels();
void use_kernels(const Kernels&);

}  // namespace s24
