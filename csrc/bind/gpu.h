// What the bindings of the GPU modules share: one file and one bind_ function per family, called from gpu.cpp.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "gpu/launch.h"

namespace sk::gpu::bind {

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

inline void check(int code, const char* operation) {
  if (code != 0)
    throw std::runtime_error(std::string(operation) + ": " + error_name(code) + ": " + error_text(code));
}

void bind_linear(py::module_& m);
void bind_quantize(py::module_& m);
void bind_fused(py::module_& m);
void bind_verify(py::module_& m);

}  // namespace sk::gpu::bind
