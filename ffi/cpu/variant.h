// What one instruction set provides (S24_ISA names it); variant.cc puts it into a table.
#pragma once
#include "kernels.h"

namespace s24 {
namespace S24_ISA {

void map(const GroupwiseArgs&, int64_t begin, int64_t end);
void tile(const TileArgs&, int64_t begin, int64_t end);
void pack(const PackArgs&, int64_t begin, int64_t end);
void matmul(const MatmulArgs&, const MatmulBlock&, void* scratch);
void vnm(const VnmArgs&, int64_t begin, int64_t end);
void vnm_matmul(const VnmMatmulArgs&, const MatmulBlock&, void* scratch);
void sampled(const SampledArgs&, int64_t row0, int64_t row1, int64_t group0, int64_t group1, void* scratch);

}  // namespace S24_ISA
}  // namespace s24
