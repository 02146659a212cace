// cuSPARSELt through dlopen: the part of its C interface that is used, its handles and plans.
//
// The declarations below are those of versions 0.8.1 to 0.10.0, whose interface is the same.
#include "cusparselt.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace s24 {
namespace cuda {
namespace {

struct alignas(16) Opaque {
  uint8_t bytes[512];
};

enum Order { kColumnMajor = 1, kRowMajor = 2 };
enum { kNoTranspose = 0, kHalfSparse = 0, kCompute32F = 2, kDefaultAlgorithms = 0 };
enum AlgorithmAttribute { kAlgorithmId = 0, kAlgorithmMaxId = 1 };
enum ProductAttribute { kRelu = 0, kGelu = 3, kBiasPointer = 8 };
constexpr uint32_t kAlignment = 16;

#define S24_FUNCTIONS(X)                                                                                              \
  X(Init, (Opaque * handle))                                                                                          \
  X(GetVersion, (const Opaque* handle, int* version))                                                                 \
  X(DenseDescriptorInit, (const Opaque*, Opaque*, int64_t, int64_t, int64_t, uint32_t, cudaDataType, int))            \
  X(StructuredDescriptorInit, (const Opaque*, Opaque*, int64_t, int64_t, int64_t, uint32_t, cudaDataType, int, int)) \
  X(MatDescriptorDestroy, (const Opaque*))                                                                            \
  X(MatmulDescriptorInit,                                                                                             \
    (const Opaque*, Opaque*, int, int, const Opaque*, const Opaque*, const Opaque*, const Opaque*, int))              \
  X(MatmulDescSetAttribute, (const Opaque*, Opaque*, int, const void*, size_t))                                       \
  X(MatmulAlgSelectionInit, (const Opaque*, Opaque*, const Opaque*, int))                                             \
  X(MatmulAlgSelectionDestroy, (const Opaque*))                                                                       \
  X(MatmulAlgSetAttribute, (const Opaque*, Opaque*, int, const void*, size_t))                                        \
  X(MatmulAlgGetAttribute, (const Opaque*, const Opaque*, int, void*, size_t))                                        \
  X(MatmulPlanInit, (const Opaque*, Opaque*, const Opaque*, const Opaque*))                                           \
  X(MatmulPlanDestroy, (const Opaque*))                                                                               \
  X(MatmulGetWorkspace, (const Opaque*, const Opaque*, size_t*))                                                      \
  X(SpMMACompressedSize2, (const Opaque*, const Opaque*, size_t*, size_t*))                                           \
  X(Matmul, (const Opaque*, const Opaque*, const void*, const void*, const void*, const void*, const void*, void*,    \
             void*, cudaStream_t*, int32_t))

struct Library {
  void* opened = nullptr;
#define S24_MEMBER(name, arguments) int(*name) arguments = nullptr;
  S24_FUNCTIONS(S24_MEMBER)
#undef S24_MEMBER
};

// Checks calls of the library, and keeps the message of the first one that failed.
class Status {
 public:
  void operator()(int code, const char* what) {
    if (code != 0 && error_.empty())
      error_ = std::string("cuSPARSELt: ") + what + " returned status " + std::to_string(code);
  }
  bool ok() const { return error_.empty(); }
  const std::string& error() const { return error_; }

 private:
  std::string error_;
};

struct Plan {
  const Library* library;
  const Opaque* handle;
  Opaque sparse{}, dense{}, out{}, product{}, selection{}, plan{};
  int made = 0;  // of the above, in this order
  Needs needs;
  std::mutex launching;

  ~Plan() {
    if (made > 5) library->MatmulPlanDestroy(&plan);
    if (made > 4) library->MatmulAlgSelectionDestroy(&selection);
    const Opaque* matrices[] = {&sparse, &dense, &out};
    for (int i = 0; i < 3 && i < made; ++i) library->MatDescriptorDestroy(matrices[i]);
  }

  void make(const PlanKey& k) {
    if (k.activation < Epilogue::kNone || k.activation > Epilogue::kGelu) {
      needs.error = "cuSPARSELt: activation=" + std::to_string(int64_t(k.activation)) +
                    " is unknown; use 0 (none), 1 (ReLU) or 2 (GELU)";
      return;
    }
    const Library& L = *library;
    const int d_order = k.dense_k_last ? kColumnMajor : kRowMajor, o_order = k.out_packed_last ? kColumnMajor : kRowMajor;
    Status status;
    const auto step = [&](int code, const char* what) {
      status(code, what);
      if (status.ok()) ++made;
      return status.ok();
    };
    const bool ready =
        step(L.StructuredDescriptorInit(handle, &sparse, k.rows, k.depth, k.depth, kAlignment, k.in, kRowMajor, kHalfSparse),
             "StructuredDescriptorInit") &&
        step(L.DenseDescriptorInit(handle, &dense, k.depth, k.cols, k.dense_k_last ? k.depth : k.cols, kAlignment, k.in,
                                   d_order),
             "DenseDescriptorInit of the dense operand") &&
        step(L.DenseDescriptorInit(handle, &out, k.rows, k.cols, k.out_packed_last ? k.rows : k.cols, kAlignment, k.out,
                                   o_order),
             "DenseDescriptorInit of the result") &&
        step(L.MatmulDescriptorInit(handle, &product, kNoTranspose, kNoTranspose, &sparse, &dense, &out, &out, kCompute32F),
             "MatmulDescriptorInit") &&
        set_epilogue(k, status) &&
        step(L.MatmulAlgSelectionInit(handle, &selection, &product, kDefaultAlgorithms), "MatmulAlgSelectionInit");
    if (ready) {
      status(L.MatmulAlgGetAttribute(handle, &selection, kAlgorithmMaxId, &needs.algorithms, sizeof(int)),
            "MatmulAlgGetAttribute");
      if (status.ok() && (k.algorithm < -1 || k.algorithm >= needs.algorithms)) {
        needs.error = "cuSPARSELt: algorithm=" + std::to_string(k.algorithm) + " does not exist for this product; use -1 (" +
                      "its own choice) or 0 to " + std::to_string(needs.algorithms - 1);
        return;
      }
      const int id = int(k.algorithm);
      if (id >= 0) status(L.MatmulAlgSetAttribute(handle, &selection, kAlgorithmId, &id, sizeof id), "MatmulAlgSetAttribute");
      size_t workspace = 0, compressed = 0, temporary = 0;
      if (status.ok() && step(L.MatmulPlanInit(handle, &plan, &product, &selection), "MatmulPlanInit")) {
        status(L.MatmulGetWorkspace(handle, &plan, &workspace), "MatmulGetWorkspace");
        status(L.SpMMACompressedSize2(handle, &sparse, &compressed, &temporary), "SpMMACompressedSize2");
      }
      needs.workspace = int64_t(workspace);
      needs.compressed = int64_t(compressed);
    }
    needs.error = status.error();
  }

  bool set_epilogue(const PlanKey& k, Status& status) {
    const auto set = [&](ProductAttribute attribute, const void* value, size_t size, const char* what) {
      status(library->MatmulDescSetAttribute(handle, &product, attribute, value, size), what);
    };
    const int on = 1;
    if (k.activation == Epilogue::kRelu) set(kRelu, &on, sizeof on, "MatmulDescSetAttribute of ReLU");
    if (k.activation == Epilogue::kGelu) set(kGelu, &on, sizeof on, "MatmulDescSetAttribute of GELU");
    if (k.bias != nullptr) set(kBiasPointer, &k.bias, sizeof k.bias, "MatmulDescSetAttribute of the bias");
    return status.ok();
  }
};

// What the process knows of the library. It is never destroyed, because at exit the driver may be gone before this module.
struct State {
  std::mutex making;  // held while the library is opened, starts or makes a plan
  Library functions;
  std::map<int, std::unique_ptr<Opaque>> handles;  // by device
  std::mutex finding;                              // never held while the library works
  std::map<PlanKey, std::unique_ptr<Plan>> plans;
};

// While this lives, its thread may do what may not become part of a graph, such as allocating memory, although the thread
// captures one: a bias at an address that was not known before needs a plan then.
class Uncaptured {
 public:
  Uncaptured() { cudaThreadExchangeStreamCaptureMode(&other_); }
  ~Uncaptured() { cudaThreadExchangeStreamCaptureMode(&other_); }
  Uncaptured(const Uncaptured&) = delete;

 private:
  cudaStreamCaptureMode other_ = cudaStreamCaptureModeRelaxed;
};

State& state() {
  static State* s = new State;
  return *s;
}

// The caller of the next two functions holds `making`.
std::string open_library(State& s, const char* path) {
  if (s.functions.opened != nullptr) return "";
  void* opened = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (opened == nullptr) opened = dlopen("libcusparseLt.so.0", RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* why = dlerror();
    return std::string("cuSPARSELt does not open: ") + (why != nullptr ? why : "dlopen failed");
  }
#define S24_SYMBOL(name, arguments)                                                                       \
  s.functions.name = reinterpret_cast<int(*) arguments>(dlsym(opened, "cusparseLt" #name));                \
  if (s.functions.name == nullptr) return "this cuSPARSELt has no function cusparseLt" #name;
  S24_FUNCTIONS(S24_SYMBOL)
#undef S24_SYMBOL
  s.functions.opened = opened;
  return "";
}

const Opaque* handle_of(State& s, int device, std::string& error) {
  std::unique_ptr<Opaque>& handle = s.handles[device];
  if (handle == nullptr) {
    auto fresh = std::make_unique<Opaque>();
    Status status;
    status(s.functions.Init(fresh.get()), "Init");
    error = status.error();
    if (!status.ok()) return nullptr;
    handle = std::move(fresh);
  }
  return handle.get();
}

Plan* find_plan(State& s, const PlanKey& key) {
  std::lock_guard<std::mutex> lock(s.finding);
  const auto found = s.plans.find(key);
  return found == s.plans.end() ? nullptr : found->second.get();
}

// The plan of a product, made if it is not there; null, and an error, if it cannot be made.
Plan* plan_of(State& s, const PlanKey& key, std::string& error) {
  if (Plan* const known = find_plan(s, key)) return known;
  std::lock_guard<std::mutex> making(s.making);
  if (Plan* const known = find_plan(s, key)) return known;  // made while this thread waited
  error = open_library(s, nullptr);
  if (!error.empty()) return nullptr;
  const Uncaptured uncaptured;
  // The library works in the context of the calling thread, and a thread that only traces a program has none.
  if (cudaSetDevice(key.device) != cudaSuccess) {
    error = "cuSPARSELt: there is no CUDA device " + std::to_string(key.device);
    return nullptr;
  }
  const Opaque* handle = handle_of(s, key.device, error);
  if (handle == nullptr) return nullptr;
  auto plan = std::make_unique<Plan>();
  plan->library = &s.functions;
  plan->handle = handle;
  plan->make(key);
  error = plan->needs.error;
  if (!error.empty()) return nullptr;
  std::lock_guard<std::mutex> finding(s.finding);
  return (s.plans[key] = std::move(plan)).get();
}

}  // namespace

std::string load_cusparselt(const char* path) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.making);
  return open_library(s, path);
}

int cusparselt_version() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.making);
  const Uncaptured uncaptured;
  int device = 0, version = 0;
  std::string error = open_library(s, nullptr);
  if (!error.empty() || cudaGetDevice(&device) != cudaSuccess) return 0;
  const Opaque* handle = handle_of(s, device, error);
  return handle != nullptr && s.functions.GetVersion(handle, &version) == 0 ? version : 0;
}

Needs cusparselt_needs(const PlanKey& key) {
  Needs failed;
  const Plan* plan = plan_of(state(), key, failed.error);
  return plan == nullptr ? failed : plan->needs;
}

std::string cusparselt_matmul(const PlanKey& key, const void* compressed, int64_t compressed_bytes, const void* dense, void* out,
                              void* workspace, int64_t workspace_bytes, cudaStream_t stream) {
  std::string error;
  Plan* const plan = plan_of(state(), key, error);
  if (plan == nullptr) return error;
  error = plan->needs.misfit(compressed_bytes, workspace_bytes);
  if (!error.empty()) return error;
  const float one = 1.0f, zero = 0.0f;
  std::lock_guard<std::mutex> lock(plan->launching);
  Status status;
  status(plan->library->Matmul(plan->handle, &plan->plan, &one, compressed, dense, &zero, out, out, workspace, &stream, 1),
        "Matmul");
  return status.error();
}

}  // namespace cuda
}  // namespace s24
