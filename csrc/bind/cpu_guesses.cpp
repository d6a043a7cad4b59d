// Chains of guesses of the cpu module (see cpu.cpp and cpu/guesses.h).
#include "cpu/guesses.h"

#include <pybind11/stl.h>

#include <memory>

#include "bind/cpu.h"
#include "bind/program.h"

namespace sk::bind {

void bind_guesses(py::module_& m) {
  using Shared = std::shared_ptr<sk::Guesses>;
  py::class_<sk::Guesses, Shared>(m, "Guesses")
      .def(py::init([](uintptr_t logits, int64_t columns, uintptr_t map, uintptr_t id, uintptr_t position,
                       uintptr_t slot, uintptr_t length, uintptr_t table, int64_t width, int64_t page,
                       uintptr_t rotary, uintptr_t turned, int64_t context, int64_t turns, uintptr_t state,
                       uintptr_t feature, int64_t hidden) {
        require(columns >= 1 && width >= 1 && page >= 1 && context >= 1 && turns >= 0 && hidden >= 0,
                "guesses: sizes out of range");
        return std::make_shared<sk::Guesses>(sk::GuessBuffers{
            pointer<const float>(logits), columns, pointer<const int32_t>(map), pointer<int64_t>(id),
            pointer<int64_t>(position), pointer<int64_t>(slot), pointer<int32_t>(length),
            pointer<const int32_t>(table), width, page, pointer<const float>(rotary), pointer<float>(turned), context,
            turns, pointer<const float>(state), pointer<float>(feature), hidden});
      }))
      .def("begin",
           [](sk::Guesses& self, int64_t last, int64_t capacity, uintptr_t features, float temperature, int32_t top_k,
              float top_p, float min_p, uint64_t seed, uint64_t position, uintptr_t rows) {
             require(last >= 0 && (temperature == 0.0f || rows != 0), "guesses: no place for the rows");
             self.begin(last, capacity, pointer<sk::BF16>(features), {temperature, top_k, top_p, min_p},
                        {seed, position, sk::Stream::kDraft, 0}, pointer<float>(rows));
           })
      // Each at once, or kept in a program.
      .def("pick", &sk::Guesses::pick, release_gil())
      .def("pick", [](const Shared& self, int threads, Program& program) {
        program.keep("pick", [self, threads] { self->pick(threads); });
      })
      .def("feed", &sk::Guesses::feed)
      .def("feed", [](const Shared& self, Program& program) { program.keep("feed", [self] { self->feed(); }); })
      .def("keep", &sk::Guesses::keep)
      .def("keep", [](const Shared& self, Program& program) { program.keep("keep", [self] { self->keep(); }); })
      .def_readonly("column", &sk::Guesses::column)
      .def_readonly("probability", &sk::Guesses::probability);
}

}  // namespace sk::bind
