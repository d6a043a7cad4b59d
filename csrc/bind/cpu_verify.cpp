// The verify family of the cpu module (see cpu.cpp).
#include "cpu/verify.h"

#include <pybind11/stl.h>

#include <array>
#include <type_traits>
#include <vector>

#include "bind/cpu.h"
#include "cpu/row_kernels.h"
#include "sk/numerics.h"
#include "sk/philox.h"

// A parameter arrives as a number for all requests, or as (address,) of one value per request.
template <class T>
struct pybind11::detail::type_caster<sk::PerRequest<T>> {
  PYBIND11_TYPE_CASTER(sk::PerRequest<T>, const_name("number | tuple[int]"));
  bool load(handle source, bool) {
    PyObject* const object = source.ptr();
    if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 1) {
      value.each = reinterpret_cast<const T*>(PyLong_AsSize_t(PyTuple_GET_ITEM(object, 0)));
    } else if (std::is_integral<T>::value) {
      value.all = static_cast<T>(PyLong_AsLong(object));
    } else {
      value.all = static_cast<T>(PyFloat_AsDouble(object));
    }
    if (PyErr_Occurred() == nullptr) return true;
    PyErr_Clear();
    return false;
  }
};

namespace sk::bind {
namespace {

sk::Rows rows(uintptr_t address, int dtype, int64_t columns, int64_t stride) {
  require(dtype >= 0 && dtype <= 2 && columns >= 0, "rows: dtype or number of columns out of range");
  return {pointer<const void>(address), static_cast<sk::Dtype>(dtype), columns, stride};
}

using FloatParameter = sk::PerRequest<float>;
using IntParameter = sk::PerRequest<int32_t>;

sk::Sampling sampling(FloatParameter temperature, IntParameter top_k, FloatParameter top_p, FloatParameter min_p,
                      uintptr_t seed, uintptr_t position, int64_t requests) {
  require(requests == 0 || (temperature.each == nullptr && temperature.all == 0.0f) || (seed != 0 && position != 0),
          "seed and position are needed for a random request");
  return {temperature, top_k, top_p, min_p, pointer<const int64_t>(seed), pointer<const int64_t>(position)};
}

sk::Judging judging(int rule, FloatParameter theta, float eps, float delta) {
  require(rule >= 0 && rule <= static_cast<int>(sk::Rule::kThreshold), "rule: out of range");
  return {static_cast<sk::Rule>(rule), theta, eps, delta};
}

}  // namespace

void bind_verify(py::module_& m) {
  m.def("longest_chain",
        [](uintptr_t cu_drafts, int64_t requests, uintptr_t draft_tokens, int64_t drafts, int64_t vocabulary) {
          require(requests >= 0 && drafts >= 0, "longest_chain: sizes out of range");
          return sk::longest_chain(pointer<const int32_t>(cu_drafts), requests, pointer<const int64_t>(draft_tokens),
                                   drafts, vocabulary);
        });
  m.def("verify",
        [](int threads, int64_t requests, int64_t width, uintptr_t target, int dtype, int64_t vocabulary,
           int64_t stride, uintptr_t tokens_in, uintptr_t parents, uintptr_t cu, uintptr_t drafts, int draft_dtype,
           int64_t draft_columns, int64_t draft_stride, bool drafts_are_logits, uintptr_t draft_ids,
           uintptr_t draft_kind, FloatParameter temperature, IntParameter top_k, FloatParameter top_p,
           FloatParameter min_p, uintptr_t seed, uintptr_t position, int rule, FloatParameter theta, float eps,
           float delta, uintptr_t path, uintptr_t tokens, uintptr_t num_accepted, uintptr_t logprobs, uintptr_t flags) {
          require(requests >= 0 && width >= 1 && vocabulary >= 1, "verify: sizes out of range");
          sk::VerifyCall call{requests,
                              width,
                              rows(target, dtype, vocabulary, stride),
                              pointer<const int64_t>(tokens_in),
                              pointer<const int32_t>(parents),
                              pointer<const int32_t>(cu),
                              {rows(drafts, draft_dtype, draft_columns, draft_stride), drafts_are_logits,
                               pointer<const int32_t>(draft_ids), pointer<const bool>(draft_kind)},
                              sampling(temperature, top_k, top_p, min_p, seed, position, requests),
                              judging(rule, theta, eps, delta),
                              pointer<int32_t>(path),
                              pointer<int64_t>(tokens),
                              pointer<int32_t>(num_accepted),
                              pointer<float>(logprobs),
                              pointer<int32_t>(flags)};
          const py::gil_scoped_release free_gil;
          sk::verify(call, threads);
        });
  m.def("sample",
        [](int threads, int64_t requests, uintptr_t logits, int dtype, int64_t vocabulary, int64_t stride,
           FloatParameter temperature, IntParameter top_k, FloatParameter top_p, FloatParameter min_p, uintptr_t seed,
           uintptr_t position, int stream, IntParameter index, uintptr_t tokens, uintptr_t logprobs) {
          require(requests >= 0 && vocabulary >= 1 && stream >= 0 && stream < 256, "sample: sizes out of range");
          sk::SampleCall call{requests,
                              rows(logits, dtype, vocabulary, stride),
                              sampling(temperature, top_k, top_p, min_p, seed, position, requests),
                              static_cast<uint32_t>(stream),
                              index,
                              pointer<int64_t>(tokens),
                              pointer<float>(logprobs)};
          const py::gil_scoped_release free_gil;
          sk::sample(call, threads);
        });
  // For tests of the generator itself.
  m.def("philox4x32", [](uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    const sk::Philox4 r = sk::philox4x32(key, c0, c1, c2, c3);
    return std::make_tuple(r.w[0], r.w[1], r.w[2], r.w[3]);
  });
  m.def("philox_first_words", [](uint64_t seed, uint64_t position, uint32_t c2, uint32_t first) {
    std::array<uint32_t, 16> words;
    sk::group_kernels().first_words(seed, position, c2, first, words.data());
    return std::vector<uint32_t>(words.begin(), words.end());
  });
}

}  // namespace sk::bind
