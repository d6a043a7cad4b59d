// Inner loops of linear_int8: one panel of 16 weight rows against up to 8 activation rows.
//
// AVX-512 VNNI: one line of the panel is the unsigned operand of vpdpbusd, one broadcast word of x the signed one: 64
// products per instruction, added to 16 int32 lanes without saturation.
// AVX2 has no such instruction, and its vpmaddubsw saturates (the pair sum of 255 * 127 does not fit 16 bits). So the
// bytes are widened: even bytes by a mask, odd bytes by a shift, each an int16 vector whose pairs belong to one lane, and
// vpmaddwd adds exact pair products. Two cheap instructions per 32 weights, shared by all rows of x.
#include "cpu/linear_int8_kernels.h"

#include <cstring>

namespace sk {
namespace {

constexpr int kLanes = 16, kLine = 64;
constexpr int kAhead = 4096;  // prefetch distance in bytes: some 400 ns at 10 GB/s and core

template <int R>
void dot_scalar(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int) {
  for (int r = 0; r < R; ++r) {
    const int8_t* row = static_cast<const int8_t*>(x) + r * stride;
    for (int64_t s = 0; s < steps; ++s)
      for (int lane = 0; lane < kLanes; ++lane) {
        uint32_t sum = static_cast<uint32_t>(acc[r * kLanes + lane]);
        for (int b = 0; b < 4; ++b) sum += static_cast<uint32_t>(static_cast<int>(w[s * kLine + lane * 4 + b]) * row[s * 4 + b]);
        acc[r * kLanes + lane] = static_cast<int32_t>(sum);
      }
  }
}

inline int32_t wrapping_add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

void fold_scalar(int rows, const int32_t* acc, const int32_t* offset, int64_t offset_stride, const float* sx, int64_t sx_stride,
                 const float* sw, float* y) {
  for (int r = 0; r < rows; ++r)
    for (int lane = 0; lane < kLanes; ++lane) {
      const float exact = static_cast<float>(wrapping_add(acc[r * kLanes + lane], offset[r * offset_stride]));
      y[r * kLanes + lane] += exact * (sx[r * sx_stride] * sw[lane]);
    }
}

constexpr Int8Kernels kScalar = {8, 1, {dot_scalar<1>, dot_scalar<2>, dot_scalar<3>, dot_scalar<4>, dot_scalar<5>, dot_scalar<6>,
                                        dot_scalar<7>, dot_scalar<8>}, fold_scalar};

#if SK_X86

typedef int32_t Word __attribute__((may_alias));

SK_TARGET_AVX2_BEGIN

template <int R>
void dot_avx2(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int share) {
  const char* row[R];
  __m256i a[R][2];
  for (int r = 0; r < R; ++r) {
    row[r] = static_cast<const char*>(x) + r * stride;
    a[r][0] = _mm256_load_si256(reinterpret_cast<const __m256i*>(acc + r * kLanes));
    a[r][1] = _mm256_load_si256(reinterpret_cast<const __m256i*>(acc + r * kLanes + 8));
  }
  const __m256i even = _mm256_set1_epi16(0x00ff);
  const char* fetch = reinterpret_cast<const char*>(w) + kAhead;
  (void)share;
  for (int64_t s = 0; s < steps; ++s, w += kLine) {
    _mm_prefetch(fetch + s * kLine, _MM_HINT_T0);
    const __m256i w0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i w1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32));
    const __m256i e0 = _mm256_and_si256(w0, even), o0 = _mm256_srli_epi16(w0, 8);
    const __m256i e1 = _mm256_and_si256(w1, even), o1 = _mm256_srli_epi16(w1, 8);
    for (int r = 0; r < R; ++r) {
      const Word* v = reinterpret_cast<const Word*>(row[r] + s * 8);
      const __m256i xe = _mm256_set1_epi32(v[0]), xo = _mm256_set1_epi32(v[1]);
      a[r][0] = _mm256_add_epi32(a[r][0], _mm256_madd_epi16(e0, xe));
      a[r][1] = _mm256_add_epi32(a[r][1], _mm256_madd_epi16(e1, xe));
      a[r][0] = _mm256_add_epi32(a[r][0], _mm256_madd_epi16(o0, xo));
      a[r][1] = _mm256_add_epi32(a[r][1], _mm256_madd_epi16(o1, xo));
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(acc + r * kLanes), a[r][0]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(acc + r * kLanes + 8), a[r][1]);
  }
}

void fold_avx2(int rows, const int32_t* acc, const int32_t* offset, int64_t offset_stride, const float* sx, int64_t sx_stride,
               const float* sw, float* y) {
  for (int r = 0; r < rows; ++r)
    for (int lane = 0; lane < kLanes; lane += 8) {
      const __m256i sum = _mm256_add_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(acc + r * kLanes + lane)),
                                           _mm256_set1_epi32(offset[r * offset_stride]));
      const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(sx[r * sx_stride]), _mm256_loadu_ps(sw + lane));
      float* at = y + r * kLanes + lane;
      _mm256_store_ps(at, _mm256_add_ps(_mm256_load_ps(at), _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale)));
    }
}

SK_TARGET_END
SK_TARGET_AVX512_BEGIN

template <int R>
void dot_avx512(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int share) {
  const char* row[R];
  __m512i a[R];
  for (int r = 0; r < R; ++r) {
    row[r] = static_cast<const char*>(x) + r * stride;
    a[r] = _mm512_load_si512(acc + r * kLanes);
  }
  const char* fetch = reinterpret_cast<const char*>(w) + kAhead;
  (void)share;
  for (int64_t s = 0; s < steps; ++s) {
    _mm_prefetch(fetch + s * kLine, _MM_HINT_T0);
    const __m512i line = _mm512_load_si512(w + s * kLine);
    for (int r = 0; r < R; ++r)
      a[r] = _mm512_dpbusd_epi32(a[r], line, _mm512_set1_epi32(*reinterpret_cast<const Word*>(row[r] + s * 4)));
  }
  for (int r = 0; r < R; ++r) _mm512_store_si512(acc + r * kLanes, a[r]);
}

void fold_avx512(int rows, const int32_t* acc, const int32_t* offset, int64_t offset_stride, const float* sx, int64_t sx_stride,
                 const float* sw, float* y) {
  const __m512 channel = _mm512_loadu_ps(sw);
  for (int r = 0; r < rows; ++r) {
    const __m512i sum = _mm512_add_epi32(_mm512_load_si512(acc + r * kLanes), _mm512_set1_epi32(offset[r * offset_stride]));
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(sx[r * sx_stride]), channel);
    float* at = y + r * kLanes;
    _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale)));
  }
}

SK_TARGET_END

constexpr Int8Kernels kAvx2 = {4, 2, {dot_avx2<1>, dot_avx2<2>, dot_avx2<3>, dot_avx2<4>}, fold_avx2};
constexpr Int8Kernels kAvx512 = {8, 1, {dot_avx512<1>, dot_avx512<2>, dot_avx512<3>, dot_avx512<4>, dot_avx512<5>, dot_avx512<6>,
                                        dot_avx512<7>, dot_avx512<8>}, fold_avx512};

#endif  // SK_X86

}  // namespace

const Int8Kernels& int8_kernels(Isa which) {
#if SK_X86
  if (which == Isa::kAvx512) return kAvx512;
  if (which == Isa::kAvx2) return kAvx2;
#endif
  (void)which;
  return kScalar;
}

}  // namespace sk
