// One group of numbers to int8 codes and a scale, by the library's one formula: s = amax / 127 and
// q = clamp(round_half_even(x / s), -127, 127), both divisions IEEE f32. A group whose amax is below 127 * 2^-126
// counts as zero (scale 0), NaN gives scale NaN, Inf gives scale Inf; the codes are 0 in all three cases.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

template <class T>
inline float quantize_group(const T* x, int64_t n, int8_t* q) {
  // As integers, magnitudes of floats keep their order and NaN is above Inf: one maximum finds all special cases.
  uint32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(to_f32(x[i])) & 0x7fffffffu;
    top = u > top ? u : top;
  }
  const float amax = float_of(top);
  if (top >= 0x7f800000u || amax < 127.0f * 1.17549435e-38f) {
    for (int64_t i = 0; i < n; ++i) q[i] = 0;
    return top >= 0x7f800000u ? amax / 127.0f : 0.0f;
  }
  const float s = amax / 127.0f;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds |v| < 2^22 half to even into the low bits
  for (int64_t i = 0; i < n; ++i) {
    int32_t v = static_cast<int32_t>(bits_of(to_f32(x[i]) / s + magic)) - 0x4b400000;
    v = v > 127 ? 127 : v < -127 ? -127 : v;
    q[i] = static_cast<int8_t>(v);
  }
  return s;
}

}  // namespace sk
