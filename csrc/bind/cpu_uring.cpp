// The binding of the reader that uses io_uring (specdec_kernels/stream/reader.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <system_error>
#include <tuple>
#include <vector>

#include "bind/cpu.h"
#include "bind/program.h"
#include "cpu/short_turns.h"
#include "cpu/uring_reads.h"

namespace sk::bind {
#ifdef SK_URING
namespace {

using Piece = std::tuple<int, int, int, int64_t, int64_t, uintptr_t>;  // of batch.py

std::vector<ReadPiece> read_pieces(const std::vector<Piece>& pieces) {
  std::vector<ReadPiece> result;
  for (const auto& [file, direct, buffered, offset, size, to] : pieces) {
    require(offset >= 0 && size > 0 && size <= int64_t{1} << 30 && to != 0, "piece: bad offset, size or address");
    result.push_back({file, direct, buffered, offset, size, pointer<char>(to)});
  }
  return result;
}

}  // namespace

void bind_uring(py::module_& m) {
  m.def("short_turns", &short_turns);
  py::class_<ReadBatch, std::shared_ptr<ReadBatch>>(m, "ReadBatch")
      .def("wait", &ReadBatch::wait, release_gil())
      .def("cancel", &ReadBatch::cancel, release_gil())
      .def_property_readonly("dropped", &ReadBatch::dropped)
      .def_property_readonly("failure", [](const ReadBatch& batch) -> std::optional<std::tuple<int, int64_t, int>> {
        const auto failure = batch.failure();
        if (!failure) return std::nullopt;
        return std::make_tuple(failure->file, failure->offset, failure->error);
      });
  py::class_<UringReads>(m, "UringReads")
      .def(py::init([](int depth, double limit, int64_t most) {
             require(depth >= 1 && depth <= 4096 && limit >= 0 && most >= 0, "UringReads: out of range");
             try {
               return std::make_unique<UringReads>(depth, limit, most);
             } catch (const std::system_error& error) {
               errno = error.code().value();
               PyErr_SetFromErrno(PyExc_OSError);
               throw py::error_already_set();
             }
           }),
           py::arg("depth"), py::arg("limit") = 0.0, py::arg("most") = 0)
      .def("submit",
           [](UringReads& reads, const std::vector<Piece>& pieces) { return reads.submit(read_pieces(pieces)); })
      .def("counters", &UringReads::counters)
      .def("pause", &UringReads::pause, release_gil())
      .def("resume", &UringReads::resume)
      .def("close", &UringReads::close, release_gil());
}
#else
void bind_uring(py::module_& m) { m.def("short_turns", &short_turns); }
#endif

}  // namespace sk::bind
