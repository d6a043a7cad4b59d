// rms_norm and silu_mul, plain or followed by int8 quantisation while the row is still in the cache.
//
// Fused equals unfused bit for bit because both take the same two steps: a row function writes the row into an f32
// scratch buffer, already rounded to the type T that the unfused operation stores; then either the row is stored as T
// or the quantiser of quantize.cpp reads it. Widening T to f32 loses nothing.
// RMS norm: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. silu(x) = x / (1 + exp(-x)).
#include <vector>

#include "cpu/exp.h"
#include "cpu/float_mode.h"
#include "cpu/quantize.h"
#include "cpu/threads.h"

namespace sk {
namespace {

namespace scalar {
#define SK_F16C 0
#include "cpu/convert.inc"
#include "cpu/fused_rows.inc"
#undef SK_F16C
}  // namespace scalar

#if SK_X86
#define SK_F16C 1
namespace avx2 {
SK_TARGET_AVX2_BEGIN
#include "cpu/convert.inc"
#include "cpu/fused_rows.inc"
SK_TARGET_END
}  // namespace avx2
namespace avx512 {
SK_TARGET_AVX512_BEGIN
#include "cpu/convert.inc"
#include "cpu/fused_rows.inc"
SK_TARGET_END
}  // namespace avx512
#undef SK_F16C
#endif

template <class T>
struct RowKernels {
  decltype(&scalar::rms_norm_row<T>) rms_norm;
  decltype(&scalar::silu_mul_row<T>) silu_mul;
  decltype(&scalar::store_row<T>) store;
  QuantizeGroup<float> quantize;
};

template <class T>
RowKernels<T> row_kernels() {
  const Isa which = isa();
  const QuantizeGroup<float> quantize = quantize_group<float>(which);
#if SK_X86
  if (which == Isa::kAvx512)
    return {&avx512::rms_norm_row<T>, &avx512::silu_mul_row<T>, &avx512::store_row<T>, quantize};
  if (which == Isa::kAvx2) return {&avx2::rms_norm_row<T>, &avx2::silu_mul_row<T>, &avx2::store_row<T>, quantize};
#endif
  return {&scalar::rms_norm_row<T>, &scalar::silu_mul_row<T>, &scalar::store_row<T>, quantize};
}

// One row of f32 per thread, kept between calls.
float* scratch(int64_t n) {
  static thread_local std::vector<float> row;
  if (row.size() < static_cast<size_t>(n)) row.resize(static_cast<size_t>(n));
  return row.data();
}

template <class T>
void finish_row(const RowKernels<T>& kernels, const float* y, int64_t n, int64_t r, const RowOutput& out) {
  if (out.values != nullptr) return kernels.store(y, n, static_cast<T*>(out.values) + r * out.values_stride);
  const QuantizeRule rule;
  const int64_t groups = out.group > 0 ? n / out.group : 1;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t column = g * out.group;
    kernels.quantize(y + column, out.group, rule, 0, out.q + r * out.q_stride + column, out.scale.at(r, g), nullptr);
  }
}

template <class T>
const T* row(const void* data, int64_t r, int64_t stride) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + r * stride;
}

template <class T>
void rms_norm_rows(const RmsNormArgs& a) {
  const auto kernels = row_kernels<T>();
  parallel_for(a.threads, a.rows, grain_for(a.cols), [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    float* const y = scratch(a.cols);
    for (int64_t r = begin; r < end; ++r) {
      kernels.rms_norm(row<T>(a.x, r, a.x_stride), row<T>(a.residual, r, a.residual_stride),
                       const_cast<T*>(row<T>(a.residual_out, r, a.residual_out_stride)),
                       static_cast<const T*>(a.weight), a.cols, a.eps, y);
      finish_row(kernels, y, a.cols, r, a.out);
    }
  });
}

template <class T>
void silu_mul_rows(const SiluMulArgs& a) {
  const auto kernels = row_kernels<T>();
  parallel_for(a.threads, a.rows, grain_for(a.cols, 16384), [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    float* const y = scratch(a.cols);
    for (int64_t r = begin; r < end; ++r) {
      const T* gate = row<T>(a.gate_up, r, a.stride);
      kernels.silu_mul(gate, gate + a.cols, a.cols, y);
      finish_row(kernels, y, a.cols, r, a.out);
    }
  });
}

}  // namespace

void rms_norm(const RmsNormArgs& args) {
  switch (args.dtype) {
    case Dtype::kF32: return rms_norm_rows<float>(args);
    case Dtype::kF16: return rms_norm_rows<F16>(args);
    case Dtype::kBF16: return rms_norm_rows<BF16>(args);
  }
}

void silu_mul(const SiluMulArgs& args) {
  switch (args.dtype) {
    case Dtype::kF32: return silu_mul_rows<float>(args);
    case Dtype::kF16: return silu_mul_rows<F16>(args);
    case Dtype::kBF16: return silu_mul_rows<BF16>(args);
  }
}

}  // namespace sk
