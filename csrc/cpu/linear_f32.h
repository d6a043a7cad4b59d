// y = x * w^T in f32, every output summed in one fixed order, the same for any number of rows of x, any number of
// threads and any instruction set.
#pragma once
#include <cstdint>

namespace sk {

struct F32Rows {
  const float* data;
  int64_t rows, stride;  // stride in elements
};

// out[m, n] = x[m, :] . w[n, :], both of length k.
void linear_f32(const F32Rows& x, const F32Rows& w, int64_t k, float* out, int64_t out_stride, int threads);

}  // namespace sk
