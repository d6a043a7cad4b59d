// dequantize_int8: x = (q - zero_point) * scale in f32, rounded once to the output's type.
#include "cpu/float_mode.h"
#include "cpu/quantize.h"
#include "cpu/threads.h"

namespace sk {
namespace {

#define SK_BODY "cpu/dequantize_group.inc"
#include "cpu/each_isa.inc"

template <class T>
auto dequantize_group_for(Isa which) {
#if SK_X86
  if (which == Isa::kAvx512) return &avx512::dequantize_group<T>;
  if (which == Isa::kAvx2) return &avx2::dequantize_group<T>;
#endif
  (void)which;
  return &scalar::dequantize_group<T>;
}

template <class T>
void dequantize_rows(const DequantizeArgs& a) {
  const auto dequantize = dequantize_group_for<T>(isa());
  if (a.cols == 0) return;
  const int64_t groups = a.cols / a.group;
  parallel_for(a.threads, a.rows * groups, grain_for(a.group), [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    int64_t r = begin / groups, g = begin % groups;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t column = g * a.group;
      const int32_t* zero_point = a.zero_point.at(r, g);
      dequantize(a.q + r * a.q_stride + column, a.group, *a.scale.at(r, g), zero_point == nullptr ? 0 : *zero_point,
                 static_cast<T*>(a.out) + r * a.out_stride + column);
      if (++g == groups) g = 0, ++r;
    }
  });
}

}  // namespace

void dequantize_int8(const DequantizeArgs& args) {
  switch (args.dtype) {
    case Dtype::kF32: return dequantize_rows<float>(args);
    case Dtype::kF16: return dequantize_rows<F16>(args);
    case Dtype::kBF16: return dequantize_rows<BF16>(args);
  }
}

}  // namespace sk
