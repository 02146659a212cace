// The instruction sets of this machine. They are numbered as in S24_ISAS (kernels.h).
#pragma once
#include <vector>

namespace s24 {

const char* isa_name(int isa);

// What the processor can run, the best first.
const std::vector<int>& supported_isas();

// The one in use: the best, unless a test has asked for another.
int isa();
void use_isa(int isa);

}  // namespace s24
