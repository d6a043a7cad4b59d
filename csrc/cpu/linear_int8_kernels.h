// The inner loops of linear_int8 for one instruction set; linear_int8.cpp holds everything else.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

namespace sk {

constexpr int kMaxDotRows = 8;

struct Int8Kernels {
  // Rows of x that one dot() call may take.
  int rows;
  // Activations are prepared as 4 words of `word_bytes` bytes per step of k: int8 in order, or (AVX2) int16 in the order
  // k0 k2 k1 k3, which is how the panel's even and odd bytes meet them.
  int word_bytes;
  // acc[r][lane] += sum over steps of (w + 128) * x, r < rows, modulo 2^32. `x` rows are `stride` bytes apart.
  // dot[r - 1] takes r rows. `ahead` is how far in front of w to prefetch, in bytes; the call fetches as many lines as
  // it reads, divided by `share`.
  void (*dot[kMaxDotRows])(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int share,
                             int turn);
  // y[r][lane] += f32(acc + offset[r]) * (sx[r] * sw[lane]); offset and sx advance by their strides.
  void (*fold)(int rows, const int32_t* acc, const int32_t* offset, int64_t offset_stride, const float* sx, int64_t sx_stride,
               const float* sw, float* y);
};

const Int8Kernels& int8_kernels(Isa which);

}  // namespace sk
