// y = x * w^T with int8 weights. At decode the time is the time to read the weights, so each byte is read once for all
// rows of x: a panel (16 weight rows, pack_int8.h) is walked in chunks of a few KB, and each chunk meets every row of x
// while it is in L1. Sums of int32 are exact, so neither the chunks nor the instruction set can change a bit; the f32
// sums over groups go in ascending order. Only panels are divided between threads.
#include "cpu/linear_int8.h"

#include <cstring>

#include "cpu/even_grain.h"
#include "cpu/float_mode.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int64_t kChunk = 80;  // steps at most, if several tiles visit a chunk: 5 KB of weights

// y[rows][16] = the rows' products with one panel.
void multiply_panel(const Int8Rows& x, int64_t rows, const uint8_t* w, const float* sw, float* y) {
  alignas(64) int32_t acc[Int8Rows::kMost * kPanelRows];
  const Int8Kernels& kernel = x.kernel;
  const int64_t steps = x.shape.steps(), groups = x.shape.groups();
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
void store_row(const float* y, const Bias& bias, int64_t first, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    float v = y[i];
    if (bias.data != nullptr) {
      const int64_t n = first + i;
      v += bias[n];
    }
    out[i] = from_f32<T>(v);
  }
}

// Outputs first .. first + count of all rows, to column `to` of out.
void store(const float* y, const Bias& bias, const OutRows& out, int64_t rows, int64_t first, int64_t count,
           int64_t to) {
  for (int64_t r = 0; r < rows; ++r, y += kPanelRows) {
    const int64_t at = r * out.stride + to;
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

void multiply_outputs(const Int8Rows& x, int64_t rows, const Int8Matrix& w, const Bias& bias, int64_t begin,
                      int64_t end, const OutRows& out) {
  const IeeeMode ieee;
  const Int8Shape& shape = w.shape;
  alignas(64) float y[Int8Rows::kMost * kPanelRows];
  for (int64_t first = begin; first < end; first += kPanelRows) {
    const int64_t count = end - first < kPanelRows ? end - first : kPanelRows;
    multiply_panel(x, rows, w.codes + first / kPanelRows * shape.panel_bytes(), w.scale + first * shape.groups(), y);
    store(y, bias, out, rows, first, count, first - begin);
  }
}

void multiply(const Int8Rows& x, int64_t rows, const Int8Matrix& w, const Bias& bias, const OutRows& out,
              int64_t row0, int threads) {
  const Int8Shape& shape = w.shape;
  const int64_t panels = shape.panels(), work = panels * shape.panel_bytes() * (rows > 4 ? rows / 4 : 1);
  const int64_t size = out.type == Dtype::kF32 ? 4 : 2;
  parallel_for(threads, panels, even_grain(panels, work, threads), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanelRows, last = end * kPanelRows < shape.n ? end * kPanelRows : shape.n;
    char* const data = static_cast<char*>(out.data) + (row0 * out.stride + first) * size;
    multiply_outputs(x, rows, w, bias, first, last, {data, out.type, out.stride});
  });
}

void linear_int8(const RowBlock& x, const Int8Matrix& w, const Bias& bias, const OutRows& out, int threads) {
  thread_local Scratch scratch;
  if (x.rows == 0 || w.shape.n == 0) return;
  if (threads < 1) threads = 1;
  const int64_t block = x.rows < Int8Rows::kMost ? x.rows : Int8Rows::kMost;
  Int8Rows ready(w.shape, block, scratch);
  for (int64_t row0 = 0; row0 < x.rows; row0 += block) {
    const int64_t rows = x.rows - row0 < block ? x.rows - row0 : block;
    ready.put_block(x, row0, rows, threads);
    multiply(ready, rows, w, bias, out, row0, threads);
  }
}

}  // namespace sk
