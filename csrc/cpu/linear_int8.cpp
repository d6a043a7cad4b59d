// y = x * w^T with int8 weights. At decode the time is the time to read the weights, so each byte is read once for all
// rows of x: a panel (16 weight rows, pack_int8.h) is walked in chunks of a few KB, and each chunk meets every row of x
// while it is in L1. Sums of int32 are exact, so neither the chunks nor the instruction set can change a bit; the f32
// sums over groups go in ascending order. Only panels are divided between threads.
#include "cpu/linear_int8.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/even_grain.h"
#include "cpu/float_mode.h"
#include "cpu/linear_int8_kernels.h"
#include "cpu/quantize.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int64_t kChunk = 64;     // steps: 4 KB of weights
constexpr int64_t kRowBlock = 64;  // rows of x per sweep over the weights (their sums live on the stack)

// Activations as the kernels want them.
struct Prepared {
  char* words;           // [rows][stride bytes]
  int64_t stride;
  int32_t* offset;       // [rows][groups]: -128 * sum of the group's codes
  const float* scale;    // [rows][...]
  int64_t scale_stride, scale_step;
};

// A buffer that each calling thread keeps; grows, never shrinks below what the largest call needed.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      data_ = nullptr, size_ = 0;
      if (posix_memalign(&data_, 64, bytes) != 0) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<char*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

void widen(const int8_t* q, int64_t group, int word_bytes, char* to, int32_t* offset) {
  int32_t sum = 0;
  for (int64_t i = 0; i < group; ++i) sum += q[i];
  *offset = static_cast<int32_t>(static_cast<uint32_t>(sum) * static_cast<uint32_t>(-128));
  const int64_t padded = (group + kStep - 1) / kStep * kStep;
  if (word_bytes == 1) {
    std::memcpy(to, q, static_cast<size_t>(group));
    std::memset(to + group, 0, static_cast<size_t>(padded - group));
    return;
  }
  int16_t* w = reinterpret_cast<int16_t*>(to);
  int64_t i = 0;
  for (; i + kStep <= group; i += kStep) {
    w[i] = q[i], w[i + 1] = q[i + 2], w[i + 2] = q[i + 1], w[i + 3] = q[i + 3];
  }
  if (i < group) {
    int16_t last[4] = {0, 0, 0, 0};
    for (int64_t j = i; j < group; ++j) last[j - i] = q[j];
    w[i] = last[0], w[i + 1] = last[2], w[i + 2] = last[1], w[i + 3] = last[3];
  }
}

template <class T>
void prepare_float(const T* x, const Int8Shape& shape, int word_bytes, int8_t* codes, char* to, int32_t* offset, float* scale) {
  const QuantizeGroup<T> quantize = quantize_group<T>(isa());
  for (int64_t g = 0; g < shape.groups(); ++g) {
    quantize(x + g * shape.group, shape.group, QuantizeRule(), 0, codes, scale + g, nullptr);
    widen(codes, shape.group, word_bytes, to + g * shape.steps() * kStep * word_bytes, offset + g);
  }
}

template <class T>
void store_row(const float* y, const void* bias, Dtype bias_type, int64_t first, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    float v = y[i];
    if (bias != nullptr) {
      const int64_t n = first + i;
      v += bias_type == Dtype::kF32   ? static_cast<const float*>(bias)[n]
           : bias_type == Dtype::kF16 ? to_f32(static_cast<const F16*>(bias)[n])
                                      : to_f32(static_cast<const BF16*>(bias)[n]);
    }
    out[i] = from_f32<T>(v);
  }
}

void store(const float* y, const Int8Bias& bias, const OutRows& out, int64_t rows, int64_t row0, int64_t first, int64_t count) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = (row0 + r) * out.stride + first;
    const float* from = y + r * kPanelRows;
    switch (out.type) {
      case Dtype::kF32:
        if (bias.data == nullptr)
          std::memcpy(static_cast<float*>(out.data) + at, from, static_cast<size_t>(count) * sizeof(float));
        else
          store_row(from, bias.data, bias.type, first, count, static_cast<float*>(out.data) + at);
        break;
      case Dtype::kF16: store_row(from, bias.data, bias.type, first, count, static_cast<F16*>(out.data) + at); break;
      case Dtype::kBF16: store_row(from, bias.data, bias.type, first, count, static_cast<BF16*>(out.data) + at); break;
    }
  }
}

// One panel against `rows` prepared rows.
void panel(const Int8Kernels& kernel, const Int8Shape& shape, const uint8_t* w, const float* sw, const Prepared& x, int64_t rows,
           float* y) {
  alignas(64) int32_t acc[kRowBlock * kPanelRows];
  const int64_t steps = shape.steps();
  const int blocks = static_cast<int>((rows + kernel.rows - 1) / kernel.rows);
  std::memset(y, 0, static_cast<size_t>(rows * kPanelRows) * sizeof(float));
  for (int64_t g = 0; g < shape.groups(); ++g) {
    std::memset(acc, 0, static_cast<size_t>(rows * kPanelRows) * sizeof(int32_t));
    for (int64_t s = 0; s < steps; s += kChunk) {
      const int64_t count = steps - s < kChunk ? steps - s : kChunk;
      const int64_t at = g * steps + s;
      for (int64_t r = 0; r < rows; r += kernel.rows) {
        const int64_t take = rows - r < kernel.rows ? rows - r : kernel.rows;
        kernel.dot[take - 1](w + at * kStepBytes, count, x.words + r * x.stride + at * kStep * kernel.word_bytes, x.stride,
                             acc + r * kPanelRows, blocks, static_cast<int>(r / kernel.rows));
      }
    }
    kernel.fold(static_cast<int>(rows), acc, x.offset + g, shape.groups(), x.scale + g * x.scale_step, x.scale_stride,
                sw + g * kPanelRows, y);
  }
}

}  // namespace

void linear_int8(const RowBlock& x, const Int8Matrix& w, const Int8Bias& bias, const OutRows& out, int threads) {
  thread_local Scratch scratch;
  if (threads < 1) threads = 1;
  const Int8Shape& shape = w.shape;
  const Int8Kernels& kernel = int8_kernels(isa());
  if (x.rows == 0 || shape.n == 0) return;
  const int64_t block = x.rows < kRowBlock ? x.rows : kRowBlock;
  // An odd number of cache lines between rows, so that they do not all fall into the same few cache sets.
  const int64_t words = shape.groups() * shape.steps() * kStep * kernel.word_bytes;
  const int64_t stride = ((words + 63) / 64 | 1) * 64;
  const int64_t tables = (block * shape.groups() * 4 + 63) / 64 * 64;
  const bool floats = x.type != RowType::kInt8;
  const int64_t codes_stride = floats ? (shape.group + 63) / 64 * 64 : 0;
  char* base = scratch.get(static_cast<size_t>(block * stride + 2 * tables + block * codes_stride));
  Prepared ready;
  ready.words = base;
  ready.stride = stride;
  ready.offset = reinterpret_cast<int32_t*>(base + block * stride);
  float* own_scale = reinterpret_cast<float*>(base + block * stride + tables);
  char* codes = base + block * stride + 2 * tables;

  const int64_t grain = even_grain(shape.panels(), shape.panels() * shape.panel_bytes() * (block > 4 ? block / 4 : 1), threads);

  for (int64_t row0 = 0; row0 < x.rows; row0 += block) {
    const int64_t rows = x.rows - row0 < block ? x.rows - row0 : block;
    const int64_t row_grain = 1 + (1 << 15) / shape.k;
    parallel_for(threads, rows, row_grain, [&](int64_t begin, int64_t end) {
      const IeeeMode ieee;
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = (row0 + r) * x.stride;
        char* to = ready.words + r * stride;
        int32_t* offset = ready.offset + r * shape.groups();
        float* scale = own_scale + r * shape.groups();
        int8_t* q = reinterpret_cast<int8_t*>(codes + r * codes_stride);
        switch (x.type) {
          case RowType::kF32:
            prepare_float(static_cast<const float*>(x.data) + at, shape, kernel.word_bytes, q, to, offset, scale);
            break;
          case RowType::kF16:
            prepare_float(static_cast<const F16*>(x.data) + at, shape, kernel.word_bytes, q, to, offset, scale);
            break;
          case RowType::kBF16:
            prepare_float(static_cast<const BF16*>(x.data) + at, shape, kernel.word_bytes, q, to, offset, scale);
            break;
          case RowType::kInt8:
            for (int64_t g = 0; g < shape.groups(); ++g)
              widen(static_cast<const int8_t*>(x.data) + at + g * shape.group, shape.group, kernel.word_bytes,
                    to + g * shape.steps() * kStep * kernel.word_bytes, offset + g);
            break;
        }
      }
    });
    if (floats) {
      ready.scale = own_scale;
      ready.scale_stride = shape.groups();
      ready.scale_step = 1;
    } else {
      ready.scale = x.scale + row0 * x.scale_stride;
      ready.scale_stride = x.scale_stride;
      ready.scale_step = x.scale_groups == 1 ? 0 : 1;
    }
    parallel_for(threads, shape.panels(), grain, [&](int64_t begin, int64_t end) {
      const IeeeMode ieee;
      alignas(64) float y[kRowBlock * kPanelRows];
      for (int64_t p = begin; p < end; ++p) {
        panel(kernel, shape, w.codes + p * shape.panel_bytes(), w.scale + p * shape.groups() * kPanelRows, ready, rows, y);
        const int64_t first = p * kPanelRows, count = shape.n - first < kPanelRows ? shape.n - first : kPanelRows;
        store(y, bias, out, rows, row0, first, count);
      }
    });
  }
}

}  // namespace sk
