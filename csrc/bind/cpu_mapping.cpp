// Mapped files (see cpu.cpp).
#include "cpu/mapping.h"

#include <cerrno>
#include <memory>

#include "bind/cpu.h"

namespace sk::bind {

void bind_mapping(py::module_& m) {
  py::class_<Mapping>(m, "Mapping")
      .def(py::init([](int fd, int64_t size) {
        require(size > 0, "size: expected bytes to map");
        std::unique_ptr<Mapping> mapping(Mapping::of_file(fd, size));
        if (mapping != nullptr) return mapping;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
      }))
      .def_property_readonly("address", &Mapping::address)
      .def_property_readonly("size", &Mapping::size)
      .def_property_readonly("damaged", &Mapping::damaged)
      .def("load", [](const Mapping& mapping, int64_t offset, int64_t nbytes) {
        require(offset >= 0 && nbytes >= 0 && offset <= mapping.size() - nbytes, "load: outside of the mapping");
        const py::gil_scoped_release free_gil;
        mapping.load(offset, nbytes);
      });
  m.def("guard_mappings", &guard_mappings);
}

}  // namespace sk::bind
