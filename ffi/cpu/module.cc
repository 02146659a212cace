// jax_sparse24._cpu: the FFI targets as capsules, and thin entry points of ffi/core for tests.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "../call/target.h"
#include "../core/philox.h"
#include "../core/transposable.h"
#include "isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_cpu, m, py::mod_gil_not_used()) {
  m.doc() = "CPU kernels of jax_sparse24 as XLA FFI targets.";
  m.def(
      "registrations",
      [] {
        py::dict all;
        for (const s24::Target& target : s24::targets())
          all[target.name] = py::capsule(reinterpret_cast<void*>(target.execute), "xla._CUSTOM_CALL_TARGET");
        return all;
      },
      "Target name -> capsule, for jax.ffi.register_ffi_target.");
  m.def(
      "ffi_api_version", [] { return py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers that this module was built with.");
  m.def(
      "isa", [] { return s24::isa_name(s24::isa()); }, "The instruction set in use: the best that the processor has.");
  m.def(
      "isas",
      [] {
        py::list all;
        for (const int isa : s24::supported_isas()) all.append(s24::isa_name(isa));
        return all;
      },
      "The instruction sets that this processor can run, best first.");
  m.def(
      "use_isa",
      [](const std::string& name) {
        for (const int isa : s24::supported_isas())
          if (name == s24::isa_name(isa)) return s24::use_isa(isa);
        throw py::value_error("this processor does not run the kernels for \"" + name + "\"; see isas()");
      },
      py::arg("name"), "For tests: run the kernels of another instruction set.");
  m.def(
      "tile_patterns",
      [] {
        py::list all;
        for (const s24::TilePattern& t : s24::kTiles.at) all.append(py::make_tuple(t.p[0], t.p[1], t.p[2], t.p[3]));
        return all;
      },
      "The 90 transposable patterns, one column pair per row.");
  m.def(
      "philox",
      [](uint32_t k0, uint32_t k1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
        const uint32_t counter[4] = {c0, c1, c2, c3};
        uint32_t w[4];
        s24::philox4x32(k0, k1, counter, w);
        return py::make_tuple(w[0], w[1], w[2], w[3]);
      },
      py::arg("key0"), py::arg("key1"), py::arg("c0"), py::arg("c1"), py::arg("c2"), py::arg("c3"),
      "Philox4x32-10: four random words.");
}
