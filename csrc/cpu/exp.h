// exp for the CPU kernels, as straight-line code that a compiler turns into vector code in every SK_TARGET region.
//
// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2 (Cody & Waite: ln 2 in two parts), exp(r) by a polynomial
// of degree 7 (the coefficients of Cephes expf). Only mul, add and integer operations, so scalar, AVX2 and AVX-512 give
// the same bits. Relative error below 2e-7 for x in [-87, 88]; x below -87.3 gives 0 (nothing subnormal comes out), x
// above 88.7 +inf, NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

namespace sk {

__attribute__((always_inline)) inline float exp_f32(float x) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer, half to even
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + (r + 1.0f);
  uint32_t bits, shift;
  memcpy(&bits, &p, sizeof bits);
  memcpy(&shift, &shifted, sizeof shift);
  // The low bits of `shifted` are n in two's complement. n = 128 would overflow the exponent field, hence two steps.
  // Of a NaN they are anything, so what follows wraps.
  const int32_t half = (static_cast<int32_t>(shift << 9) >> 9) >> 1;
  const int32_t rest = (static_cast<int32_t>(shift << 9) >> 9) - half;
  const uint32_t two_rest = static_cast<uint32_t>(rest + 127) << 23;
  bits += static_cast<uint32_t>(half) << 23;
  float y, scale;
  memcpy(&y, &bits, sizeof y);
  memcpy(&scale, &two_rest, sizeof scale);
  y *= scale;
  y = x < -87.3f ? 0.0f : y;
  y = x > 88.7f ? __builtin_inff() : y;
  return x == x ? y : x;
}

}  // namespace sk
