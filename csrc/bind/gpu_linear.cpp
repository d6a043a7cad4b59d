// Bindings of the linear family.
#include "bind/gpu.h"

namespace sk::gpu::bind {

void bind_linear(py::module_& m) {
  m.def("plan_linear", &plan_linear);
  m.def(
      "linear_int8",
      [](int type, uintptr_t x, int64_t rows, int64_t x_stride, uintptr_t x_scale, int64_t scale_row,
         int64_t scale_group, int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes, uintptr_t scale,
         uintptr_t bias, int bias_type, uintptr_t out, int out_type, int64_t out_stride, uintptr_t workspace, int unit,
         int device, uintptr_t stream) {
        require(rows >= 0 && n >= 0 && k > 0 && group > 0 && k % group == 0, "rows, n, k, group: expected a matrix");
        require(rows * n == 0 || (x && codes && scale && out), "x, weight, out: expected addresses");
        require(n < 1 << 28 && k < int64_t{1} << 31, "n, k: expected less than 2^28 channels and 2^31 values");
        require(rows == 0 || (type == static_cast<int>(LinearX::kCodes)) == (x_scale != 0),
                "x_scale: expected one with codes only");
        require(!rotated || (group <= kLongestRotation && x_scale == 0), "rotated: expected floats in short groups");
        LinearInt8 args{};
        args.rows = rows, args.x = pointer<const void>(x), args.x_stride = x_stride;
        args.x_scale = {pointer<const float>(x_scale), scale_row, scale_group};
        args.n = n, args.k = k, args.group = group, args.rotated = rotated;
        args.codes = pointer<const uint8_t>(codes), args.scale = pointer<const float>(scale);
        args.bias = pointer<const void>(bias), args.bias_type = static_cast<Dtype>(bias_type);
        args.out = pointer<void>(out), args.out_type = static_cast<Dtype>(out_type), args.out_stride = out_stride;
        args.workspace = pointer<void>(workspace);
        check(
            linear_int8(args, static_cast<LinearX>(type), static_cast<LinearUnit>(unit), device, pointer<void>(stream)),
            "linear_int8");
      },
      release_gil());
}

}  // namespace sk::gpu::bind
