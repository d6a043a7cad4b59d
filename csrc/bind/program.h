// Calls that are kept to be made again (specdec_kernels/recording.py).
//
// A decoder pass makes the same hundred calls each time, on the same buffers. Once their arguments have come through
// Python they can be kept here, as plain numbers, and made again without it.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/threads.h"

namespace sk::bind {

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

class Program {
 public:
  void keep(const char* name, std::function<void()> call) { calls_.push_back({name, std::move(call)}); }
  size_t size() const { return calls_.size(); }
  void run(int threads) const {
    together(threads, [&] {
      for (const Call& call : calls_) call.make();
    });
  }
  // Runs, too, and says how many seconds each call took, for benchmarks.
  std::vector<std::pair<std::string, double>> time(int threads) const {
    std::vector<std::pair<std::string, double>> seconds;
    together(threads, [&] {
      for (const Call& call : calls_) {
        const auto start = std::chrono::steady_clock::now();
        call.make();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        seconds.emplace_back(call.name, took.count());
      }
    });
    return seconds;
  }

 private:
  struct Call {
    const char* name;
    std::function<void()> make;
  };
  std::vector<Call> calls_;
};

// A module whose kernels, the functions bound with release_gil that return nothing, can be called in two ways: with
// their arguments, or with a Program in front of them, which keeps the call and does not make it.
class Kernels : public py::module_ {
 public:
  explicit Kernels(const py::module_& m) : py::module_(m) {}
  using py::module_::def;

  template <class F>
  void def(const char* name, F function, const release_gil& guard) {
    def_both(name, +function, guard);
  }

 private:
  template <class R, class... A>
  void def_both(const char* name, R (*function)(A...), const release_gil& guard) {
    py::module_::def(name, function, guard);
    if constexpr (std::is_void_v<R>)
      py::module_::def(name,
                       [=](Program& program, A... arguments) { program.keep(name, [=] { function(arguments...); }); });
  }
};

inline void bind_program(py::module_& m) {
  py::class_<Program>(m, "Program")
      .def(py::init<>())
      .def("__len__", &Program::size)
      .def("run", &Program::run, release_gil())
      .def("time", &Program::time, release_gil());
}

}  // namespace sk::bind
