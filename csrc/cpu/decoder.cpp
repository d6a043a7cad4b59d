// The steps of a call meet in buffers of at most kBlock rows: as many as a sweep of linear_int8 over the weights takes,
// so that the weights are read no more often, and the buffers stay in the second-level cache. A thread that makes a row
// quantises it as well, so that there is one job before each product. Between the two products of a gated feed-forward
// there is none: a thread makes gates and their partners for whole groups of the second product's input, multiplies and
// quantises them, so that nothing but codes goes from one core to another.
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

// Rows for a product with w, where make(begin, end) makes these rows of x in some `ns` nanoseconds per value.
template <class Make>
Int8Rows make_rows(const void* x, Dtype type, int64_t rows, double ns, Make&& make, const Int8Matrix& w,
                   Scratch& scratch, int threads) {
  const Int8Rows ready(w.shape, rows, scratch);
  const int64_t k = w.shape.k;
  parallel_for(threads, rows, row_grain(rows, k, ns + 0.6), [&](int64_t begin, int64_t end) {
    make(begin, end);
    ready.put_rows({static_cast<RowType>(type), x, rows, k, nullptr, 0, 0}, 0, begin, end);
  });
  return ready;
}

// out = x * weight^T + bias for rows that are made like that.
template <class Make>
void make_and_multiply(const void* x, Dtype type, int64_t rows, int64_t k, double ns, Make&& make,
                       const Matrix& weight, const Bias& bias, const PlainRows& out, int threads) {
  if (const Int8Matrix* w = std::get_if<Int8Matrix>(&weight)) {
    thread_local Scratch scratch;
    multiply(make_rows(x, type, rows, ns, make, *w, scratch, threads), rows, *w, bias, {out.data, type, out.stride}, 0,
             threads);
  } else {
    parallel_for(threads, rows, row_grain(rows, k, ns), make);
    linear_f32({static_cast<const float*>(x), rows, k}, std::get<FloatMatrix>(weight), bias,
               static_cast<float*>(out.data), out.stride, threads);
  }
}

constexpr double kNormTime = 0.5, kGateTime = 0.8;  // nanoseconds per value

// `norm` and `normed` for rows row0 .. of a call, one block of them.
auto norm_maker(const NormArgs& norm, int64_t row0, void* normed) {
  return [=, &norm](int64_t begin, int64_t end) {
    normalize(part_of(norm, row0 + begin, end - begin, advance(normed, begin * norm.cols, norm.dtype)));
  };
}

// rows x [gates, their partners] to rows x gated.
void gate_rows(const void* pairs, Dtype type, Gate gate, int64_t rows, int64_t cols, void* out) {
  GateArgs args{};
  args.dtype = type, args.gate = gate, args.threads = 1;
  args.gate_up = pairs, args.rows = rows, args.cols = cols, args.stride = 2 * cols;
  args.out.values = out, args.out.values_stride = cols;
  gate_mul(args);
}

template <class T>
void put_groups(const Int8Rows& to, int64_t rows, int64_t begin, int64_t end, const void* x) {
  const int64_t group = to.shape.group, cols = (end - begin) * group;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = begin; g < end; ++g)
      to.put_group(r, g, static_cast<const T*>(x) + r * cols + (g - begin) * group);
}

// By groups of what `down` takes: their gates and partners, the products of these, the codes.
void gated_groups(const Int8Rows& x, int64_t rows, const Int8Matrix& gate_up, Gate gate, Dtype type,
                  const Int8Rows& to, int threads) {
  const int64_t group = to.shape.group, groups = to.shape.groups(), width = to.shape.k;
  const int64_t work = gate_up.shape.panels() * gate_up.shape.panel_bytes() * (rows > 4 ? rows / 4 : 1);
  parallel_for(threads, groups, even_grain(groups, work, threads), [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    const int64_t first = begin * group, cols = (end - begin) * group;
    char* const pairs = scratch.get(static_cast<size_t>(3 * rows * cols * size_of(type)));
    void* const gated = advance(pairs, 2 * rows * cols, type);
    const Bias none{nullptr, Dtype::kF32};
    multiply_outputs(x, rows, gate_up, none, first, first + cols, {pairs, type, 2 * cols});
    multiply_outputs(x, rows, gate_up, none, width + first, width + first + cols,
                     {advance(pairs, cols, type), type, 2 * cols});
    gate_rows(pairs, type, gate, rows, cols, gated);
    switch (type) {
      case Dtype::kF32: put_groups<float>(to, rows, begin, end, gated); break;
      case Dtype::kF16: put_groups<F16>(to, rows, begin, end, gated); break;
      case Dtype::kBF16: put_groups<BF16>(to, rows, begin, end, gated); break;
    }
  });
}

// Whether groups of `down` are made of whole panels of `gate_up`.
bool in_groups(const Int8Matrix& gate_up, const Int8Matrix& down) {
  const int64_t group = down.shape.group;
  return group % kPanelRows == 0 && group <= Int8Rows::kSmallGroup && gate_up.shape.n == 2 * down.shape.k;
}

}  // namespace

void rms_norm_linear(const NormArgs& norm, const Matrix& weight, const Bias& bias, const PlainRows& out,
                     int threads) {
  thread_local Scratch scratch;
  const int64_t block = norm.rows < kBlock ? norm.rows : kBlock;
  void* const normed = scratch.get(static_cast<size_t>(block * norm.cols * size_of(norm.dtype)));
  for (int64_t row0 = 0; row0 < norm.rows; row0 += kBlock)
    make_and_multiply(normed, norm.dtype, norm.rows - row0 < kBlock ? norm.rows - row0 : kBlock, norm.cols, kNormTime,
                      norm_maker(norm, row0, normed), weight, bias,
                      {advance(out.data, row0 * out.stride, norm.dtype), out.stride}, threads);
}

void gated_mlp(const NormArgs& norm, const Matrix& gate_up, Gate gate, const Matrix& down, const PlainRows& out,
               int threads) {
  thread_local Scratch scratch, x_scratch, gated_scratch;
  const Dtype type = norm.dtype;
  const int64_t block = norm.rows < kBlock ? norm.rows : kBlock, width = rows_of(gate_up) / 2;
  const Int8Matrix *first = std::get_if<Int8Matrix>(&gate_up), *second = std::get_if<Int8Matrix>(&down);
  const bool grouped = first != nullptr && second != nullptr && in_groups(*first, *second);
  const int64_t row = grouped ? norm.cols : 3 * width;
  void* const hidden = scratch.get(static_cast<size_t>(block * row * size_of(type)));
  void* const gated = advance(hidden, grouped ? 0 : block * 2 * width, type);
  for (int64_t row0 = 0; row0 < norm.rows; row0 += kBlock) {
    const int64_t rows = norm.rows - row0 < kBlock ? norm.rows - row0 : kBlock;
    const PlainRows to{advance(out.data, row0 * out.stride, type), out.stride};
    if (grouped) {
      const Int8Rows x =
          make_rows(hidden, type, rows, kNormTime, norm_maker(norm, row0, hidden), *first, x_scratch, threads);
      const Int8Rows codes(second->shape, rows, gated_scratch);
      gated_groups(x, rows, *first, gate, type, codes, threads);
      multiply(codes, rows, *second, {nullptr, Dtype::kF32}, {to.data, type, to.stride}, 0, threads);
      continue;
    }
    rms_norm_linear(part_of(norm, row0, rows, nullptr), gate_up, {nullptr, Dtype::kF32}, {hidden, 2 * width}, threads);
    const auto make = [&](int64_t begin, int64_t end) {
      gate_rows(advance(hidden, begin * 2 * width, type), type, gate, end - begin, width,
                advance(gated, begin * width, type));
    };
    make_and_multiply(gated, type, rows, width, kGateTime, make, down, {nullptr, Dtype::kF32}, to, threads);
  }
}

const char* rope_attend(const RopeWrite& write, const Attend& attention, int threads) {
  const char* message = rope_write_kv(write, threads);
  return message != nullptr ? message : attend(attention, threads);
}

}  // namespace sk
