#include "cpu/row_kernels.h"

#include <cmath>
#include <cstring>

#include "cpu/exp64.h"
#include "cpu/fetch.h"
#include "cpu/isa.h"
#include "sk/accept.h"

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
inline float sum16(const Floats* s) {
  const Floats x = (s[0] + s[2]) + (s[1] + s[3]);
  return (x[0] + x[2]) + (x[1] + x[3]);
}
typedef int32_t Mask __attribute__((vector_size(kBytes)));
inline Mask unordered(Floats a, Floats b) { return (a != a) | (b != b); }
inline bool any(Mask m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
inline void convert_f16(const F16* x, float* out) {
  for (int j = 0; j < 4; ++j) out[j] = to_f32(x[j]);
}
#include "cpu/row_kernels.inl"
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
inline float sum8(Floats x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
inline float sum16(const Floats* s) { return sum8(s[0] + s[1]); }
typedef int32_t Mask __attribute__((vector_size(kBytes)));
inline Mask unordered(Floats a, Floats b) { return reinterpret_cast<Mask>(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)); }
inline bool any(Mask m) { return _mm256_movemask_ps(reinterpret_cast<__m256>(m)) != 0; }
inline void convert_f16(const F16* x, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
#include "cpu/row_kernels.inl"
}  // namespace avx2
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
namespace avx512 {
constexpr int kBytes = 64;
typedef float Floats __attribute__((vector_size(kBytes)));
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline __m256 upper(Floats x) { return _mm512_extractf32x8_ps(x, 1); }
inline float largest(Floats x) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x), upper(x));
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  best = _mm_max_ps(best, _mm_movehl_ps(best, best));
  return _mm_cvtss_f32(_mm_max_ss(best, _mm_movehdup_ps(best)));
}
inline float sum16(const Floats* s) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(*s), upper(*s));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
typedef __mmask16 Mask;
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline bool any(Mask m) { return m != 0; }
inline void convert_f16(const F16* x, float* out) {
  for (int j = 0; j < 16; j += 8)
    _mm256_storeu_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + j))));
}
#include "cpu/row_kernels.inl"
}  // namespace avx512
SK_TARGET_END
#endif

#define SK_ROW_KERNELS(space, T) {space::max_blocks<T>, space::load64<T>, space::masses<T>, space::all_probabilities<T>}
#define SK_ROW_SET(space) {SK_ROW_KERNELS(space, float), SK_ROW_KERNELS(space, F16), SK_ROW_KERNELS(space, BF16)}
#define SK_GROUP_SET(space) {space::exp64, space::bounds, space::tally, space::count_from, space::first_words}

#if SK_X86
constexpr RowKernels kRow[3][3] = {SK_ROW_SET(scalar), SK_ROW_SET(avx2), SK_ROW_SET(avx512)};
constexpr GroupKernels kGroups[3] = {SK_GROUP_SET(scalar), SK_GROUP_SET(avx2), SK_GROUP_SET(avx512)};
#else
constexpr RowKernels kRow[1][3] = {SK_ROW_SET(scalar)};
constexpr GroupKernels kGroups[1] = {SK_GROUP_SET(scalar)};
#endif

}  // namespace

const RowKernels& row_kernels(Dtype dtype) { return kRow[static_cast<int>(isa())][static_cast<int>(dtype)]; }
const GroupKernels& group_kernels() { return kGroups[static_cast<int>(isa())]; }

double exp_one(double x) {
  exp_in_place<double, uint64_t>(x);
  return x;
}

}  // namespace sk
