#include "cpu/rotate.h"

namespace sk {
namespace {

namespace scalar {
#define SK_F16C 0
constexpr int64_t kLanes = 4;
inline void in_lanes(float* y) {
  const float a = y[0] + y[1], b = y[0] - y[1], c = y[2] + y[3], d = y[2] - y[3];
  y[0] = a + c, y[1] = b + d, y[2] = a - c, y[3] = b - d;
}
#include "cpu/convert.inc"
#include "cpu/rotate_group.inc"
#undef SK_F16C
}  // namespace scalar

#if SK_X86
#define SK_F16C 1
// In the upper lane of a pair, a - b is the lower lane's value plus the own one with its sign changed.
namespace avx2 {
SK_TARGET_AVX2_BEGIN
constexpr int64_t kLanes = 8;
inline void in_lanes(float* y) {
  const __m256 one = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
  const __m256 two = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
  const __m256 four = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
  __m256 v = _mm256_loadu_ps(y);
  v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, one));
  v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, two));
  v = _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, four));
  _mm256_storeu_ps(y, v);
}
#include "cpu/convert.inc"
#include "cpu/rotate_group.inc"
SK_TARGET_END
}  // namespace avx2
namespace avx512 {
SK_TARGET_AVX512_BEGIN
constexpr int64_t kLanes = 16;
inline __m512 pairs(__m512 other, __m512 v, __mmask16 upper) {
  return _mm512_mask_sub_ps(_mm512_add_ps(other, v), upper, other, v);
}
inline void in_lanes(float* y) {
  __m512 v = _mm512_loadu_ps(y);
  v = pairs(_mm512_permute_ps(v, 0xb1), v, 0xaaaa);
  v = pairs(_mm512_permute_ps(v, 0x4e), v, 0xcccc);
  v = pairs(_mm512_shuffle_f32x4(v, v, 0xb1), v, 0xf0f0);
  v = pairs(_mm512_shuffle_f32x4(v, v, 0x4e), v, 0xff00);
  _mm512_storeu_ps(y, v);
}
#include "cpu/convert.inc"
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
