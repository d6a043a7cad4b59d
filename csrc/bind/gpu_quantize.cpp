// Bindings of the quantise family.
#include "bind/gpu.h"

namespace sk::gpu::bind {
namespace {

Shape shape(int64_t rows, int64_t groups, int64_t width) {
  require(rows >= 0 && groups >= 0 && width >= 0, "rows, groups and width: expected no negative number");
  return {rows, groups, width};
}

}  // namespace

void bind_quantize(py::module_& m) {
  m.def(
      "quantize_int8",
      [](int dtype, uintptr_t x, int64_t x_stride, uintptr_t q, int64_t q_stride, uintptr_t scale, int64_t scale_row,
         int64_t scale_group, uintptr_t zero_point, int64_t zero_row, int64_t zero_group, uintptr_t sums,
         int64_t sums_row, int64_t sums_group, int64_t rows, int64_t groups, int64_t width, bool fixed, bool stochastic,
         uint64_t seed, uint64_t offset, int device, uintptr_t stream) {
        QuantizeInt8 args{};
        args.shape = shape(rows, groups, width);
        require(rows * groups == 0 || scale, "scale: expected an address");
        require(rows * groups * width == 0 || (x && q), "x, q: expected addresses");
        args.x = pointer<const void>(x), args.x_stride = x_stride;
        args.out = {pointer<int8_t>(q),
                    q_stride,
                    {pointer<float>(scale), scale_row, scale_group},
                    {pointer<int32_t>(sums), sums_row, sums_group}};
        args.zero_point = {pointer<int32_t>(zero_point), zero_row, zero_group};
        args.fixed = fixed, args.stochastic = stochastic, args.seed = seed, args.offset = offset;
        check(quantize_int8(args, static_cast<Dtype>(dtype), device, pointer<void>(stream)), "quantize_int8");
      },
      release_gil());
  m.def(
      "dequantize_int8",
      [](int dtype, uintptr_t q, int64_t q_stride, uintptr_t out, int64_t out_stride, uintptr_t scale,
         int64_t scale_row, int64_t scale_group, uintptr_t zero_point, int64_t zero_row, int64_t zero_group,
         int64_t rows, int64_t groups, int64_t width, int device, uintptr_t stream) {
        DequantizeInt8 args{};
        args.shape = shape(rows, groups, width);
        require(rows * groups * width == 0 || (q && out && scale), "q, out, scale: expected addresses");
        args.q = pointer<const int8_t>(q), args.q_stride = q_stride;
        args.out = pointer<void>(out), args.out_stride = out_stride;
        args.scale = {pointer<const float>(scale), scale_row, scale_group};
        args.zero_point = {pointer<const int32_t>(zero_point), zero_row, zero_group};
        check(dequantize_int8(args, static_cast<Dtype>(dtype), device, pointer<void>(stream)), "dequantize_int8");
      },
      release_gil());
}

}  // namespace sk::gpu::bind
