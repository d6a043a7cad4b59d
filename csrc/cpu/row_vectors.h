// Vectors of floats for the loops over rows: one namespace per instruction set with the same names, to be filled by
// row_kernels.cpp. Floats is a vector of GCC's own; here is what it has no operators for.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "sk/numerics.h"

namespace sk {
namespace {

namespace scalar {
constexpr int kBytes = 16;
typedef float Floats __attribute__((vector_size(kBytes)));
inline Floats fused(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float largest(Floats x) {
  float best = x[0];
  for (int j = 1; j < 4; ++j) best = x[j] > best ? x[j] : best;
  return best;
}
inline float sum(Floats x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline Floats fold16(const Floats* s) { return (s[0] + s[2]) + (s[1] + s[3]); }
typedef int32_t Mask __attribute__((vector_size(kBytes)));
typedef uint64_t Longs __attribute__((vector_size(kBytes)));
inline Longs product(Longs a, uint32_t b) { return a * b; }  // a < 2^32
inline Mask unordered(Floats a, Floats b) { return (a != a) | (b != b); }
inline Mask equal(Floats a, Floats b) { return a == b; }
inline Mask within(Floats x, Floats low, Floats high) { return (x >= low) & (x <= high); }
inline Floats where_from(Floats x, Floats low, Floats value) { return x >= low ? value : Floats{}; }
inline unsigned bits(Mask m) {
  unsigned set = 0;
  for (int j = 0; j < 4; ++j) set |= static_cast<unsigned>(m[j] & 1) << j;
  return set;
}
inline unsigned below8(const double* x, double bound) {
  unsigned bits = 0;
  for (int j = 0; j < 8; ++j) bits |= static_cast<unsigned>(x[j] < bound) << j;
  return bits;
}
// The entries of a mask, one after the other; writes a whole vector or less. Returns how many.
inline int pack(Floats x, Mask m, float* out) {
  int n = 0;
  for (unsigned left = bits(m); left != 0; left &= left - 1) out[n++] = x[__builtin_ctz(left)];
  return n;
}
inline bool any(Mask m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
inline Floats load(const float* x) {
  Floats v;
  memcpy(&v, x, sizeof v);
  return v;
}
template <class T>
inline Floats load(const T* x) {
  return Floats{to_f32(x[0]), to_f32(x[1]), to_f32(x[2]), to_f32(x[3])};
}
}  // namespace scalar

#if SK_X86
SK_TARGET_AVX2_BEGIN
namespace avx2 {
constexpr int kBytes = 32;
typedef float Floats __attribute__((vector_size(kBytes)));
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline float largest(Floats x) {
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
}
inline float sum(Floats x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline Floats fold16(const Floats* s) { return s[0] + s[1]; }
typedef int32_t Mask __attribute__((vector_size(kBytes)));
typedef uint64_t Longs __attribute__((vector_size(kBytes)));
inline Longs product(Longs a, uint32_t b) {
  return reinterpret_cast<Longs>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(b)));
}
inline Mask unordered(Floats a, Floats b) { return reinterpret_cast<Mask>(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
inline Mask equal(Floats a, Floats b) { return reinterpret_cast<Mask>(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline Mask within(Floats x, Floats low, Floats high) {
  return reinterpret_cast<Mask>(_mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GE_OQ), _mm256_cmp_ps(x, high, _CMP_LE_OQ)));
}
inline Floats where_from(Floats x, Floats low, Floats value) {
  return _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_GE_OQ), value);
}
inline unsigned bits(Mask m) { return static_cast<unsigned>(_mm256_movemask_ps(reinterpret_cast<__m256>(m))); }
inline unsigned below8(const double* x, double bound) {
  const __m256d limit = _mm256_set1_pd(bound);
  const int low = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x), limit, _CMP_LT_OQ));
  const int high = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x + 4), limit, _CMP_LT_OQ));
  return static_cast<unsigned>(low | high << 4);
}
inline int pack(Floats x, Mask m, float* out) {
  float each[8];
  _mm256_storeu_ps(each, x);
  int n = 0;
  for (unsigned left = bits(m); left != 0; left &= left - 1) out[n++] = each[__builtin_ctz(left)];
  return n;
}
inline bool any(Mask m) { return _mm256_movemask_ps(reinterpret_cast<__m256>(m)) != 0; }
inline Floats load(const float* x) { return _mm256_loadu_ps(x); }
inline Floats load(const F16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline Floats load(const BF16* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
}  // namespace avx2
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
namespace avx512 {
constexpr int kBytes = 64;
typedef float Floats __attribute__((vector_size(kBytes)));
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats above_floor(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Floats scaled(Floats x, Floats by) { return _mm512_scalef_ps(x, by); }  // x * 2^floor(by)
inline __m256 upper(Floats x) { return _mm512_extractf32x8_ps(x, 1); }
inline float largest(Floats x) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), upper(x));
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
}
inline float sum(Floats x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), upper(x));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline Floats fold16(const Floats* s) { return *s; }
typedef __mmask16 Mask;
typedef uint64_t Longs __attribute__((vector_size(kBytes)));
inline Longs product(Longs a, uint32_t b) {
  return reinterpret_cast<Longs>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), _mm512_set1_epi64(b)));
}
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask within(Floats x, Floats low, Floats high) {
  return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), x, high, _CMP_LE_OQ);
}
inline Floats where_from(Floats x, Floats low, Floats value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), value);
}
inline unsigned bits(Mask m) { return m; }
inline unsigned below8(const double* x, double bound) {
  return _mm512_cmp_pd_mask(_mm512_loadu_pd(x), _mm512_set1_pd(bound), _CMP_LT_OQ);
}
inline int pack(Floats x, Mask m, float* out) {
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(m, x));
  return __builtin_popcount(m);
}
inline bool any(Mask m) { return m != 0; }
inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
inline Floats load(const F16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline Floats load(const BF16* x) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
}  // namespace avx512
SK_TARGET_END
#endif

}  // namespace
}  // namespace sk
