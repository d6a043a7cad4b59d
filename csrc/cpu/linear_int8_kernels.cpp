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

// Where to prefetch while step s is worked on. When several blocks of rows visit a chunk one after the other, the first two
// share the fetching, so that memory is busy all the time: one block takes the even lines, the other the odd ones.
struct Fetch {
  Fetch(int share, int turn) : start(kAhead + (share > 1 ? turn % 2 * kLine : 0)), mask(share > 1 ? ~int64_t{kLine} : ~int64_t{0}) {}
  int64_t line(int64_t s) const { return start + (s * kLine & mask); }
  int64_t start, mask;
};

template <int R>
void dot_scalar(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int, int) {
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

// The empty statement keeps the compiler from regrouping the sums into a tree that does not fit the registers.
inline void add(__m256i& sum, __m256i term) {
  sum = _mm256_add_epi32(sum, term);
  asm("" : "+x"(sum));
}

template <int... r>
void dot_avx2(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int share, int turn) {
  __m256i lo[] = {_mm256_load_si256(reinterpret_cast<const __m256i*>(acc + r * kLanes))...};
  __m256i hi[] = {_mm256_load_si256(reinterpret_cast<const __m256i*>(acc + r * kLanes + 8))...};
  const Word* row[] = {reinterpret_cast<const Word*>(static_cast<const char*>(x) + r * stride)...};
  const Fetch fetch(share, turn);
  const __m256i even = _mm256_set1_epi16(0x00ff);
  for (int64_t s = 0; s < steps; ++s) {
    _mm_prefetch(reinterpret_cast<const char*>(w) + fetch.line(s), _MM_HINT_T0);
    const __m256i w0 = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + s * kLine));
    const __m256i w1 = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + s * kLine + 32));
    const __m256i e0 = _mm256_and_si256(w0, even), o0 = _mm256_srli_epi16(w0, 8);
    const __m256i e1 = _mm256_and_si256(w1, even), o1 = _mm256_srli_epi16(w1, 8);
    const auto meet = [&](__m256i& low, __m256i& high, const Word* words) __attribute__((always_inline)) {
      const __m256i xe = _mm256_set1_epi32(words[0]), xo = _mm256_set1_epi32(words[1]);
      add(low, _mm256_madd_epi16(e0, xe));
      add(high, _mm256_madd_epi16(e1, xe));
      add(low, _mm256_madd_epi16(o0, xo));
      add(high, _mm256_madd_epi16(o1, xo));
    };
    (meet(lo[r], hi[r], row[r] + 2 * s), ...);
  }
  (_mm256_store_si256(reinterpret_cast<__m256i*>(acc + r * kLanes), lo[r]), ...);
  (_mm256_store_si256(reinterpret_cast<__m256i*>(acc + r * kLanes + 8), hi[r]), ...);
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

template <int... r>
void dot_avx512(const uint8_t* w, int64_t steps, const void* x, int64_t stride, int32_t* acc, int share, int turn) {
  __m512i sum[] = {_mm512_load_si512(acc + r * kLanes)...};
  const Word* row[] = {reinterpret_cast<const Word*>(static_cast<const char*>(x) + r * stride)...};
  const Fetch fetch(share, turn);
  for (int64_t s = 0; s < steps; ++s) {
    _mm_prefetch(reinterpret_cast<const char*>(w) + fetch.line(s), _MM_HINT_T0);
    const __m512i line = _mm512_load_si512(w + s * kLine);
    ((sum[r] = _mm512_dpbusd_epi32(sum[r], line, _mm512_set1_epi32(row[r][s]))), ...);
  }
  (_mm512_store_si512(acc + r * kLanes, sum[r]), ...);
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

constexpr Int8Kernels kAvx2 = {4, 2, {dot_avx2<0>, dot_avx2<0, 1>, dot_avx2<0, 1, 2>, dot_avx2<0, 1, 2, 3>}, fold_avx2};
constexpr Int8Kernels kAvx512 = {
    8,
    1,
    {dot_avx512<0>, dot_avx512<0, 1>, dot_avx512<0, 1, 2>, dot_avx512<0, 1, 2, 3>, dot_avx512<0, 1, 2, 3, 4>,
     dot_avx512<0, 1, 2, 3, 4, 5>, dot_avx512<0, 1, 2, 3, 4, 5, 6>, dot_avx512<0, 1, 2, 3, 4, 5, 6, 7>},
    fold_avx512};

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
