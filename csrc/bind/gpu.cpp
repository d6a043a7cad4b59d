// Python module _C_cuda or _C_hip (and, in the tests, the emulator's): integers in, error codes out as exceptions.
// Built without any vendor header, so that it imports where there is no driver and can say so. Shapes, dtypes, strides
// and devices were checked in Python; the checks here only keep a slip on that side from becoming a wild pointer.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

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
}
