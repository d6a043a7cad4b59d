// The order of summation: 16 partial sums, partial sum j taking k = j, j + 16, j + 32, ... in turn with fused
// multiply-adds (a last, incomplete step is filled with zeros), and then a tree: j with j + 8, j + 4, j + 2, j + 1. An
// AVX-512 register holds the 16 sums, AVX2 needs two, scalar code an array; the bits are the same. bf16 weights are
// widened on the way, which is exact: the result is that of the same weights in f32, for half the reading.
//
// As in linear_int8 the time is that of reading the weights: two weight rows meet all rows of x while they are in L1, a
// few of them at a time. Two, because a row alone would wait for its own sums, and every load of x serves both. Only
// outputs are divided between threads.
#include "cpu/linear_f32.h"

#include <array>
#include <cmath>
#include <utility>

#include "cpu/even_grain.h"
#include "cpu/fetch.h"
#include "cpu/float_mode.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int kSums = 16;
constexpr int64_t kRowBytes = 128 << 10;  // of x per sweep over the weights, so that it stays in L2

// out[r * out_stride + c] = w[c] . x[r] for some r < R and c < 1 or 2; `share` calls visit the same weights, and each
// prefetches its part.
using Dot = void (*)(const void* w, int64_t w_stride, int64_t k, const float* x, int64_t stride, float* out,
                     int64_t out_stride, int share, int turn);

template <class W>
constexpr int64_t kFourLines = 4 * 64 / sizeof(W);  // weights in them

float tree(const float* s) {
  float t[kSums];
  for (int j = 0; j < kSums; ++j) t[j] = s[j];
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) t[j] = t[j] + t[j + half];
  return t[0];
}

template <class W>
void dot_scalar(const void* weights, int64_t, int64_t k, const float* x, int64_t, float* out, int64_t, int, int) {
  const W* w = static_cast<const W*>(weights);
  float sum[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= k; i += kSums)
    for (int j = 0; j < kSums; ++j) sum[j] = std::fmaf(to_f32(w[i + j]), x[i + j], sum[j]);
  if (i < k)
    for (int j = 0; j < kSums; ++j)
      sum[j] = std::fmaf(i + j < k ? to_f32(w[i + j]) : 0.0f, i + j < k ? x[i + j] : 0.0f, sum[j]);
  *out = tree(sum);
}

#if SK_X86

SK_TARGET_AVX2_BEGIN

inline float tree_avx2(__m256 lo, __m256 hi) {
  const __m256 eight = _mm256_add_ps(lo, hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline __m256 eight_of(const float* w) { return _mm256_loadu_ps(w); }
inline __m256 eight_of(const BF16* w) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

// 0 < count < 16 floats, then zeros.
inline void part_of(const float* w, int64_t count, __m256* lo, __m256* hi) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), left = _mm256_set1_epi32(static_cast<int>(count));
  *lo = _mm256_maskload_ps(w, _mm256_cmpgt_epi32(left, lane));
  // No address beyond the row, even under an empty mask.
  const __m256i second = _mm256_cmpgt_epi32(left, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
  *hi = _mm256_maskload_ps(count > 8 ? w + 8 : w, second);
}
inline void part_of(const BF16* w, int64_t count, __m256* lo, __m256* hi) {
  BF16 line[kSums] = {};
  for (int64_t i = 0; i < count; ++i) line[i] = w[i];
  *lo = eight_of(line), *hi = eight_of(line + 8);
}

template <class W, bool two, int... r>
void dot_avx2(const void* weights, int64_t w_stride, int64_t k, const float* x, int64_t stride, float* out,
              int64_t out_stride, int share, int turn) {
  const W *const w = static_cast<const W*>(weights), *const v = two ? w + w_stride : w;
  __m256 lo[] = {(static_cast<void>(r), _mm256_setzero_ps())...},
         hi[] = {(static_cast<void>(r), _mm256_setzero_ps())...},
         v_lo[] = {(static_cast<void>(r), _mm256_setzero_ps())...},
         v_hi[] = {(static_cast<void>(r), _mm256_setzero_ps())...};
  const float* row[] = {x + r * stride...};
  const Fetch fetch(Pace::kMemory, share, turn);
  __m256 w0, w1, v0{}, v1{}, x0, x1;
  int64_t i = 0;
  for (; i + kSums <= k; i += kSums) {
    if ((i & (kFourLines<W> - 1)) == 0) {
      fetch.four_lines(w + i);
      if (two) fetch.four_lines(v + i);
    }
    w0 = eight_of(w + i), w1 = eight_of(w + i + 8);
    if (two) v0 = eight_of(v + i), v1 = eight_of(v + i + 8);
    ((x0 = eight_of(row[r] + i), x1 = eight_of(row[r] + i + 8), lo[r] = _mm256_fmadd_ps(w0, x0, lo[r]),
      hi[r] = _mm256_fmadd_ps(w1, x1, hi[r]), v_lo[r] = two ? _mm256_fmadd_ps(v0, x0, v_lo[r]) : v_lo[r],
      v_hi[r] = two ? _mm256_fmadd_ps(v1, x1, v_hi[r]) : v_hi[r]),
     ...);
  }
  if (i < k) {
    part_of(w + i, k - i, &w0, &w1);
    if (two) part_of(v + i, k - i, &v0, &v1);
    ((part_of(row[r] + i, k - i, &x0, &x1), lo[r] = _mm256_fmadd_ps(w0, x0, lo[r]),
      hi[r] = _mm256_fmadd_ps(w1, x1, hi[r]), v_lo[r] = two ? _mm256_fmadd_ps(v0, x0, v_lo[r]) : v_lo[r],
      v_hi[r] = two ? _mm256_fmadd_ps(v1, x1, v_hi[r]) : v_hi[r]),
     ...);
  }
  ((out[r * out_stride] = tree_avx2(lo[r], hi[r])), ...);
  if (two) ((out[r * out_stride + 1] = tree_avx2(v_lo[r], v_hi[r])), ...);
}

SK_TARGET_END
SK_TARGET_AVX512_BEGIN

inline float tree_avx512(__m512 sum) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline __m512 widened(__m256i w) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16)); }
inline __m512 line_of(const float* w) { return _mm512_loadu_ps(w); }
inline __m512 line_of(const BF16* w) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w))); }
inline __m512 line_of(const float* w, __mmask16 left) { return _mm512_maskz_loadu_ps(left, w); }
inline __m512 line_of(const BF16* w, __mmask16 left) { return widened(_mm256_maskz_loadu_epi16(left, w)); }

template <class W, bool two, int... r>
void dot_avx512(const void* weights, int64_t w_stride, int64_t k, const float* x, int64_t stride, float* out,
                int64_t out_stride, int share, int turn) {
  const W *const w = static_cast<const W*>(weights), *const v = two ? w + w_stride : w;
  __m512 sum[] = {(static_cast<void>(r), _mm512_setzero_ps())...},
         v_sum[] = {(static_cast<void>(r), _mm512_setzero_ps())...};
  const float* row[] = {x + r * stride...};
  const Fetch fetch(Pace::kMemory, share, turn);
  __m512 w0, v0{}, x0;
  int64_t i = 0;
  for (; i + kSums <= k; i += kSums) {
    if ((i & (kFourLines<W> - 1)) == 0) {
      fetch.four_lines(w + i);
      if (two) fetch.four_lines(v + i);
    }
    w0 = line_of(w + i);
    if (two) v0 = line_of(v + i);
    ((x0 = line_of(row[r] + i), sum[r] = _mm512_fmadd_ps(w0, x0, sum[r]),
      v_sum[r] = two ? _mm512_fmadd_ps(v0, x0, v_sum[r]) : v_sum[r]),
     ...);
  }
  if (i < k) {
    const __mmask16 left = static_cast<__mmask16>((1u << (k - i)) - 1);
    w0 = line_of(w + i, left);
    if (two) v0 = line_of(v + i, left);
    ((x0 = line_of(row[r] + i, left), sum[r] = _mm512_fmadd_ps(w0, x0, sum[r]),
      v_sum[r] = two ? _mm512_fmadd_ps(v0, x0, v_sum[r]) : v_sum[r]),
     ...);
  }
  ((out[r * out_stride] = tree_avx512(sum[r])), ...);
  if (two) ((out[r * out_stride + 1] = tree_avx512(v_sum[r])), ...);
}

SK_TARGET_END

template <class W, bool two>
constexpr Dot kAvx2[] = {dot_avx2<W, two, 0>, dot_avx2<W, two, 0, 1>};

// Twelve rows and two weight rows are 24 sums: what 32 registers hold. Nine, a pass of eight drafts, meet the weights
// once, which counts where they have to be widened.
constexpr int kAvx512Rows = 12;
template <class W, bool two, int... r>
constexpr Dot avx512_of(std::integer_sequence<int, r...>) {
  return dot_avx512<W, two, r...>;
}
template <class W, bool two, int... n>
constexpr std::array<Dot, sizeof...(n)> avx512_up_to(std::integer_sequence<int, n...>) {
  return {avx512_of<W, two>(std::make_integer_sequence<int, n + 1>{})...};
}
template <class W, bool two>
constexpr auto kAvx512 = avx512_up_to<W, two>(std::make_integer_sequence<int, kAvx512Rows>{});

#endif  // SK_X86

template <class W>
constexpr Dot kScalar[] = {dot_scalar<W>};

struct Kernels {
  const Dot *one, *two;  // for one weight row and for two; [i] takes i + 1 rows of x
  int rows;              // how many at most
};

template <class W>
Kernels kernels() {
#if SK_X86
  if (isa() == Isa::kAvx512) return {kAvx512<W, false>.data(), kAvx512<W, true>.data(), kAvx512Rows};
  if (isa() == Isa::kAvx2) return {kAvx2<W, false>, kAvx2<W, true>, 2};
#endif
  return {kScalar<W>, nullptr, 1};
}

template <class W>
void multiply(const F32Rows& x, const FloatMatrix& w, const Bias& bias, float* out, int64_t out_stride, int threads) {
  const Kernels kernel = kernels<W>();
  const int64_t k = w.k, fit = kRowBytes / (4 * (k > 0 ? k : 1)), block = fit < 16 ? 16 : fit;
  for (int64_t row0 = 0; row0 < x.rows; row0 += block) {
    const int64_t rows = x.rows - row0 < block ? x.rows - row0 : block;
    const int share = static_cast<int>((rows + kernel.rows - 1) / kernel.rows);
    const int64_t take = (rows + share - 1) / share;  // 9 rows are better served as 5 + 4 than as 8 + 1
    const int64_t bytes = w.n * k * static_cast<int64_t>(sizeof(W)) * (rows > 4 ? rows / 4 : 1);
    parallel_for(threads, w.n, even_grain(w.n, bytes, threads), [&](int64_t begin, int64_t end) {
      const IeeeMode ieee;
      const int64_t together = kernel.two != nullptr ? 2 : 1;
      for (int64_t n = begin; n < end; n += together) {
        const int64_t columns = end - n < together ? end - n : together;
        const Dot* const dot = columns == 2 ? kernel.two : kernel.one;
        const W* weights = static_cast<const W*>(w.data) + n * w.stride;
        float* const column = out + row0 * out_stride + n;
        for (int64_t r = 0; r < rows; r += take) {
          const int64_t count = rows - r < take ? rows - r : take;
          dot[count - 1](weights, w.stride, k, x.data + (row0 + r) * x.stride, x.stride, column + r * out_stride,
                         out_stride, share, static_cast<int>(r / take));
        }
        if (bias.data != nullptr)
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < columns; ++c) column[r * out_stride + c] += bias[n + c];
      }
    });
  }
}

}  // namespace

void linear_f32(const F32Rows& x, const FloatMatrix& w, const Bias& bias, float* out, int64_t out_stride, int threads) {
  if (threads < 1) threads = 1;
  if (w.type == Dtype::kBF16)
    multiply<BF16>(x, w, bias, out, out_stride, threads);
  else
    multiply<float>(x, w, bias, out, out_stride, threads);
}

}  // namespace sk
