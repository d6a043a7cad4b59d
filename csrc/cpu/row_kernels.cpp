#include "cpu/row_kernels.h"

#include <cmath>
#include <cstring>

#include "cpu/exp64.h"
#include "cpu/isa.h"
#include "sk/accept.h"

namespace sk {
namespace {

namespace scalar {
constexpr int kBytes = 16;
inline void convert_f16(const F16* x, float* out) {
  for (int j = 0; j < 4; ++j) out[j] = to_f32(x[j]);
}
#include "cpu/row_kernels.inl"
}  // namespace scalar

#if SK_X86
SK_TARGET_AVX2_BEGIN
namespace avx2 {
constexpr int kBytes = 32;
inline void convert_f16(const F16* x, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}
#include "cpu/row_kernels.inl"
}  // namespace avx2
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
namespace avx512 {
constexpr int kBytes = 64;
inline void convert_f16(const F16* x, float* out) {
  for (int j = 0; j < 16; j += 8)
    _mm256_storeu_ps(out + j, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + j))));
}
#include "cpu/row_kernels.inl"
}  // namespace avx512
SK_TARGET_END
#endif

#define SK_ROW_SET(space)                                                   \
  {                                                                         \
    {space::max_blocks<float>, space::load64<float>, space::masses<float>}, \
        {space::max_blocks<F16>, space::load64<F16>, space::masses<F16>}, { \
      space::max_blocks<BF16>, space::load64<BF16>, space::masses<BF16>     \
    }                                                                       \
  }
#define SK_GROUP_SET(space) {space::exp64, space::first_words}

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
