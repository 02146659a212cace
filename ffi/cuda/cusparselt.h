// Products by cuSPARSELt: the library is opened at run time; plans are made once and kept for the life of the process.
//
// A launch that has not ended, or a graph that may be replayed at any later time, may need what its plan holds, and nobody says
// when the last of them is gone. There are as many plans as there are products and addresses of biases.
#pragma once
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

namespace s24 {
namespace cuda {

// Opens the library (path, else what the loader finds). Empty, or the reason why it cannot be used.
std::string load_cusparselt(const char* path);
int cusparselt_version();

// What follows on the sums, besides a bias. Any other number is refused.
enum class Epilogue : int64_t { kNone, kRelu, kGelu };

// A product out(rows, cols) = activation(P(rows, depth) D(depth, cols) + bias) with P sparse, row-major.
//
// The library takes the bias when a plan is made, and whether a plan reads the address again is not documented: it is part
// of the key.
struct PlanKey {
  int device = 0;
  int64_t rows = 0, depth = 0, cols = 0;
  bool dense_k_last = false;     // D is column-major
  bool out_packed_last = false;  // the result is column-major
  cudaDataType in = CUDA_R_16BF, out = CUDA_R_16BF;
  Epilogue activation = Epilogue::kNone;
  const void* bias = nullptr;  // one number per row, of the result's type, on the device; null: none
  int64_t algorithm = -1;      // -1: the library's choice; others it may not have are refused

  auto tied() const {
    return std::tie(device, rows, depth, cols, dense_k_last, out_packed_last, in, out, activation, bias, algorithm);
  }
  bool operator<(const PlanKey& o) const { return tied() < o.tied(); }
};

struct Needs {
  int64_t workspace = 0, compressed = 0;
  int algorithms = 0;
  std::string error;

  // Why buffers of so many bytes do not do, or empty.
  std::string misfit(int64_t compressed_bytes, int64_t workspace_bytes) const {
    const auto differs = [](const char* what, int64_t needed, int64_t given) {
      return std::string(what) + " needs " + std::to_string(needed) + " bytes, got " + std::to_string(given);
    };
    if (compressed_bytes < compressed) return differs("the compressed matrix", compressed, compressed_bytes);
    if (workspace_bytes < workspace) return differs("the workspace", workspace, workspace_bytes);
    return "";
  }
};

// Makes the plan, if it is not there, and says what it needs. Host work, which no capture records.
Needs cusparselt_needs(const PlanKey& key);

// compressed: values, then metadata. Empty, or an error. Threads launch different plans at once, and each plan one at a time:
// whether two threads may use one is not documented.
std::string cusparselt_matmul(const PlanKey& key, const void* compressed, int64_t compressed_bytes, const void* dense, void* out,
                              void* workspace, int64_t workspace_bytes, cudaStream_t stream);

}  // namespace cuda
}  // namespace s24
