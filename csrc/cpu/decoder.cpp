// The steps of a call meet in buffers of at most kBlock rows: as many as a sweep of linear_int8 over the weights takes,
// so that the weights are read no more often, and the buffers stay in the second-level cache.
#include "cpu/decoder.h"

#include <type_traits>

#include "cpu/scratch.h"

namespace sk {
namespace {

constexpr int64_t kBlock = Int8Rows::kMost;

int64_t size_of(Dtype type) { return type == Dtype::kF32 ? 4 : 2; }

template <class T>
T* advance(T* data, int64_t elements, Dtype type) {
  using Bytes = std::conditional_t<std::is_const_v<T>, const char, char>;
  return data == nullptr ? nullptr : static_cast<Bytes*>(data) + elements * size_of(type);
}

// A norm over one block of rows, and where its result is.
NormArgs block_of(const NormArgs& norm, int64_t row0, void* normed, int threads) {
  NormArgs block = norm;
  block.rows = norm.rows - row0 < kBlock ? norm.rows - row0 : kBlock;
  block.x = advance(norm.x, row0 * norm.x_stride, norm.dtype);
  block.residual = advance(norm.residual, row0 * norm.residual_stride, norm.dtype);
  block.residual_out = advance(norm.residual_out, row0 * norm.residual_out_stride, norm.dtype);
  block.out = RowOutput{};
  block.out.values = normed;
  block.out.values_stride = norm.cols;
  block.threads = threads;
  return block;
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

void multiply(const void* x, Dtype type, int64_t rows, int64_t k, const Matrix& weight, const Bias& bias,
              const PlainRows& out, int threads) {
  if (const Int8Matrix* w = std::get_if<Int8Matrix>(&weight)) {
    linear_int8({static_cast<RowType>(type), x, rows, k, nullptr, 0, 0}, *w, bias, {out.data, type, out.stride},
                threads);
  } else {
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
    const NormArgs part = block_of(norm, row0, normed, threads);
    normalize(part);
    multiply(normed, norm.dtype, part.rows, norm.cols, weight, bias,
             {advance(out.data, row0 * out.stride, norm.dtype), out.stride}, threads);
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
    NormArgs part = block_of(norm, row0, nullptr, threads);
    rms_norm_linear(part, gate_up, {nullptr, Dtype::kF32}, {hidden, 2 * width}, threads);
    GateArgs act{};
    act.dtype = norm.dtype, act.gate = gate, act.threads = threads;
    act.gate_up = hidden, act.rows = part.rows, act.cols = width, act.stride = 2 * width;
    act.out.values = gated, act.out.values_stride = width;
    gate_mul(act);
    multiply(gated, norm.dtype, part.rows, width, down, {nullptr, Dtype::kF32},
             {advance(out.data, row0 * out.stride, norm.dtype), out.stride}, threads);
  }
}

const char* rope_attend(const RopeWrite& write, const Attend& attention, int threads) {
  const char* message = rope_write_kv(write, threads);
  return message != nullptr ? message : attend(attention, threads);
}

}  // namespace sk
