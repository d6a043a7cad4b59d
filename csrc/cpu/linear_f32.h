// y = x * w^T + bias in f32, w in f32 or bf16 (which widens exactly): every output summed in one fixed order, the same
// for any number of rows of x, any number of threads and any instruction set.
#pragma once
#include <cstdint>

#include "cpu/bias.h"

namespace sk {

struct F32Rows {
  const float* data;
  int64_t rows, stride;  // stride in elements
};

struct FloatMatrix {
  const void* data;
  Dtype type;  // kF32 or kBF16
  int64_t n, k, stride;
};

// out[m, n] = x[m, :] . w[n, :] + bias[n]; x has w.k columns.
void linear_f32(const F32Rows& x, const FloatMatrix& w, const Bias& bias, float* out, int64_t out_stride, int threads);

}  // namespace sk
