// The int8 formula, shared by host and device. A group of values is mapped to codes by a grid:
//
//   x ~ (q - zero_point) * scale,    q = clamp(round_half_even(x / scale) + zero_point, lowest, 127)
//
// The division is IEEE f32 (compile without fast-math, flush-to-zero and approximate division): multiplying by 1/scale
// instead moves values across ties, so codes would differ between backends. The zero point is added after rounding.
#pragma once
#include <cmath>
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

struct Grid {
  float scale;
  int32_t zero_point;
  int32_t lowest;  // -127 symmetric (so that -q is a code, too), -128 asymmetric
  bool blank;      // every code is 0: a zero group (scale 0), or one with NaN (scale NaN) or Inf (scale inf)
};

constexpr float kSmallestScale = 1.17549435082228750796873653722225e-38f;  // 2^-126: scales are normal numbers or 0

SK_HD Grid blank_grid(float scale, int32_t lowest) { return {scale, 0, lowest, true}; }

// `magnitude` is the largest |x| of the group, NaN if any value is NaN. As bit patterns without their sign, NaN > Inf >
// numbers, so an integer maximum gives exactly that.
SK_HD Grid symmetric_grid(float magnitude) {
  const uint32_t bits = bits_of(magnitude);
  if (bits > 0x7f800000u) return blank_grid(float_of(0x7fc00000u), -127);
  if (bits == 0x7f800000u) return blank_grid(magnitude, -127);
  const float scale = magnitude / 127.0f;
  if (magnitude < 127.0f * kSmallestScale) return blank_grid(0.0f, -127);
  return {scale, 0, -127, false};
}

// `low` <= 0 <= `high`: the group's range, widened to contain 0 so that a constant group c keeps its value and 0 its
// exact code. NaN in either if any value is NaN.
SK_HD Grid asymmetric_grid(float low, float high) {
  if (low != low || high != high) return blank_grid(float_of(0x7fc00000u), -128);
  const float infinity = float_of(0x7f800000u);
  if (high == infinity || low == -infinity) return blank_grid(infinity, -128);
  const float scale = high / 255.0f - low / 255.0f;
  if (!(scale >= kSmallestScale)) return blank_grid(0.0f, -128);
  return {scale, static_cast<int32_t>(lrintf(-128.0f - low / scale)), -128, false};
}

// One code; right for every x, scale > 0 and zero_point. A NaN gives code 0, Inf clamps.
SK_HD int8_t clamp_code(int64_t q, const Grid& grid) {
  return static_cast<int8_t>(q < grid.lowest ? grid.lowest : (q > 127 ? 127 : q));
}
SK_HD float bounded(float v) {  // beyond this no zero point brings a value back between -128 and 127
  const float bound = 1099511627776.0f;
  return v < -bound ? -bound : (v > bound ? bound : v);
}
SK_HD int8_t quantize_one(float x, const Grid& grid) {
  if (x != x) return 0;
  return clamp_code(llrintf(bounded(x / grid.scale)) + grid.zero_point, grid);
}

// Stochastic rounding: up with probability v - floor(v), so that the mean is x / scale; integers are fixed points.
// u in [0, 1) has 24 bits: in a narrower type it could round to 1 and push exact integers up.
SK_HD int8_t quantize_one(float x, const Grid& grid, float u) {
  if (x != x) return 0;
  const float v = bounded(x / grid.scale), below = floorf(v);
  return clamp_code(static_cast<int64_t>(below) + (u < v - below ? 1 : 0) + grid.zero_point, grid);
}

SK_HD float dequantize_one(int8_t q, float scale, int32_t zero_point) {
  return static_cast<float>(static_cast<int64_t>(q) - zero_point) * scale;
}

}  // namespace sk
