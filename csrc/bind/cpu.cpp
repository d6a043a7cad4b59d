// Python module _C_cpu. Integers in (addresses, sizes, strides in elements), range checks, the GIL released, errors as
// exceptions. Shapes, dtypes, strides and devices were checked in Python (specdec_kernels/validate.py); the checks here
// only keep a slip on that side from becoming a wild pointer. One section per kernel family.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"
#include "cpu/threads.h"
#include "sk/numerics.h"

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

template <class T>
[[maybe_unused]] T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

[[maybe_unused]] void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void bind_runtime(py::module_& m) {
  m.def("isa", [] { return sk::isa_name(sk::isa()); });
  m.def("machine_isa", [] { return sk::isa_name(sk::machine_isa()); });
  m.def("set_isa", [](const std::string& name) { return sk::set_isa(name.c_str()); });
  m.def("pool_workers", &sk::pool_workers);
}

// ---- quantize family -------------------------------------------------------------------------------------------------

// ---- linear family ---------------------------------------------------------------------------------------------------

// ---- verify family ---------------------------------------------------------------------------------------------------

// ---- attention family ------------------------------------------------------------------------------------------------

// ---- ggml family -----------------------------------------------------------------------------------------------------

}  // namespace

PYBIND11_MODULE(_C_cpu, m) {
  m.doc() = "CPU kernels of specdec_kernels (raw pointers; use the package, not this module)";
  bind_runtime(m);

  // quantize

  // linear

  // verify

  // attention

  // ggml
}
