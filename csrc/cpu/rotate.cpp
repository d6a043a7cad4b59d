#include "cpu/rotate.h"

namespace sk {
namespace {

namespace scalar {
#define SK_F16C 0
#include "cpu/convert.inc"
using Vec = float;
constexpr int64_t kLanes = 1;
constexpr int kManyVecs = 16;
template <class T>
inline Vec load(const T* x) {
  return to_f32(*x);
}
inline void store(float* y, Vec v) { *y = v; }
inline Vec in_lanes(Vec v) { return v; }
#include "cpu/rotate_group.inc"
#undef SK_F16C
}  // namespace scalar

#if SK_X86
#define SK_F16C 1
namespace avx2 {
SK_TARGET_AVX2_BEGIN
#include "cpu/convert.inc"
using Vec = __m256;
constexpr int64_t kLanes = 8;
constexpr int kManyVecs = 8;
inline Vec load(const float* x) { return _mm256_loadu_ps(x); }
inline Vec load(const F16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline Vec load(const BF16* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store(float* y, Vec v) { _mm256_storeu_ps(y, v); }
// In the upper lane of a pair, a - b is the lower lane's value plus the own one with its sign changed.
inline Vec in_lanes(Vec v) {
  const Vec one = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
  const Vec two = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
  const Vec four = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
  v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, one));
  v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, two));
  return _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, four));
}
#include "cpu/rotate_group.inc"
SK_TARGET_END
}  // namespace avx2
namespace avx512 {
SK_TARGET_AVX512_BEGIN
#include "cpu/convert.inc"
using Vec = __m512;
constexpr int64_t kLanes = 16;
constexpr int kManyVecs = 4;
inline Vec load(const float* x) { return _mm512_loadu_ps(x); }
inline Vec load(const F16* x) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
inline Vec load(const BF16* x) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, half), 16));
}
inline void store(float* y, Vec v) { _mm512_storeu_ps(y, v); }
inline Vec in_lanes(Vec v) {
  const Vec sign = _mm512_set1_ps(-0.0f);
  const auto step = [&](Vec other, __mmask16 upper) __attribute__((always_inline)) {
    v = _mm512_add_ps(other, _mm512_mask_xor_ps(v, upper, v, sign));
  };
  step(_mm512_maskz_permute_ps(0xffff, v, 0xb1), 0xaaaa);
  step(_mm512_maskz_permute_ps(0xffff, v, 0x4e), 0xcccc);
  step(_mm512_maskz_shuffle_f32x4(0xffff, v, v, 0xb1), 0xf0f0);
  step(_mm512_maskz_shuffle_f32x4(0xffff, v, v, 0x4e), 0xff00);
  return v;
}
#include "cpu/rotate_group.inc"
SK_TARGET_END
}  // namespace avx512
#undef SK_F16C
#endif

}  // namespace

template <class T>
RotateGroup<T> rotate_group(Isa which) {
#if SK_X86
  if (which == Isa::kAvx512) return &avx512::rotate_group<T>;
  if (which == Isa::kAvx2) return &avx2::rotate_group<T>;
#endif
  (void)which;
  return &scalar::rotate_group<T>;
}
template RotateGroup<float> rotate_group<float>(Isa);
template RotateGroup<F16> rotate_group<F16>(Isa);
template RotateGroup<BF16> rotate_group<BF16>(Isa);

}  // namespace sk
