// Inner loops of linear_int8: one panel of 16 weight rows (pack_int8.h) against up to 12 rows of x.
//
// AVX-512 VNNI: one line of the panel is the unsigned operand of vpdpbusd, one broadcast word of x the signed one: 64
// products per instruction, added to 16 int32 lanes without saturation.
// AVX2 has no such instruction, and its vpmaddubsw saturates (the pair sum 2 * 255 * 127 does not fit 16 bits). So the
// bytes are widened: even bytes by a mask, odd bytes by a shift, each an int16 vector whose pairs belong to one lane,
// and vpmaddwd adds exact pair products. Two cheap instructions per 32 weights, shared by all rows of x.
#include "cpu/linear_int8_kernels.h"

#include <cstring>

#include "cpu/fetch.h"

namespace sk {
namespace {

constexpr int kLanes = 16, kLine = 64, kWord = 4;

inline int32_t minus_128_times(int32_t sum) {
  return static_cast<int32_t>(static_cast<uint32_t>(sum) * static_cast<uint32_t>(-128));
}

// ---- scalar -------------------------------------------------------------------------------------

int32_t prepare_scalar(const int8_t* q, int64_t group, char* words) {
  int32_t sum = 0;
  for (int64_t i = 0; i < group; ++i) sum += q[i];
  std::memcpy(words, q, static_cast<size_t>(group));
  std::memset(words + group, 0, static_cast<size_t>(-group & 3));
  return minus_128_times(sum);
}

template <int R>
void dot_scalar(const Int8Tile& t) {
  for (int64_t g = 0; g < t.groups; ++g)
    for (int r = 0; r < R; ++r) {
      const int8_t* row = reinterpret_cast<const int8_t*>(t.x) + r * t.x_stride + g * t.x_group;
      const uint8_t* w = t.w + g * t.steps * kLine;
      const float sx = t.sx[r * t.sx_stride + g * t.sx_group];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int32_t start = t.first ? t.offset[r * t.offset_stride + g] : t.acc[r * kLanes + lane];
        uint32_t sum = static_cast<uint32_t>(start);
        for (int64_t s = 0; s < t.steps; ++s)
          for (int b = 0; b < 4; ++b)
            sum += static_cast<uint32_t>(static_cast<int>(w[s * kLine + lane * 4 + b]) * row[s * 4 + b]);
        if (t.last)
          t.y[r * kLanes + lane] += static_cast<float>(static_cast<int32_t>(sum)) * (sx * t.sw[g * kLanes + lane]);
        else
          t.acc[r * kLanes + lane] = static_cast<int32_t>(sum);
      }
    }
}

constexpr Int8Kernels kScalar = {8,
                                 1,
                                 prepare_scalar,
                                 {dot_scalar<1>, dot_scalar<2>, dot_scalar<3>, dot_scalar<4>, dot_scalar<5>,
                                  dot_scalar<6>, dot_scalar<7>, dot_scalar<8>}};

#if SK_X86

typedef int32_t Word __attribute__((may_alias));

// ---- AVX2 ---------------------------------------------------------------------------------------

SK_TARGET_AVX2_BEGIN

int32_t prepare_avx2(const int8_t* q, int64_t group, char* words) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < group; i += 16) {
    __m128i codes;
    if (i + 16 <= group) {
      codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i));
    } else {
      alignas(16) int8_t last[16] = {};
      for (int64_t j = i; j < group; ++j) last[j - i] = q[j];
      codes = _mm_load_si128(reinterpret_cast<const __m128i*>(last));
    }
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(codes, order));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(wide, ones));
    if (i + 16 <= group) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 2 * i), wide);
    } else {  // only as many steps as there are
      alignas(32) char last[32];
      _mm256_store_si256(reinterpret_cast<__m256i*>(last), wide);
      const int64_t bytes = (group - i + 3) / 4 * 8;
      for (int64_t j = 0; j < bytes; ++j) words[2 * i + j] = last[j];
    }
  }
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return minus_128_times(_mm_cvtsi128_si32(four));
}

// The empty statement keeps the compiler from regrouping the sums into a tree that does not fit the registers.
inline void add(__m256i& sum, __m256i term) {
  sum = _mm256_add_epi32(sum, term);
  asm("" : "+x"(sum));
}

inline __m256i start8(const Int8Tile& t, int r, int lane, int64_t g) {
  return t.first ? _mm256_set1_epi32(t.offset[r * t.offset_stride + g])
                 : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t.acc + r * kLanes + lane));
}

inline void finish8(const Int8Tile& t, int r, int lane, int64_t g, __m256i sum) {
  const int at = r * kLanes + lane;
  if (!t.last) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(t.acc + at), sum);
    return;
  }
  const __m256 sw = _mm256_loadu_ps(t.sw + g * kLanes + lane);
  const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(t.sx[r * t.sx_stride + g * t.sx_group]), sw);
  _mm256_storeu_ps(t.y + at, _mm256_add_ps(_mm256_loadu_ps(t.y + at), _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale)));
}

template <int... r>
void dot_avx2(const Int8Tile& tile) {
  const Int8Tile t = tile;  // a copy of its own: stores to y can't make the compiler read the fields again
  const __m256i even = _mm256_set1_epi16(0x00ff);
  const Fetch fetch(sizeof...(r) == 1 ? Pace::kMemory : Pace::kArithmetic, t.share, t.turn);
  const uint8_t* w = t.w;
  for (int64_t g = 0; g < t.groups; ++g) {
    __m256i lo[] = {start8(t, r, 0, g)...}, hi[] = {start8(t, r, 8, g)...};
    const Word* row[] = {reinterpret_cast<const Word*>(t.x + r * t.x_stride + g * t.x_group)...};
    const auto step = [&](int64_t s) __attribute__((always_inline)) {
      const __m256i* line = reinterpret_cast<const __m256i*>(w + s * kLine);
      const __m256i w0 = _mm256_load_si256(line), w1 = _mm256_load_si256(line + 1);
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
    };
    int64_t s = 0;
    for (; s + 4 <= t.steps; s += 4) {
      fetch.four_lines(w + s * kLine);
      step(s), step(s + 1), step(s + 2), step(s + 3);
    }
    for (; s < t.steps; ++s) fetch.line(w + s * kLine), step(s);
    w += t.steps * kLine;
    ((finish8(t, r, 0, g, lo[r]), finish8(t, r, 8, g, hi[r])), ...);
  }
}

SK_TARGET_END

// ---- AVX-512 VNNI -------------------------------------------------------------------------------

SK_TARGET_AVX512_BEGIN

int32_t prepare_avx512(const int8_t* q, int64_t group, char* words) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  const int64_t padded = (group + 3) & ~int64_t{3};
  for (int64_t i = 0; i < padded; i += 64) {
    const __mmask64 in = group - i < 64 ? (__mmask64{1} << (group - i)) - 1 : ~__mmask64{0};
    const __mmask64 out = padded - i < 64 ? (__mmask64{1} << (padded - i)) - 1 : ~__mmask64{0};
    const __m512i codes = _mm512_maskz_loadu_epi8(in, q + i);
    sums = _mm512_dpbusd_epi32(sums, ones, codes);
    _mm512_mask_storeu_epi8(words + i, out, codes);
  }
  return minus_128_times(_mm512_reduce_add_epi32(sums));
}

template <bool kWhole>
inline __m512i start16(const Int8Tile& t, int r, int64_t g) {
  return kWhole || t.first ? _mm512_set1_epi32(t.offset[r * t.offset_stride + g]) : _mm512_loadu_si512(t.acc + r * kLanes);
}

inline __m512 scaled16(const Int8Tile& t, int r, int64_t g, __m512i sum, __m512 sw) {
  const __m512 exact = _mm512_maskz_cvtepi32_ps(0xffff, sum);
  return _mm512_mul_ps(exact, _mm512_mul_ps(_mm512_set1_ps(t.sx[r * t.sx_stride + g * t.sx_group]), sw));
}

constexpr int64_t kSmall = 8192;  // bytes of x that leave most of L1 to the weights

// kSteps: the steps of a group, if all groups are whole and have so many; else 0. Then a group's beginning and end, a
// quarter of the instructions, need no decisions, and what a row needs stays in registers.
template <int kSteps, int... r>
__attribute__((always_inline)) inline void dot_groups(const Int8Tile& tile) {
  const Int8Tile t = tile;  // as in dot_avx2
  constexpr int kRows = sizeof...(r);
  const Pace few = kRows <= 2 || kRows * t.x_stride <= kSmall ? Pace::kMemory : Pace::kBetween;
  const Fetch fetch(kRows <= 4 ? few : Pace::kArithmetic, t.share, t.turn);
  const int64_t steps = kSteps ? kSteps : t.steps;
  const uint8_t* w = t.w;
  const char* x = t.x;  // groups follow each other without a gap, on both sides
  __m512 y[] = {_mm512_loadu_ps(t.y + r * kLanes)...};
  for (int64_t g = 0; g < t.groups; ++g) {
    __m512i sum[] = {start16<kSteps != 0>(t, r, g)...}, odd[] = {(static_cast<void>(r), _mm512_setzero_si512())...};
    const auto step = [&](__m512i* sums, int64_t s) __attribute__((always_inline)) {
      const __m512i line = _mm512_load_si512(w + s * kLine);
      const char* words = x + s * kWord;
      ((sums[r] = _mm512_dpbusd_epi32(
            sums[r], line, _mm512_set1_epi32(*reinterpret_cast<const Word*>(words + r * t.x_stride)))),
       ...);
    };
    __m512i* const second = kRows <= 3 ? odd : sum;  // so few sums would wait for their own last step
    int64_t s = 0;
#pragma GCC unroll 1
    for (; s + 4 <= steps; s += 4, w += 4 * kLine, x += 4 * kWord) {
      fetch.four_lines(w);
      step(sum, 0), step(second, 1), step(sum, 2), step(second, 3);
    }
    for (; s < steps; ++s, w += kLine, x += kWord) fetch.line(w), step(sum, 0);
    if (kRows <= 3) ((sum[r] = _mm512_add_epi32(sum[r], odd[r])), ...);
    if (kSteps == 0 && !t.last) {
      (_mm512_storeu_si512(t.acc + r * kLanes, sum[r]), ...);
      return;  // a part of one group
    }
    const __m512 sw = _mm512_loadu_ps(t.sw + g * kLanes);
    if (kRows <= 2) _mm_prefetch(reinterpret_cast<const char*>(t.sw + (g + 8) * kLanes), _MM_HINT_T0);
    ((y[r] = _mm512_add_ps(y[r], scaled16(t, r, g, sum[r], sw))), ...);
  }
  (_mm512_storeu_ps(t.y + r * kLanes, y[r]), ...);
}

template <int... r>
void dot_avx512(const Int8Tile& t) {
  constexpr int kUsual = 16;  // of groups of 64
  if (t.steps == kUsual && t.first && t.last)
    dot_groups<kUsual, r...>(t);
  else
    dot_groups<0, r...>(t);
}

SK_TARGET_END

constexpr Int8Kernels kAvx2 = {
    4, 2, prepare_avx2, {dot_avx2<0>, dot_avx2<0, 1>, dot_avx2<0, 1, 2>, dot_avx2<0, 1, 2, 3>}};
constexpr Int8Kernels kAvx512 = {
    12,
    1,
    prepare_avx512,
    {dot_avx512<0>, dot_avx512<0, 1>, dot_avx512<0, 1, 2>, dot_avx512<0, 1, 2, 3>, dot_avx512<0, 1, 2, 3, 4>,
     dot_avx512<0, 1, 2, 3, 4, 5>, dot_avx512<0, 1, 2, 3, 4, 5, 6>, dot_avx512<0, 1, 2, 3, 4, 5, 6, 7>,
     dot_avx512<0, 1, 2, 3, 4, 5, 6, 7, 8>, dot_avx512<0, 1, 2, 3, 4, 5, 6, 7, 8, 9>,
     dot_avx512<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10>, dot_avx512<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11>}};

#endif  // SK_X86

}  // namespace

const Int8Kernels& int8_kernels(Isa which) {
#if SK_X86
  if (which == Isa::kAvx512) return kAvx512;
  if (which == Isa::kAvx2) return kAvx2;
#endif
#if SK_DOTPROD
  if (which == Isa::kDotprod) return int8_dotprod();
#endif
#if SK_NEON
  if (which == Isa::kNeon) return int8_neon();
#endif
  (void)which;
  return kScalar;
}

}  // namespace sk
