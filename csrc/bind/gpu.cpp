// Python module _C_cuda or _C_hip (and, in the tests, the emulator's): integers in, error codes out as exceptions.
// Built without any vendor header, so that it imports where there is no driver and can say so. Shapes, dtypes, strides
// and devices were checked in Python; the checks here only keep a slip on that side from becoming a wild pointer.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "gpu/launch.h"

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void check(int code, const char* operation) {
  if (code != 0)
    throw std::runtime_error(std::string(operation) + ": " + sk::gpu::error_name(code) + ": " +
                             sk::gpu::error_text(code));
}

sk::gpu::Shape shape(int64_t rows, int64_t groups, int64_t width) {
  require(rows >= 0 && groups >= 0 && width >= 0, "rows, groups and width: expected no negative number");
  return {rows, groups, width};
}

void bind_quantize(py::module_& m) {
  m.def(
      "quantize_int8",
      [](int dtype, uintptr_t x, int64_t x_stride, uintptr_t q, int64_t q_stride, uintptr_t scale, int64_t scale_row,
         int64_t scale_group, uintptr_t zero_point, int64_t zero_row, int64_t zero_group, int64_t rows, int64_t groups,
         int64_t width, bool fixed, bool stochastic, uint64_t seed, uint64_t offset, int device, uintptr_t stream) {
        sk::gpu::QuantizeInt8 args{};
        args.shape = shape(rows, groups, width);
        require(rows * groups == 0 || scale, "scale: expected an address");
        require(rows * groups * width == 0 || (x && q), "x, q: expected addresses");
        args.x = pointer<const void>(x), args.x_stride = x_stride;
        args.q = pointer<int8_t>(q), args.q_stride = q_stride;
        args.scale = {pointer<float>(scale), scale_row, scale_group};
        args.zero_point = {pointer<int32_t>(zero_point), zero_row, zero_group};
        args.fixed = fixed, args.stochastic = stochastic, args.seed = seed, args.offset = offset;
        check(sk::gpu::quantize_int8(args, static_cast<sk::Dtype>(dtype), device, pointer<void>(stream)),
              "quantize_int8");
      },
      release_gil());
  m.def(
      "dequantize_int8",
      [](int dtype, uintptr_t q, int64_t q_stride, uintptr_t out, int64_t out_stride, uintptr_t scale,
         int64_t scale_row, int64_t scale_group, uintptr_t zero_point, int64_t zero_row, int64_t zero_group,
         int64_t rows, int64_t groups, int64_t width, int device, uintptr_t stream) {
        sk::gpu::DequantizeInt8 args{};
        args.shape = shape(rows, groups, width);
        require(rows * groups * width == 0 || (q && out && scale), "q, out, scale: expected addresses");
        args.q = pointer<const int8_t>(q), args.q_stride = q_stride;
        args.out = pointer<void>(out), args.out_stride = out_stride;
        args.scale = {pointer<const float>(scale), scale_row, scale_group};
        args.zero_point = {pointer<const int32_t>(zero_point), zero_row, zero_group};
        check(sk::gpu::dequantize_int8(args, static_cast<sk::Dtype>(dtype), device, pointer<void>(stream)),
              "dequantize_int8");
      },
      release_gil());
}

// (address, 0) of one number per request, or (0, the number for all).
template <class T>
sk::gpu::PerRequest<T> per_request(const std::pair<uintptr_t, double>& value) {
  return {pointer<const T>(value.first), value.second};
}

using Parameter = std::pair<uintptr_t, double>;
using Matrix = std::tuple<uintptr_t, int, int64_t, int64_t>;  // address, dtype, columns, stride

sk::gpu::Rows rows_of(const Matrix& matrix) {
  const auto [data, dtype, columns, stride] = matrix;
  require(columns >= 0, "columns: expected no negative number");
  return {pointer<const void>(data), static_cast<sk::Dtype>(dtype), columns, stride};
}

sk::gpu::Sampling sampling_of(const Parameter& temperature, const Parameter& top_k, const Parameter& top_p,
                              const Parameter& min_p, uintptr_t seed, uintptr_t position) {
  require((seed == 0) == (position == 0), "seed, position: expected both or none");
  return {per_request<float>(temperature), per_request<int32_t>(top_k),  per_request<float>(top_p),
          per_request<float>(min_p),       pointer<const int64_t>(seed), pointer<const int64_t>(position)};
}

void bind_verify(py::module_& m) {
  m.def("plan_verify", [](int64_t requests, int64_t width, int64_t vocabulary, int64_t draft_columns, int chunks,
                          int device) {
    const sk::gpu::Plan plan = sk::gpu::plan_verify(requests, width, vocabulary, draft_columns, chunks, device);
    return std::make_tuple(plan.chunks, plan.blocks, plan.workspace);
  });
  m.def("plan_verify_tree", [](int64_t requests, int64_t nodes, int64_t vocabulary, int chunks, int device) {
    const sk::gpu::Plan plan = sk::gpu::plan_verify_tree(requests, nodes, vocabulary, chunks, device);
    return std::make_tuple(plan.chunks, plan.blocks, plan.workspace);
  });
  m.def(
      "verify",
      [](bool tree, int64_t requests, int64_t width, int64_t drafts, const Matrix& target, uintptr_t draft_tokens,
         uintptr_t cu_drafts, const Matrix& draft_rows, bool drafts_are_logits, uintptr_t draft_ids,
         uintptr_t draft_kind, const Parameter& temperature, const Parameter& top_k, const Parameter& top_p,
         const Parameter& min_p, uintptr_t seed, uintptr_t position, int rule, const Parameter& theta, float eps,
         float delta, uint32_t stream_of_plain, const Parameter& index, uintptr_t tokens, uintptr_t num_accepted,
         uintptr_t logprobs, uintptr_t flags, uintptr_t parents, uintptr_t path, int chunks, int blocks, uintptr_t workspace, int device,
         uintptr_t stream) {
        require(requests >= 0 && width >= 1 && drafts >= 0, "requests, width, drafts: expected no negative number");
        sk::gpu::Verify args{};
        args.requests = requests, args.width = width, args.drafts = drafts;
        args.target = rows_of(target), args.draft_rows = rows_of(draft_rows);
        args.draft_tokens = pointer<const int64_t>(draft_tokens), args.cu_drafts = pointer<const int32_t>(cu_drafts);
        args.drafts_are_logits = drafts_are_logits;
        args.draft_ids = pointer<const int32_t>(draft_ids), args.draft_kind = pointer<const bool>(draft_kind);
        args.sampling = sampling_of(temperature, top_k, top_p, min_p, seed, position);
        args.rule = static_cast<sk::gpu::Rule>(rule), args.theta = per_request<float>(theta);
        args.eps = eps, args.delta = delta;
        args.plain = static_cast<sk::Stream>(stream_of_plain), args.plain_index = per_request<int32_t>(index);
        args.tokens = pointer<int64_t>(tokens), args.num_accepted = pointer<int32_t>(num_accepted);
        args.logprobs = pointer<float>(logprobs), args.flags = pointer<int32_t>(flags);
        args.parents = pointer<const int32_t>(parents), args.path = pointer<int32_t>(path);
        args.plan = {chunks, blocks, 0}, args.workspace = pointer<void>(workspace);
        require(requests == 0 || (args.target.data && tokens && workspace && blocks > 0 && chunks >= 0),
                "target, tokens, workspace: expected addresses");
        if (tree)
          check(sk::gpu::verify_tree(args, device, pointer<void>(stream)), "verify_tree");
        else
          check(sk::gpu::verify(args, device, pointer<void>(stream)), "verify");
      },
      release_gil());
}

}  // namespace

PYBIND11_MODULE(SK_MODULE, m) {
  m.doc() = "GPU kernels of specdec_kernels (raw pointers; use the package, not this module)";
  m.attr("archs") = SK_ARCHS;
  // None, or why this build can't run on the current device.
  m.def("probe", []() -> py::object {
    const int code = sk::gpu::probe();
    if (code == 0) return py::none();
    return py::str(std::string(sk::gpu::error_name(code)) + ": " + sk::gpu::error_text(code));
  });
  bind_quantize(m);
  bind_verify(m);
}
