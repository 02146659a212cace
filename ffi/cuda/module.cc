// jax_sparse24._cuda: the FFI targets as capsules, the devices, and cuSPARSELt.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include <string>

#include "../call/target.h"
#include "cusparselt.h"

namespace py = pybind11;

namespace {

py::capsule capsule(XLA_FFI_Handler* handler) {
  return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

PYBIND11_MODULE(_cuda, m, py::mod_gil_not_used()) {
  m.doc() = "CUDA kernels of jax_sparse24 as XLA FFI targets.";
  m.def(
      "registrations",
      [] {
        py::dict all;
        for (const s24::Target& target : s24::targets()) {
          if (target.initialize == nullptr) {
            all[target.name] = capsule(target.execute);
            continue;
          }
          py::dict stages;
          stages["initialize"] = capsule(target.initialize);
          stages["execute"] = capsule(target.execute);
          all[target.name] = stages;
        }
        return all;
      },
      "Target name -> capsule, or stage -> capsule, for jax.ffi.register_ffi_target.");
  m.def(
      "ffi_api_version", [] { return py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers that this module was built with.");
  m.def(
      "runtime_version", [] { return CUDART_VERSION; }, "Version of the CUDA runtime inside, 1000 major + 10 minor.");
  m.def(
      "load_cusparselt",
      [](const std::string& path) { return s24::cuda::load_cusparselt(path.empty() ? nullptr : path.c_str()); },
      py::arg("path"), "Opens cuSPARSELt, once: an empty string, or why it cannot be used.");
  m.def(
      "cusparselt_version", [] { return s24::cuda::cusparselt_version(); },
      "Version of cuSPARSELt, 1000 major + 100 minor + patch; 0 if it does not start.");
  m.def(
      "cusparselt_needs",
      [](int64_t rows, int64_t depth, int64_t cols, bool dense_k_last, bool out_packed_last, const std::string& in,
         const std::string& out, int64_t activation, int64_t algorithm) {
        const auto type = [](const std::string& name) {
          for (const auto& [known, value] : {std::pair{"bfloat16", CUDA_R_16BF}, std::pair{"float16", CUDA_R_16F},
                                             std::pair{"float32", CUDA_R_32F}, std::pair{"float8_e4m3fn", CUDA_R_8F_E4M3}})
            if (name == known) return value;
          throw std::invalid_argument("cusparselt_needs: no dtype " + name);
        };
        s24::cuda::PlanKey key;
        key.rows = rows, key.depth = depth, key.cols = cols;
        key.dense_k_last = dense_k_last, key.out_packed_last = out_packed_last;
        key.in = type(in), key.out = type(out);
        key.activation = s24::cuda::Epilogue(activation), key.algorithm = algorithm;
        const s24::cuda::Needs needs = s24::cuda::cusparselt_needs(key);
        if (!needs.error.empty()) throw std::runtime_error(needs.error);
        return py::make_tuple(needs.workspace, needs.compressed, needs.algorithms);
      },
      py::arg("rows"), py::arg("depth"), py::arg("cols"), py::arg("dense_k_last"), py::arg("out_packed_last"),
      py::arg("dtype"), py::arg("out_dtype"), py::arg("activation"), py::arg("algorithm"),
      "(bytes of workspace, bytes of the compressed matrix, number of algorithms) of a product on the current device.");
}
