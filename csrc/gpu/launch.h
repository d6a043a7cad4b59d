// The GPU launchers as seen from C++: plain structs and error codes, no vendor header. Addresses are device addresses,
// strides count elements, offsets are 64 bits. A launcher returns 0 or a code that error_name() and error_text()
// explain.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk::gpu {

// One number per group of a row: row r, group g keeps it at data[r * row_stride + g * group_stride].
template <class T>
struct PerGroup {
  T* data;
  int64_t row_stride, group_stride;
  SK_HD T& at(int64_t r, int64_t g) const { return data[r * row_stride + g * group_stride]; }
};

// rows x groups groups of `width` values each.
struct Shape {
  int64_t rows, groups, width;
};

struct QuantizeInt8 {
  Shape shape;
  const void* x;
  int64_t x_stride;
  int8_t* q;
  int64_t q_stride;
  PerGroup<float> scale;         // written, or read if `fixed`
  PerGroup<int32_t> zero_point;  // null: symmetric
  bool fixed, stochastic;
  uint64_t seed, offset;  // of stochastic rounding: the key, and the index of the first value
};

struct DequantizeInt8 {
  Shape shape;
  const int8_t* q;
  int64_t q_stride;
  PerGroup<const float> scale;
  PerGroup<const int32_t> zero_point;  // null: 0
  void* out;
  int64_t out_stride;
};

// `dtype` is that of the floats; `stream` a native stream handle of `device`.
int quantize_int8(const QuantizeInt8& args, Dtype dtype, int device, void* stream);
int dequantize_int8(const DequantizeInt8& args, Dtype dtype, int device, void* stream);

int probe();  // 0 if this build can run on the current device, else why not
const char* error_name(int code);
const char* error_text(int code);

}  // namespace sk::gpu
