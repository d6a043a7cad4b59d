// Inner loops of linear_int8 on Arm: one panel of 16 weight rows (pack_int8.h) against a few rows of x.
//
// A byte of the panel is w + 128; flipping its top bit gives w as a signed byte, so the sums need no correction. With
// the dot product (ARMv8.2) one instruction adds 4 products to each of 4 channels, and nothing saturates. Without it
// smull makes single products of 16 bits (two of them would not fit: 2 * 128 * 128), and sadalp adds neighbours into 32
// bits: a channel's four values of k then lie in two lanes, which meet at the end of the group.
#include "cpu/linear_int8_kernels.h"

#if SK_NEON

#include <cstring>

namespace sk {
namespace {

constexpr int kLanes = 16, kLine = 64;

int32_t prepare(const int8_t* q, int64_t group, char* words) {
  std::memcpy(words, q, static_cast<size_t>(group));
  std::memset(words + group, 0, static_cast<size_t>(-group & 3));
  return 0;
}

inline int32_t word_at(const char* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Channels 4 q .. 4 q + 3 of row r: the part so far, and what becomes of it when the group (or its part) ends.
inline int32x4_t start(const Int8Tile& t, int r, int q) {
  return t.first ? vdupq_n_s32(0) : vld1q_s32(t.acc + r * kLanes + 4 * q);
}

inline void finish(const Int8Tile& t, int r, int q, int64_t g, int32x4_t sum) {
  const int at = r * kLanes + 4 * q;
  if (!t.last) return vst1q_s32(t.acc + at, sum);
  const float32x4_t sw = vld1q_f32(t.sw + g * kLanes + 4 * q);
  const float32x4_t scale = vmulq_f32(vdupq_n_f32(t.sx[r * t.sx_stride + g * t.sx_group]), sw);
  vst1q_f32(t.y + at, vaddq_f32(vld1q_f32(t.y + at), vmulq_f32(vcvtq_f32_s32(sum), scale)));
}

inline int8x16_t signed_codes(const uint8_t* w) { return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w), vdupq_n_u8(0x80))); }

// ---- smull, sadalp ------------------------------------------------------------------------------

template <int R>
void dot_neon(const Int8Tile& tile) {
  const Int8Tile t = tile;  // a copy of its own: stores to y can't make the compiler read the fields again
  const uint8_t* w = t.w;
  for (int64_t g = 0; g < t.groups; ++g) {
    int32x4_t sum[R][8];  // [..][2 q], [2 q + 1]: two lanes for each of the channels 4 q .. 4 q + 3
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 8; ++h) sum[r][h] = vdupq_n_s32(0);
    const char* x = t.x + g * t.x_group;
    for (int64_t s = 0; s < t.steps; ++s, w += kLine) {
      int8x8_t words[R];
      for (int r = 0; r < R; ++r) words[r] = vreinterpret_s8_s32(vdup_n_s32(word_at(x + r * t.x_stride + 4 * s)));
      for (int q = 0; q < 4; ++q) {
        const int8x16_t codes = signed_codes(w + 16 * q);
        for (int r = 0; r < R; ++r) {
          sum[r][2 * q] = vpadalq_s16(sum[r][2 * q], vmull_s8(vget_low_s8(codes), words[r]));
          sum[r][2 * q + 1] = vpadalq_s16(sum[r][2 * q + 1], vmull_s8(vget_high_s8(codes), words[r]));
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < 4; ++q)
        finish(t, r, q, g, vaddq_s32(start(t, r, q), vpaddq_s32(sum[r][2 * q], sum[r][2 * q + 1])));
  }
}

constexpr Int8Kernels kNeon = {2, 1, prepare, {dot_neon<1>, dot_neon<2>}};

// ---- dot product --------------------------------------------------------------------------------

#if SK_DOTPROD

SK_TARGET_DOTPROD_BEGIN

template <int R>
void dot_dotprod(const Int8Tile& tile) {
  const Int8Tile t = tile;  // as in dot_neon
  const uint8_t* w = t.w;
  for (int64_t g = 0; g < t.groups; ++g) {
    int32x4_t sum[R][4];
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < 4; ++q) sum[r][q] = start(t, r, q);
    const char* x = t.x + g * t.x_group;
    for (int64_t s = 0; s < t.steps; ++s, w += kLine) {
      int8x16_t words[R];
      for (int r = 0; r < R; ++r) words[r] = vreinterpretq_s8_s32(vdupq_n_s32(word_at(x + r * t.x_stride + 4 * s)));
      for (int q = 0; q < 4; ++q) {
        const int8x16_t codes = signed_codes(w + 16 * q);
        for (int r = 0; r < R; ++r) sum[r][q] = vdotq_s32(sum[r][q], codes, words[r]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < 4; ++q) finish(t, r, q, g, sum[r][q]);
  }
}

SK_TARGET_DOTPROD_END

constexpr Int8Kernels kDotprod = {
    5, 1, prepare, {dot_dotprod<1>, dot_dotprod<2>, dot_dotprod<3>, dot_dotprod<4>, dot_dotprod<5>}};

#endif  // SK_DOTPROD

}  // namespace

const Int8Kernels& int8_neon() { return kNeon; }
#if SK_DOTPROD
const Int8Kernels& int8_dotprod() { return kDotprod; }
#endif

}  // namespace sk

#endif  // SK_NEON
