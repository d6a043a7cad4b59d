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
inline Mask equal(Floats a, Floats b) { return a == b; }
inline unsigned below8(const double* x, double bound) {
  unsigned bits = 0;
  for (int j = 0; j < 8; ++j) bits |= static_cast<unsigned>(x[j] < bound) << j;
  return bits;
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
inline Mask equal(Floats a, Floats b) { return reinterpret_cast<Mask>(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline unsigned below8(const double* x, double bound) {
  const __m256d limit = _mm256_set1_pd(bound);
  const int low = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x), limit, _CMP_LT_OQ));
  const int high = _mm256_movemask_pd(_mm256_cmp_pd(_mm256_loadu_pd(x + 4), limit, _CMP_LT_OQ));
  return static_cast<unsigned>(low | high << 4);
}
inline bool any(Mask m) { return _mm256_movemask_ps(reinterpret_cast<__m256>(m)) != 0; }
inline Floats load(const float* x) { return _mm256_loadu_ps(x); }
inline Floats load(const F16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline Floats load(const BF16* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
#include "cpu/row_kernels.inl"
}  // namespace avx2
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
namespace avx512 {
#define SK_ROW_SCALE 1
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
inline float sum16(const Floats* s) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(*s), upper(*s));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
typedef __mmask16 Mask;
inline Mask unordered(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline unsigned below8(const double* x, double bound) {
  return _mm512_cmp_pd_mask(_mm512_loadu_pd(x), _mm512_set1_pd(bound), _CMP_LT_OQ);
}
inline bool any(Mask m) { return m != 0; }
inline Floats load(const float* x) { return _mm512_loadu_ps(x); }
inline Floats load(const F16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
inline Floats load(const BF16* x) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#include "cpu/row_kernels.inl"
}  // namespace avx512
SK_TARGET_END
#endif

#define SK_ROW_KERNELS(space, T, max) \
  {space::max, space::load64<T>, space::masses<T>, space::all_probabilities<T>, space::find<T>}
#define SK_ROW_SET(space)                                                                        \
  {SK_ROW_KERNELS(space, float, max_blocks<float>), SK_ROW_KERNELS(space, F16, max_blocks<F16>), \
   SK_ROW_KERNELS(space, BF16, max_pairs)}
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
