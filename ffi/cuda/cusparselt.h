// Products by cuSPARSELt: the library is opened at run time; plans are made once and kept.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

namespace s24 {
namespace cuda {

// Opens the library (path, else what the loader finds). Empty, or the reason why it cannot be used.
std::string load_cusparselt(const char* path);
int cusparselt_version();

// A product out(rows, cols) = P(rows, depth) D(depth, cols) with P sparse, row-major; 16-bit operands and result.
struct PlanKey {
  int device;
  int64_t rows, depth, cols;
  bool dense_k_last;     // D is column-major
  bool out_packed_last;  // the result is column-major
  bool half;             // float16, else bfloat16
  int64_t algorithm;     // -1: the library's choice

  auto tied() const {
    return std::tie(device, rows, depth, cols, dense_k_last, out_packed_last, half, algorithm);
  }
  bool operator<(const PlanKey& o) const { return tied() < o.tied(); }
};

struct Needs {
  int64_t workspace = 0, compressed = 0;
  int algorithms = 0;
  std::string error;
};

// Makes the plan, if it is not there, and says what it needs. Host work; never inside a capture.
Needs cusparselt_needs(const PlanKey& key);

// compressed: values, then metadata. Empty, or an error.
std::string cusparselt_matmul(const PlanKey& key, const void* compressed, const void* dense, void* out, void* workspace,
                              cudaStream_t stream);

}  // namespace cuda
}  // namespace s24
