// GELU for the CPU kernels, as straight-line code that a compiler turns into vector code in every SK_TARGET region.
//
// gelu(x) = x * Phi(x), Phi the normal distribution (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016). With
// a = |x|, tail(a) = 1 - Phi(a) = erfc(a / sqrt 2) / 2 = exp(-a^2 / 2) * R(a), where R falls slowly from 1/2 like
// 1 / (a sqrt(2 pi)), so that t * polynomial(t) with t = 1 / (1 + 0.27 a) gives it to 2.5e-8 (own minimax fit on
// 0..13.4). Phi(x) is tail(a) below 0 and 1 - tail(a) above: neither cancels, unlike 1 + erf.
//
// The exponents are computed in f64, of which the part that f32 can't hold enters as a factor 1 - rest: exp of a
// rounded -80 would be off by 4e-6. Only mul, add, div and conversions: scalar, AVX2 and AVX-512 give the same bits.
// Relative error below 5e-7; what would be below 2e-37 may be 0; NaN stays NaN, -Inf gives NaN (-Inf * 0).
#pragma once
#include "cpu/exp.h"

namespace sk {

__attribute__((always_inline)) inline float exp_minus_f64(double s) {  // exp(-s), |s| < 1000
  const float whole = static_cast<float>(s), rest = static_cast<float>(s - static_cast<double>(whole));
  return exp_f32(-whole) * (1.0f - rest);
}

__attribute__((always_inline)) inline float gelu_f32(float x) {
  const float a = x < 0.0f ? -x : x, b = a > 16.0f ? 16.0f : a;  // tail(16) is 0
  const float t = 1.0f / (1.0f + 0.27f * b);
  float p = 2.884150669e-2f;
  p = p * t - 1.258831322e-1f;
  p = p * t + 1.684905887e-1f;
  p = p * t - 6.766302139e-2f;
  p = p * t + 1.067043543e-1f;
  p = p * t + 7.255277038e-2f;
  p = p * t + 1.016743779e-1f;
  p = p * t + 1.075631753e-1f;
  p = p * t + 1.077193841e-1f;
  const float tail = exp_minus_f64(0.5 * static_cast<double>(b) * static_cast<double>(b)) * (p * t);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), 2u = sqrt(8 / pi) (x + 0.044715 x^3).
__attribute__((always_inline)) inline float gelu_tanh_f32(float x) {
  const float low = x < -16.0f ? -16.0f : x, b = low > 16.0f ? 16.0f : low;
  const double y = static_cast<double>(b);
  return x / (1.0f + exp_minus_f64(y * (1.5957691216057308 + 0.07135481627260025 * (y * y))));
}

}  // namespace sk
