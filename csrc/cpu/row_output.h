// The last step of the fused operations. A row function leaves a row in f32, already rounded to the type T that the
// unfused operation stores; then either the row is stored as T, or the quantiser of quantize.cpp reads it. Widening T
// to f32 loses nothing, so fused equals unfused bit for bit.
#pragma once
#include "cpu/quantize.h"
#include "cpu/scratch.h"

namespace sk {

template <class T>
struct RowWriter {
  void (*store)(const float* y, int64_t n, T* out);
  QuantizeGroup<float> quantize;

  void operator()(const float* y, int64_t n, int64_t r, const RowOutput& out) const {
    if (out.values != nullptr) return store(y, n, static_cast<T*>(out.values) + r * out.values_stride);
    const QuantizeRule rule;
    const int64_t groups = out.group > 0 ? n / out.group : 1;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t column = g * out.group;
      quantize(y + column, out.group, rule, 0, out.q + r * out.q_stride + column, out.scale.at(r, g), nullptr,
               out.sums.at(r, g));
    }
  }
};

template <class T>
const T* row_of(const void* data, int64_t r, int64_t stride) {
  return data == nullptr ? nullptr : static_cast<const T*>(data) + r * stride;
}

// One row of f32 per thread, kept between calls.
inline float* row_scratch(int64_t n) {
  static thread_local Scratch scratch;
  return reinterpret_cast<float*>(scratch.get(static_cast<size_t>(n) * sizeof(float)));
}

}  // namespace sk
