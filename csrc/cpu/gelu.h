// GELU for the CPU kernels, as straight-line code that a compiler turns into vector code in every SK_TARGET region.
//
// gelu(x) = x * Phi(x), Phi the normal distribution (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016). With
// a = |x|, tail(a) = 1 - Phi(a) = erfc(a / sqrt 2) / 2 = exp(-a^2 / 2) * R(a), where R falls slowly from 1/2 like
// 1 / (a sqrt(2 pi)), so that t * polynomial(t) with t = 1 / (1 + 0.27 a) gives it to 2.5e-8 (own minimax fit on
// 0..13.4). Phi(x) is tail(a) below 0 and 1 - tail(a) above: neither cancels, unlike 1 + erf.
//
// exp of a rounded -80 would be off by 4e-6, so what an exponent loses when it is rounded to f32 comes back as a factor
// 1 - rest. Only mul, add, div and conversions: scalar, AVX2 and AVX-512 give the same bits. Relative error below 5e-7;
// what would be below 2e-37 may be 0; NaN stays NaN, -Inf gives NaN (-Inf * 0).
#pragma once
#include "cpu/exp.h"

namespace sk {

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
  // b^2 = square + rest, exactly (Dekker's product).
  const float wide = 4097.0f * b, high = wide - (wide - b), low = b - high, square = b * b;
  const float rest = ((high * high - square) + 2.0f * high * low) + low * low;
  const float tail = exp_f32(-0.5f * square) * (1.0f - 0.5f * rest) * (p * t);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u)), 2u = sqrt(8 / pi) (x + 0.044715 x^3).
__attribute__((always_inline)) inline float gelu_tanh_f32(float x) {
  const float low = x < -16.0f ? -16.0f : x, b = low > 16.0f ? 16.0f : low;
  const double y = static_cast<double>(b), twice = y * (1.5957691216057308 + 0.07135481627260025 * (y * y));
  const float whole = static_cast<float>(twice), rest = static_cast<float>(twice - static_cast<double>(whole));
  return x / (1.0f + exp_f32(-whole) * (1.0f - rest));
}

}  // namespace sk
