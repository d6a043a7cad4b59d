// The steps of a call meet in buffers of at most kBlock rows: as many as a sweep of linear_int8 over the weights takes,
// so that the weights are read no more often, and the buffers stay in the second-level cache. A thread that makes a row
// quantises it as well, so that there is one job before each product.
#include "cpu/decoder.h"

#include <type_traits>

#include "cpu/even_grain.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int64_t kBlock = Int8Rows::kMost;

int64_t size_of(Dtype type) { return type == Dtype::kF32 ? 4 : 2; }

template <class T>
T* advance(T* data, int64_t elements, Dtype type) {
  using Bytes = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Bytes*>(data) + elements * size_of(type);
}

// Rows first .. first + rows of a norm, one after another in `normed`.
NormArgs part_of(const NormArgs& norm, int64_t first, int64_t rows, void* normed) {
  NormArgs part = norm;
  part.rows = rows;
  part.x = advance(norm.x, first * norm.x_stride, norm.dtype);
  part.residual = advance(norm.residual, first * norm.residual_stride, norm.dtype);
  part.residual_out = advance(norm.residual_out, first * norm.residual_out_stride, norm.dtype);
  part.out = RowOutput{};
  part.out.values = normed;
  part.out.values_stride = norm.cols;
  part.threads = 1;
  return part;
}

int64_t rows_of(const Matrix& m) {
  return std::visit(
      [](const auto& w) -> int64_t {
        if constexpr (std::is_same_v<std::decay_t<decltype(w)>, Int8Matrix>)
          return w.shape.n;
        else
          return w.n;
      },
      m);
}

// out = x * weight^T + bias, where make(begin, end) makes these rows of x, in some `ns` nanoseconds per value.
template <class Make>
void make_and_multiply(void* x, Dtype type, int64_t rows, int64_t k, double ns, Make&& make, const Matrix& weight,
                       const Bias& bias, const PlainRows& out, int threads) {
  if (const Int8Matrix* w = std::get_if<Int8Matrix>(&weight)) {
    thread_local Scratch scratch;
    const Int8Rows ready(w->shape, rows, scratch);
    parallel_for(threads, rows, row_grain(rows, k, ns + 0.6), [&](int64_t begin, int64_t end) {
      make(begin, end);
      ready.put_rows({static_cast<RowType>(type), x, rows, k, nullptr, 0, 0}, 0, begin, end);
    });
    multiply(ready, rows, *w, bias, {out.data, type, out.stride}, 0, threads);
  } else {
    parallel_for(threads, rows, row_grain(rows, k, ns), make);
    linear_f32({static_cast<const float*>(x), rows, k}, std::get<FloatMatrix>(weight), bias,
               static_cast<float*>(out.data), out.stride, threads);
  }
}

}  // namespace

void rms_norm_linear(const NormArgs& norm, const Matrix& weight, const Bias& bias, const PlainRows& out,
                     int threads) {
  thread_local Scratch scratch;
  const int64_t block = norm.rows < kBlock ? norm.rows : kBlock;
  void* const normed = scratch.get(static_cast<size_t>(block * norm.cols * size_of(norm.dtype)));
  for (int64_t row0 = 0; row0 < norm.rows; row0 += kBlock) {
    const auto make = [&](int64_t begin, int64_t end) {
      normalize(part_of(norm, row0 + begin, end - begin, advance(normed, begin * norm.cols, norm.dtype)));
    };
    make_and_multiply(normed, norm.dtype, norm.rows - row0 < kBlock ? norm.rows - row0 : kBlock, norm.cols, 0.5, make,
                      weight, bias, {advance(out.data, row0 * out.stride, norm.dtype), out.stride}, threads);
  }
}

void gated_mlp(const NormArgs& norm, const Matrix& gate_up, Gate gate, const Matrix& down, const PlainRows& out,
               int threads) {
  thread_local Scratch scratch;
  const int64_t block = norm.rows < kBlock ? norm.rows : kBlock, width = rows_of(gate_up) / 2;
  const int64_t row = (3 * width) * size_of(norm.dtype);
  void* const hidden = scratch.get(static_cast<size_t>(block * row));
  void* const gated = advance(hidden, block * 2 * width, norm.dtype);
  for (int64_t row0 = 0; row0 < norm.rows; row0 += kBlock) {
    const int64_t rows = norm.rows - row0 < kBlock ? norm.rows - row0 : kBlock;
    rms_norm_linear(part_of(norm, row0, rows, nullptr), gate_up, {nullptr, Dtype::kF32}, {hidden, 2 * width}, threads);
    const auto make = [&](int64_t begin, int64_t end) {
      GateArgs act{};
      act.dtype = norm.dtype, act.gate = gate, act.threads = 1;
      act.gate_up = advance(hidden, begin * 2 * width, norm.dtype), act.stride = 2 * width;
      act.rows = end - begin, act.cols = width;
      act.out.values = advance(gated, begin * width, norm.dtype), act.out.values_stride = width;
      gate_mul(act);
    };
    make_and_multiply(gated, norm.dtype, rows, width, 0.8, make, down, {nullptr, Dtype::kF32},
                      {advance(out.data, row0 * out.stride, norm.dtype), out.stride}, threads);
  }
}

const char* rope_attend(const RopeWrite& write, const Attend& attention, int threads) {
  const char* message = rope_write_kv(write, threads);
  return message != nullptr ? message : attend(attention, threads);
}

}  // namespace sk
