// What the binding files of the cpu module share: one bind_ function per family, called from cpu.cpp.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>

namespace sk::bind {

namespace py = pybind11;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// The arguments of a function as one tuple.
template <class R, class... A>
std::tuple<A...> fields_of(R (*)(A...));
template <auto function>
using FieldsOf = decltype(fields_of(function));

void bind_verify(py::module_& m);
void bind_mapping(py::module_& m);
void bind_uring(py::module_& m);
void bind_guesses(py::module_& m);

}  // namespace sk::bind
