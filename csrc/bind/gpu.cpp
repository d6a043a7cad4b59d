// Python module _C_cuda or _C_hip (and, in the tests, the emulator's): integers in, error codes out as exceptions.
// Built without any vendor header, so that it imports where there is no driver and can say so. Shapes, dtypes, strides
// and devices were checked in Python; the checks here only keep a slip on that side from becoming a wild pointer.
#include "bind/gpu.h"

PYBIND11_MODULE(SK_MODULE, m) {
  m.doc() = "GPU kernels of specdec_kernels (raw pointers; use the package, not this module)";
  m.attr("archs") = SK_ARCHS;
  // None, or why this build can't run on the current device.
  m.def("probe", []() -> pybind11::object {
    const int code = sk::gpu::probe();
    if (code == 0) return pybind11::none();
    return pybind11::str(std::string(sk::gpu::error_name(code)) + ": " + sk::gpu::error_text(code));
  });
  sk::gpu::bind::bind_quantize(m);
  sk::gpu::bind::bind_fused(m);
  sk::gpu::bind::bind_linear(m);
  sk::gpu::bind::bind_verify(m);
}
