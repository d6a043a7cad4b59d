// RMS norm and layer norm, plain or followed by int8 quantisation while the row is still in the cache (row_output.h).
//
// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Ba, Kiros and Hinton, "Layer Normalization", 2016.
#include "cpu/float_mode.h"
#include "cpu/row_output.h"
#include "cpu/threads.h"

namespace sk {
namespace {

#define SK_BODY "cpu/norm_rows.inc"
#include "cpu/each_isa.inc"

template <class T>
struct Kernels {
  decltype(&scalar::rms_norm_row<T>) rms_norm;
  decltype(&scalar::layer_norm_row<T>) layer_norm;
  RowWriter<T> write;
};

template <class T>
Kernels<T> kernels() {
  const Isa which = isa();
  const QuantizeGroup<float> quantize = quantize_group<float>(which);
#if SK_X86
  if (which == Isa::kAvx512)
    return {&avx512::rms_norm_row<T>, &avx512::layer_norm_row<T>, {&avx512::store_row<T>, quantize}};
  if (which == Isa::kAvx2) return {&avx2::rms_norm_row<T>, &avx2::layer_norm_row<T>, {&avx2::store_row<T>, quantize}};
#endif
  return {&scalar::rms_norm_row<T>, &scalar::layer_norm_row<T>, {&scalar::store_row<T>, quantize}};
}

template <class T>
void norm_rows(const NormArgs& a) {
  const Kernels<T> kernel = kernels<T>();
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  parallel_for(a.threads, a.rows, grain_for(a.cols), [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    float* const y = row_scratch(a.cols);
    for (int64_t r = begin; r < end; ++r) {
      const T *x = row_of<T>(a.x, r, a.x_stride), *residual = row_of<T>(a.residual, r, a.residual_stride);
      T* const sum = const_cast<T*>(row_of<T>(a.residual_out, r, a.residual_out_stride));
      if (a.layer)
        kernel.layer_norm(x, residual, sum, weight, bias, a.cols, a.eps, y);
      else
        kernel.rms_norm(x, residual, sum, weight, a.cols, a.eps, y);
      kernel.write(y, a.cols, r, a.out);
    }
  });
}

}  // namespace

void normalize(const NormArgs& args) {
  switch (args.dtype) {
    case Dtype::kF32: return norm_rows<float>(args);
    case Dtype::kF16: return norm_rows<F16>(args);
    case Dtype::kBF16: return norm_rows<BF16>(args);
  }
}

}  // namespace sk
