// int8 quantisation on the CPU: arguments of the operations, and the group kernels that other families may build on.
// Strides are in elements; a last dimension is contiguous everywhere. Nothing here checks its arguments.
#pragma once
#include <cstdint>

#include "cpu/isa.h"
#include "sk/numerics.h"
#include "sk/quantize.h"

namespace sk {

// How groups get their grid and their rounding.
struct QuantizeRule {
  bool symmetric = true;
  bool fixed = false;       // scale (and zero point) are inputs
  bool stochastic = false;  // round by u = Philox(seed, element index)
  uint64_t seed = 0;
};

// Quantises n values (one group): reads or writes *scale and *zero_point (null when symmetric), writes n codes and, if
// asked for, their sum. `index` is the number of the group's first element, for stochastic rounding.
template <class T>
struct QuantizeGroup {
  void (*kernel)(const T* x, int64_t n, const QuantizeRule& rule, uint64_t index, int8_t* q, float* scale,
                 int32_t* zero_point, int32_t* sum);
  void operator()(const T* x, int64_t n, const QuantizeRule& rule, uint64_t index, int8_t* q, float* scale,
                  int32_t* zero_point, int32_t* sum = nullptr) const {
    kernel(x, n, rule, index, q, scale, zero_point, sum);
  }
};

template <class T>
QuantizeGroup<T> quantize_group(Isa isa);  // the kernel for that instruction set; T = float, F16, BF16

// One number per group: where row r, group g keeps it.
template <class T>
struct PerGroup {
  T* data;
  int64_t row_stride, group_stride;
  T* at(int64_t r, int64_t g) const { return data == nullptr ? nullptr : data + r * row_stride + g * group_stride; }
};

struct QuantizeArgs {
  Dtype dtype;
  const void* x;
  int64_t rows, cols, group, x_stride;
  int8_t* q;
  int64_t q_stride;
  PerGroup<float> scale;
  PerGroup<int32_t> zero_point, sums;  // sums may be null
  QuantizeRule rule;
  uint64_t offset;  // index of the first element
  int threads;
};
void quantize_int8(const QuantizeArgs& args);

struct DequantizeArgs {
  Dtype dtype;  // of out
  const int8_t* q;
  int64_t rows, cols, group, q_stride;
  PerGroup<const float> scale;
  PerGroup<const int32_t> zero_point;
  void* out;
  int64_t out_stride;
  int threads;
};
void dequantize_int8(const DequantizeArgs& args);

// Where a fused operation puts its rows: `values` in the input's dtype, or codes, scales and sums (values == null).
struct RowOutput {
  void* values;
  int64_t values_stride;
  int8_t* q;
  int64_t q_stride, group;
  PerGroup<float> scale;
  PerGroup<int32_t> sums;  // may be null
};

struct NormArgs {
  Dtype dtype;
  bool layer;                                // layer norm; otherwise RMS norm, which has no bias
  const void *x, *weight, *bias, *residual;  // bias and residual may be null
  void* residual_out;                        // may be residual or x itself
  int64_t rows, cols, x_stride, residual_stride, residual_out_stride;
  double eps;
  RowOutput out;
  int threads;
};
void normalize(const NormArgs& args);

enum class Gate : int { kSilu, kGelu, kGeluTanh, kCount };

struct GateArgs {
  Dtype dtype;
  Gate gate;
  const void* gate_up;  // rows of 2 * cols values
  int64_t rows, cols, stride;
  RowOutput out;
  int threads;
};
void gate_mul(const GateArgs& args);

// Pieces of at least ~10 us of work, so that handing them out is worth it.
inline int64_t grain_for(int64_t values_per_item, int64_t values_per_piece = 32768) {
  return values_per_piece / (values_per_item + 64) + 1;
}

}  // namespace sk
