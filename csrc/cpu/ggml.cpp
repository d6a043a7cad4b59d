// ggml's block formats, the ones that GGUF files of common models hold.
//
// A block is a packed little-endian record: f16 scale d (and minimum m), then small integers q. Formats of 32 elements
// keep element i in the low and element i + 16 in the high half of byte i. The K formats have 256 elements and 4- to
// 8-bit scales of their sub-blocks. The operations and their order are the specification (specdec_kernels/ggml.py), so
// the loops below are plain and left to the compiler: without contraction their bits are those of any other backend.
// Blocks have any alignment, hence the memcpy in load().
#include "cpu/ggml.h"

#include <cstring>

#include "cpu/threads.h"
#include "sk/numerics.h"

namespace sk {
namespace {

template <class T>
T load(const uint8_t* p) {
  T value;
  memcpy(&value, p, sizeof value);
  return value;
}

float half(const uint8_t* p) { return to_f32(load<F16>(p)); }
float signed_byte(uint8_t b) { return static_cast<float>(static_cast<int8_t>(b)); }

struct F32Block {
  static constexpr int kElements = 1, kBytes = 4;
  static void decode(const uint8_t* b, float* y) { *y = load<float>(b); }
};

struct F16Block {
  static constexpr int kElements = 1, kBytes = 2;
  static void decode(const uint8_t* b, float* y) { *y = half(b); }
};

struct BF16Block {
  static constexpr int kElements = 1, kBytes = 2;
  static void decode(const uint8_t* b, float* y) { *y = to_f32(load<BF16>(b)); }
};

struct Q4_0 {
  static constexpr int kElements = 32, kBytes = 18;
  static void decode(const uint8_t* b, float* y) {
    const float d = half(b);
    const uint8_t* q = b + 2;
    for (int i = 0; i < 16; ++i) y[i] = d * static_cast<float>((q[i] & 15) - 8);
    for (int i = 0; i < 16; ++i) y[i + 16] = d * static_cast<float>((q[i] >> 4) - 8);
  }
};

struct Q4_1 {
  static constexpr int kElements = 32, kBytes = 20;
  static void decode(const uint8_t* b, float* y) {
    const float d = half(b), m = half(b + 2);
    const uint8_t* q = b + 4;
    for (int i = 0; i < 16; ++i) y[i] = d * static_cast<float>(q[i] & 15) + m;
    for (int i = 0; i < 16; ++i) y[i + 16] = d * static_cast<float>(q[i] >> 4) + m;
  }
};

struct Q8_0 {
  static constexpr int kElements = 32, kBytes = 34;
  static void decode(const uint8_t* b, float* y) {
    const float d = half(b);
    for (int i = 0; i < 32; ++i) y[i] = d * signed_byte(b[2 + i]);
  }
};

struct Q4_K {
  static constexpr int kElements = 256, kBytes = 144;
  // 8 sub-blocks of 32 with 6-bit scales and minima: numbers 0-3 in the low bits of s[0..3] and s[4..7], numbers 4-7
  // with their low 4 bits in s[8..11] and their high 2 bits at the top of s[0..7].
  static void decode(const uint8_t* b, float* y) {
    const float d = half(b), m = half(b + 2);
    const uint8_t *s = b + 4, *q = b + 16;
    for (int j = 0; j < 8; ++j) {
      const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
      const int minimum = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
      const float ds = d * static_cast<float>(scale), ms = m * static_cast<float>(minimum);
      const uint8_t* run = q + 32 * (j / 2);  // low halves: even sub-block, high halves: odd one
      const int shift = 4 * (j % 2);
      for (int i = 0; i < 32; ++i) y[32 * j + i] = ds * static_cast<float>((run[i] >> shift) & 15) - ms;
    }
  }
};

struct Q6_K {
  static constexpr int kElements = 256, kBytes = 210;
  // Two halves of 4 runs of 32 elements. Run r takes 4 low bits from the low (r < 2) or high halves of 64 bytes and 2
  // high bits from bit pair r of 32 bytes. 16 elements share an 8-bit scale.
  static void decode(const uint8_t* b, float* y) {
    const float d = half(b + 208);
    for (int run = 0; run < 8; ++run) {
      const int h = run / 4, r = run % 4;
      const uint8_t *low = b + 64 * h + 32 * (r % 2), *high = b + 128 + 32 * h;
      const int low_shift = 4 * (r / 2), high_shift = 2 * r;
      for (int part = 0; part < 2; ++part) {
        const float ds = d * signed_byte(b[192 + 2 * run + part]);
        for (int i = 16 * part; i < 16 * part + 16; ++i) {
          const int q = ((low[i] >> low_shift) & 15) | (((high[i] >> high_shift) & 3) << 4);
          y[32 * run + i] = ds * static_cast<float>(q - 32);
        }
      }
    }
  }
};

template <class Block>
void decode_rows(int threads, const uint8_t* blocks, int64_t row_stride, float* out, int64_t out_stride, int64_t rows,
                 int64_t blocks_per_row) {
  constexpr int64_t kGrain = 32768 / Block::kElements;  // a piece is some 10 us of work
  parallel_for(threads, rows * blocks_per_row, kGrain, [=](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / blocks_per_row, first = begin % blocks_per_row;
      const int64_t last = blocks_per_row < first + (end - begin) ? blocks_per_row : first + (end - begin);
      const uint8_t* from = blocks + row * row_stride;
      float* to = out + row * out_stride;
      for (int64_t i = first; i < last; ++i) Block::decode(from + i * Block::kBytes, to + i * Block::kElements);
      begin += last - first;
    }
  });
}

}  // namespace

void dequantize_ggml(int threads, GgmlKind kind, const uint8_t* blocks, int64_t row_stride, float* out,
                     int64_t out_stride, int64_t rows, int64_t blocks_per_row) {
  auto decode = decode_rows<F32Block>;
  switch (kind) {
    case GgmlKind::kF32: break;
    case GgmlKind::kF16: decode = decode_rows<F16Block>; break;
    case GgmlKind::kBF16: decode = decode_rows<BF16Block>; break;
    case GgmlKind::kQ4_0: decode = decode_rows<Q4_0>; break;
    case GgmlKind::kQ4_1: decode = decode_rows<Q4_1>; break;
    case GgmlKind::kQ8_0: decode = decode_rows<Q8_0>; break;
    case GgmlKind::kQ4_K: decode = decode_rows<Q4_K>; break;
    case GgmlKind::kQ6_K: decode = decode_rows<Q6_K>; break;
    case GgmlKind::kCount: return;
  }
  decode(threads, blocks, row_stride, out, out_stride, rows, blocks_per_row);
}

}  // namespace sk
