// Number formats shared by host and device code: f16 and bf16 as raw bits, to and from f32.
// Conversions follow IEEE round-half-to-even, so a value stored here equals torch's own cast bit for bit
// (NaN stays NaN). Nothing in this file depends on fast-math, and nothing may be compiled with it.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define SK_HD __host__ __device__ inline
#else
#define SK_HD inline
#endif

namespace sk {

// The dtype codes that cross the Python boundary (specdec_kernels/native.py holds the same table).
enum class Dtype : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

SK_HD uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}
SK_HD float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

SK_HD float to_f32(float x) { return x; }
SK_HD float to_f32(BF16 h) { return float_of(static_cast<uint32_t>(h.bits) << 16); }
SK_HD float to_f32(F16 h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
  return x;
#elif defined(__HIP_DEVICE_COMPILE__)
  _Float16 x;
  memcpy(&x, &h.bits, sizeof x);
  return static_cast<float>(x);
#else
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t exp = (h.bits >> 10) & 0x1fu, frac = h.bits & 0x3ffu;
  if (exp == 0x1f) return float_of(sign | 0x7f800000u | (frac << 13));  // Inf, NaN
  if (exp != 0) return float_of(sign | ((exp + 112) << 23) | (frac << 13));
  const float tiny = static_cast<float>(frac) * 5.9604644775390625e-08f;  // subnormal: frac * 2^-24, exact
  return float_of(sign | bits_of(tiny));
#endif
}

template <class T>
SK_HD T from_f32(float x);
template <>
SK_HD float from_f32<float>(float x) {
  return x;
}
template <>
SK_HD BF16 from_f32<BF16>(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(0x7fc0u)};  // torch's bf16 NaN
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <>
SK_HD F16 from_f32<F16>(float x) {
#if defined(__CUDA_ARCH__)
  F16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
  return h;
#elif defined(__HIP_DEVICE_COMPILE__)
  const _Float16 y = static_cast<_Float16>(x);
  F16 h;
  memcpy(&h, &y, sizeof h);
  return h;
#else
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (mag >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65536 or more
  if (mag < 0x38800000u) {  // subnormal f16 or zero: let an f32 addition do the rounding
    const float y = float_of(mag) + 0.5f;
    return {static_cast<uint16_t>(sign | (bits_of(y) - 0x3f000000u))};
  }
  return {static_cast<uint16_t>(sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13))};
#endif
}

}  // namespace sk
