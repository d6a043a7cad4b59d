// y = x * w^T with int8 weights. At decode the time is the time to read the weights, so each byte is read once for all
// rows of x: a panel (16 weight rows, pack_int8.h) is walked in chunks of a few KB, and each chunk meets every row of x
// while it is in L1. Sums of int32 are exact, so neither the chunks nor the instruction set can change a bit; the f32
// sums over groups go in ascending order. Only panels are divided between threads.
#include "cpu/linear_int8.h"

#include <cstring>

#include "cpu/even_grain.h"
#include "cpu/float_mode.h"
#include "cpu/linear_int8_kernels.h"
#include "cpu/quantize.h"
#include "cpu/rotate.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int64_t kChunk = 80;     // steps at most, if several tiles visit a chunk: 5 KB of weights
constexpr int64_t kRowBlock = 64;  // rows of x per sweep over the weights (their sums live on the stack)

int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows of x as the kernels want them.
struct Prepared {
  Prepared(const Int8Shape& shape, const Int8Kernels& kernel, int64_t rows, bool floats, Scratch& scratch)
      : words_per_group(shape.steps() * kStep * kernel.word_bytes),
        // An odd number of cache lines, so that the rows do not all fall into the same few cache sets.
        stride((lines(shape.groups() * words_per_group) / 64 | 1) * 64),
        codes_stride(floats ? lines(shape.group) : 0),
        rotated_stride(floats && shape.rotated ? lines(shape.group * 4) : 0) {
    const int64_t table = lines(rows * shape.groups() * 4);
    words = scratch.get(static_cast<size_t>(rows * (stride + codes_stride + rotated_stride) + 2 * table));
    codes = words + rows * stride;
    rotated = codes + rows * codes_stride;
    offset = reinterpret_cast<int32_t*>(rotated + rows * rotated_stride);
    own_scale = reinterpret_cast<float*>(rotated + rows * rotated_stride + table);
  }

  int64_t words_per_group, stride, codes_stride, rotated_stride;
  char* words;       // [rows][stride bytes]
  char* codes;       // [rows][codes_stride]: one group at a time, on its way from floats to words
  char* rotated;     // [rows][rotated_stride]: the same group before it becomes codes, if the weights are rotated
  int32_t* offset;   // [rows][groups]: -128 * sum of the group's codes
  float* own_scale;  // [rows][groups], if x is float
  const float* scale = nullptr;
  int64_t scale_stride = 0, scale_step = 0;  // between rows, between groups
};

template <class T>
void prepare_floats(const T* x, const Int8Shape& shape, const Int8Kernels& kernel, const Prepared& to, int64_t row) {
  const QuantizeGroup<T> quantize = quantize_group<T>(isa());
  const QuantizeGroup<float> quantize_rotated = quantize_group<float>(isa());
  const RotateGroup<T> rotate = rotate_group<T>(isa());
  const QuantizeRule rule;
  int8_t* codes = reinterpret_cast<int8_t*>(to.codes + row * to.codes_stride);
  float* rotated = reinterpret_cast<float*>(to.rotated + row * to.rotated_stride);
  for (int64_t g = 0; g < shape.groups(); ++g) {
    const T* values = x + g * shape.group;
    float* scale = to.own_scale + row * shape.groups() + g;
    if (shape.rotated) {
      rotate(values, shape.group, 1.0f / static_cast<float>(shape.group), rotated);
      quantize_rotated(rotated, shape.group, rule, 0, codes, scale, nullptr);
    } else {
      quantize(values, shape.group, rule, 0, codes, scale, nullptr);
    }
    to.offset[row * shape.groups() + g] =
        kernel.prepare(codes, shape.group, to.words + row * to.stride + g * to.words_per_group);
  }
}

void prepare_codes(const int8_t* q, const Int8Shape& shape, const Int8Kernels& kernel, const Prepared& to,
                   int64_t row) {
  for (int64_t g = 0; g < shape.groups(); ++g)
    to.offset[row * shape.groups() + g] =
        kernel.prepare(q + g * shape.group, shape.group, to.words + row * to.stride + g * to.words_per_group);
}

void prepare(const RowBlock& x, int64_t row0, int64_t rows, const Int8Shape& shape, const Int8Kernels& kernel,
             Prepared& to, int threads) {
  parallel_for(threads, rows, 1 + (1 << 15) / shape.k, [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t at = (row0 + r) * x.stride;
      switch (x.type) {
        case RowType::kF32: prepare_floats(static_cast<const float*>(x.data) + at, shape, kernel, to, r); break;
        case RowType::kF16: prepare_floats(static_cast<const F16*>(x.data) + at, shape, kernel, to, r); break;
        case RowType::kBF16: prepare_floats(static_cast<const BF16*>(x.data) + at, shape, kernel, to, r); break;
        case RowType::kInt8: prepare_codes(static_cast<const int8_t*>(x.data) + at, shape, kernel, to, r); break;
      }
    }
  });
  const bool codes = x.type == RowType::kInt8;
  to.scale = codes ? x.scale + row0 * x.scale_stride : to.own_scale;
  to.scale_stride = codes ? x.scale_stride : shape.groups();
  to.scale_step = codes && x.scale_groups == 1 ? 0 : 1;
}

// y[rows][16] = the rows' products with one panel.
void multiply_panel(const Int8Kernels& kernel, const Int8Shape& shape, const uint8_t* w, const float* sw,
                    const Prepared& x, int64_t rows, float* y) {
  alignas(64) int32_t acc[kRowBlock * kPanelRows];
  const int64_t steps = shape.steps(), groups = shape.groups();
  Int8Tile t;
  t.x_stride = x.stride, t.x_group = x.words_per_group;
  t.offset_stride = groups;
  t.sx_stride = x.scale_stride, t.sx_group = x.scale_step;
  t.share = static_cast<int>((rows + kernel.rows - 1) / kernel.rows);
  const int64_t take = (rows + t.share - 1) / t.share;  // 9 rows are better served as 5 + 4 than as 8 + 1
  // A stretch that only one tile visits may be as long as the panel; others are whole groups or parts of one.
  const int64_t parts = t.share == 1 ? 1 : (steps + kChunk - 1) / kChunk, part = (steps + parts - 1) / parts;
  const int64_t several = t.share == 1 ? groups : parts > 1 ? 1 : kChunk / steps;
  std::memset(y, 0, static_cast<size_t>(rows * kPanelRows) * sizeof(float));
  for (int64_t g = 0; g < groups; g += several) {
    t.groups = groups - g < several ? groups - g : several;
    t.sw = sw + g * kPanelRows;
    __builtin_prefetch(t.sw + groups * kPanelRows);  // the next panel's
    for (int64_t s = 0; s < steps; s += part) {
      t.steps = steps - s < part ? steps - s : part;
      t.w = w + (g * steps + s) * kStepBytes;
      t.first = s == 0;
      t.last = s + t.steps == steps;
      t.turn = 0;
      for (int64_t r = 0; r < rows; r += take, ++t.turn) {
        t.x = x.words + r * x.stride + (g * steps + s) * kStep * kernel.word_bytes;
        t.acc = acc + r * kPanelRows;
        t.offset = x.offset + r * groups + g;
        t.sx = x.scale + r * x.scale_stride + g * x.scale_step;
        t.y = y + r * kPanelRows;
        kernel.dot[(rows - r < take ? rows - r : take) - 1](t);
      }
    }
  }
}

template <class T>
void store_row(const float* y, const Int8Bias& bias, int64_t first, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    float v = y[i];
    if (bias.data != nullptr) {
      const int64_t n = first + i;
      v += bias.type == Dtype::kF32   ? static_cast<const float*>(bias.data)[n]
           : bias.type == Dtype::kF16 ? to_f32(static_cast<const F16*>(bias.data)[n])
                                      : to_f32(static_cast<const BF16*>(bias.data)[n]);
    }
    out[i] = from_f32<T>(v);
  }
}

void store(const float* y, const Int8Bias& bias, const OutRows& out, int64_t rows, int64_t row0, int64_t first,
           int64_t count) {
  for (int64_t r = 0; r < rows; ++r, y += kPanelRows) {
    const int64_t at = (row0 + r) * out.stride + first;
    switch (out.type) {
      case Dtype::kF32:
        if (bias.data == nullptr && count == kPanelRows)
          std::memcpy(static_cast<float*>(out.data) + at, y, kPanelRows * sizeof(float));
        else
          store_row(y, bias, first, count, static_cast<float*>(out.data) + at);
        break;
      case Dtype::kF16: store_row(y, bias, first, count, static_cast<F16*>(out.data) + at); break;
      case Dtype::kBF16: store_row(y, bias, first, count, static_cast<BF16*>(out.data) + at); break;
    }
  }
}

}  // namespace

void linear_int8(const RowBlock& x, const Int8Matrix& w, const Int8Bias& bias, const OutRows& out, int threads) {
  thread_local Scratch scratch;
  const Int8Shape& shape = w.shape;
  if (x.rows == 0 || shape.n == 0) return;
  if (threads < 1) threads = 1;
  const Int8Kernels& kernel = int8_kernels(isa());
  const int64_t block = x.rows < kRowBlock ? x.rows : kRowBlock, panels = shape.panels();
  Prepared ready(shape, kernel, block, x.type != RowType::kInt8, scratch);
  const int64_t work = panels * shape.panel_bytes() * (block > 4 ? block / 4 : 1);
  for (int64_t row0 = 0; row0 < x.rows; row0 += block) {
    const int64_t rows = x.rows - row0 < block ? x.rows - row0 : block;
    prepare(x, row0, rows, shape, kernel, ready, threads);
    parallel_for(threads, panels, even_grain(panels, work, threads), [&](int64_t begin, int64_t end) {
      const IeeeMode ieee;
      alignas(64) float y[kRowBlock * kPanelRows];
      for (int64_t p = begin; p < end; ++p) {
        const int64_t first = p * kPanelRows, count = shape.n - first < kPanelRows ? shape.n - first : kPanelRows;
        multiply_panel(kernel, shape, w.codes + p * shape.panel_bytes(), w.scale + first * shape.groups(), ready, rows,
                       y);
        store(y, bias, out, rows, row0, first, count);
      }
    });
  }
}

}  // namespace sk
