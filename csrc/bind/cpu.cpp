// Python module _C_cpu. Integers in (addresses, sizes, strides in elements), range checks, the GIL released, errors as
// exceptions. Shapes, dtypes, strides and devices were checked in Python (specdec_kernels/validate.py); the checks here
// only keep a slip on that side from becoming a wild pointer. One section per kernel family.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "bind/cpu.h"
#include "bind/program.h"
#include "cpu/attention.h"
#include "cpu/decoder.h"
#include "cpu/expand.h"
#include "cpu/ggml.h"
#include "cpu/isa.h"
#include "cpu/linear_f32.h"
#include "cpu/linear_int8.h"
#include "cpu/quantize.h"
#include "cpu/read_bytes.h"
#include "cpu/threads.h"
#include "sk/numerics.h"

namespace py = pybind11;
using namespace sk::bind;

namespace {

void bind_runtime(py::module_& m) {
  m.def("isa", [] { return sk::isa_name(sk::isa()); });
  m.def("machine_isa", [] { return sk::isa_name(sk::machine_isa()); });
  m.def("set_isa", [](const std::string& name) { return sk::set_isa(name.c_str()); });
  m.def("pool_workers", &sk::pool_workers);
  m.def("torch_pool", &sk::torch_pool);
  m.def("use_own_pool", &sk::use_own_pool);
  m.def(  // for tests: counts the pieces, and the one that starts at `bad` throws
      "count_pieces",
      [](int threads, int64_t n, int64_t bad) {
        std::atomic<int64_t> done{0};
        sk::parallel_for(threads, n, 1, [&](int64_t begin, int64_t end) {
          if (begin <= bad && bad < end) throw std::bad_alloc();
          done += end - begin;
        });
        return done.load();
      },
      release_gil());
  m.def(  // for tests and benchmarks: so many jobs of so many pieces, by a team that stays together or one by one
      "count_jobs",
      [](int threads, int64_t jobs, int64_t pieces, bool staying) {
        std::atomic<int64_t> done{0};
        const auto all = [&] {
          for (int64_t j = 0; j < jobs; ++j)
            sk::parallel_for(threads, pieces, 1, [&](int64_t begin, int64_t end) { done += end - begin; });
        };
        staying ? sk::together(threads, all) : all();
        return done.load();
      },
      release_gil());
}

// ---- quantize family ----------------------------------------------------------------------------

void require_rows(int dtype, int64_t rows, int64_t cols, int64_t group) {
  require(dtype >= 0 && dtype <= 2, "dtype: no such code");
  require(rows >= 0 && cols >= 0 && (cols == 0 || (group >= 1 && cols % group == 0)),
          "rows: bad count, length or group");
}

template <class T>
sk::PerGroup<T> per_group(uintptr_t data, int64_t row_stride, int64_t group_stride) {
  return {pointer<T>(data), row_stride, group_stride};
}

sk::RowOutput row_output(uintptr_t values, int64_t values_stride, uintptr_t q, int64_t q_stride, int64_t group,
                         uintptr_t scale, int64_t scale_row, int64_t scale_group, uintptr_t sums, int64_t sums_row,
                         int64_t sums_group) {
  return {pointer<void>(values),
          values_stride,
          pointer<int8_t>(q),
          q_stride,
          group,
          per_group<float>(scale, scale_row, scale_group),
          per_group<int32_t>(sums, sums_row, sums_group)};
}

void bind_quantize(Kernels& m) {
  m.def(
      "quantize_int8",
      [](int dtype, uintptr_t x, int64_t rows, int64_t cols, int64_t group, int64_t x_stride, uintptr_t q,
         int64_t q_stride, uintptr_t scale, int64_t scale_row, int64_t scale_group, uintptr_t zero, int64_t zero_row,
         int64_t zero_group, uintptr_t sums, int64_t sums_row, int64_t sums_group, bool symmetric, bool fixed,
         bool stochastic, uint64_t seed, uint64_t offset, int threads) {
        require_rows(dtype, rows, cols, group);
        require(symmetric == (zero == 0) || rows == 0, "zero_point: wanted exactly when asymmetric");
        sk::quantize_int8({static_cast<sk::Dtype>(dtype),
                           pointer<void>(x),
                           rows,
                           cols,
                           group,
                           x_stride,
                           pointer<int8_t>(q),
                           q_stride,
                           per_group<float>(scale, scale_row, scale_group),
                           per_group<int32_t>(zero, zero_row, zero_group),
                           per_group<int32_t>(sums, sums_row, sums_group),
                           {symmetric, fixed, stochastic, seed},
                           offset,
                           threads});
      },
      release_gil());
  m.def(
      "dequantize_int8",
      [](int dtype, uintptr_t q, int64_t rows, int64_t cols, int64_t group, int64_t q_stride, uintptr_t scale,
         int64_t scale_row, int64_t scale_group, uintptr_t zero, int64_t zero_row, int64_t zero_group, uintptr_t out,
         int64_t out_stride, int threads) {
        require_rows(dtype, rows, cols, group);
        sk::dequantize_int8({static_cast<sk::Dtype>(dtype), pointer<int8_t>(q), rows, cols, group, q_stride,
                             per_group<const float>(scale, scale_row, scale_group),
                             per_group<const int32_t>(zero, zero_row, zero_group), pointer<void>(out), out_stride,
                             threads});
      },
      release_gil());
  m.def(
      "norm",
      [](bool layer, int dtype, uintptr_t x, int64_t rows, int64_t cols, int64_t x_stride, uintptr_t weight,
         uintptr_t bias, double eps, uintptr_t residual, int64_t residual_stride, uintptr_t residual_out,
         int64_t residual_out_stride, uintptr_t values, int64_t values_stride, uintptr_t q, int64_t q_stride,
         int64_t group, uintptr_t scale, int64_t scale_row, int64_t scale_group, uintptr_t sums, int64_t sums_row,
         int64_t sums_group, int threads) {
        require_rows(dtype, rows, cols, values != 0 ? cols : group);
        require((residual == 0) == (residual_out == 0) || rows * cols == 0, "residual: in and out come together");
        sk::normalize({static_cast<sk::Dtype>(dtype), layer, pointer<void>(x), pointer<void>(weight),
                       pointer<void>(bias), pointer<void>(residual), pointer<void>(residual_out), rows, cols, x_stride,
                       residual_stride, residual_out_stride, eps,
                       row_output(values, values_stride, q, q_stride, group, scale, scale_row, scale_group, sums,
                                  sums_row, sums_group),
                       threads});
      },
      release_gil());
  m.def(
      "gate_mul",
      [](int gate, int dtype, uintptr_t gate_up, int64_t rows, int64_t cols, int64_t stride, uintptr_t values,
         int64_t values_stride, uintptr_t q, int64_t q_stride, int64_t group, uintptr_t scale, int64_t scale_row,
         int64_t scale_group, uintptr_t sums, int64_t sums_row, int64_t sums_group, int threads) {
        require_rows(dtype, rows, cols, values != 0 ? cols : group);
        require(gate >= 0 && gate < static_cast<int>(sk::Gate::kCount), "gate: no such function");
        sk::gate_mul({static_cast<sk::Dtype>(dtype), static_cast<sk::Gate>(gate), pointer<void>(gate_up), rows, cols,
                      stride,
                      row_output(values, values_stride, q, q_stride, group, scale, scale_row, scale_group, sums,
                                 sums_row, sums_group),
                      threads});
      },
      release_gil());
}

// ---- linear family ------------------------------------------------------------------------------

sk::Int8Matrix int8_matrix(int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes, uintptr_t scale) {
  require(n >= 0 && k >= 1 && group >= 1 && k % group == 0 && group < (int64_t{1} << 17), "int8 weight: bad shape");
  require(n == 0 || (codes != 0 && codes % 64 == 0 && scale != 0), "int8 weight: null or unaligned");
  require(!rotated || (group & (group - 1)) == 0, "int8 weight: rotated in groups that are no power of two");
  return {{n, k, group, rotated}, pointer<uint8_t>(codes), pointer<float>(scale)};
}

sk::FloatMatrix float_matrix(uintptr_t data, int type, int64_t n, int64_t k, int64_t stride) {
  require(type == 0 || type == 2, "float weight: bad dtype");
  require(n >= 0 && k >= 0, "float weight: bad shape");
  return {pointer<void>(data), static_cast<sk::Dtype>(type), n, k, stride};
}

sk::Bias bias_of(uintptr_t data, int type) {
  require(type >= 0 && type <= 2, "bias: bad dtype");
  return {pointer<void>(data), static_cast<sk::Dtype>(type)};
}

sk::RowBlock row_block(int type, uintptr_t data, int64_t rows, int64_t stride, uintptr_t scale, int64_t scale_stride,
                       int64_t scale_groups) {
  require(type >= 0 && type <= 3 && rows >= 0, "rows: bad type or count");
  require(type != 3 || rows == 0 || scale != 0, "rows: codes without scales");
  return {static_cast<sk::RowType>(type), pointer<void>(data), rows,        stride,
          pointer<float>(scale),          scale_stride,        scale_groups};
}

void bind_linear(Kernels& m) {
  m.def(
      "read_bytes",
      [](uintptr_t data, int64_t n, int threads) { return sk::read_bytes(pointer<void>(data), n, threads); },
      release_gil());
  m.def(
      "pack_int8",
      [](int type, uintptr_t data, int64_t rows, int64_t stride, uintptr_t row_scale, int64_t scale_stride,
         int64_t scale_groups, int64_t start, int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes,
         uintptr_t scale, int threads) {
        require(start >= 0 && start % sk::kPanelRows == 0 && start + rows <= n, "pack_int8: rows outside the matrix");
        sk::pack_int8(row_block(type, data, rows, stride, row_scale, scale_stride, scale_groups), start,
                      int8_matrix(n, k, group, rotated, codes, scale), threads);
      },
      release_gil());
  m.def(
      "rows_int8",
      [](int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes, uintptr_t scale, uintptr_t ids,
         int64_t count, uintptr_t out, int64_t out_stride, int threads) {
        const int64_t* id = pointer<int64_t>(ids);
        for (int64_t i = 0; i < count; ++i)
          if (id[i] < 0 || id[i] >= n)
            throw std::invalid_argument("ids: expected row numbers in 0.." + std::to_string(n - 1) + ", got " +
                                        std::to_string(id[i]));
        sk::rows_int8(int8_matrix(n, k, group, rotated, codes, scale), id, count, pointer<float>(out), out_stride,
                      threads);
      },
      release_gil());
  m.def(
      "expand",
      [](int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes, uintptr_t scale, uintptr_t out,
         int out_type, int64_t out_stride, int threads) {
        require(out_type >= 0 && out_type <= 2, "expand: bad dtype");
        sk::expand(int8_matrix(n, k, group, rotated, codes, scale),
                   {pointer<void>(out), static_cast<sk::Dtype>(out_type), out_stride}, threads);
      },
      release_gil());
  m.def(
      "linear_int8",
      [](int type, uintptr_t x, int64_t rows, int64_t stride, uintptr_t x_scale, int64_t scale_stride,
         int64_t scale_groups, int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes, uintptr_t scale,
         uintptr_t bias, int bias_type, uintptr_t out, int out_type, int64_t out_stride, int threads) {
        require(type != 3 || !rotated, "linear_int8: codes for a rotated weight");
        require(out_type >= 0 && out_type <= 2, "linear_int8: bad dtype");
        sk::linear_int8(row_block(type, x, rows, stride, x_scale, scale_stride, scale_groups),
                        int8_matrix(n, k, group, rotated, codes, scale),
                        bias_of(bias, bias_type),
                        {pointer<void>(out), static_cast<sk::Dtype>(out_type), out_stride}, threads);
      },
      release_gil());
  m.def(
      "linear_f32",
      [](uintptr_t x, int64_t rows, int64_t stride, uintptr_t w, int w_type, int64_t n, int64_t k, int64_t w_stride,
         uintptr_t bias, int bias_type, uintptr_t out, int64_t out_stride, int threads) {
        require(rows >= 0, "linear_f32: bad shape");
        sk::linear_f32({pointer<float>(x), rows, stride}, float_matrix(w, w_type, n, k, w_stride),
                       bias_of(bias, bias_type), pointer<float>(out), out_stride, threads);
      },
      release_gil());
}

// ---- attention family ---------------------------------------------------------------------------

void check(const char* message) {
  if (message != nullptr) throw std::invalid_argument(message);
}

sk::Cache cache(int type, uintptr_t k, int64_t k_page, int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_page,
                int64_t v_token, int64_t v_head, uintptr_t k_scale, int64_t ks_page, int64_t ks_token, int64_t ks_head,
                uintptr_t v_scale, int64_t vs_page, int64_t vs_token, int64_t vs_head, int64_t pages, int64_t page_size,
                int64_t heads, int64_t dim, int64_t value_dim) {
  require(type >= 0 && type <= 3, "cache: type");
  require(pages >= 0 && page_size > 0 && heads >= 0 && dim >= 0 && value_dim >= 0, "cache: sizes");
  return {static_cast<sk::CacheType>(type),
          {pointer<void>(k), k_page, k_token, k_head},
          {pointer<void>(v), v_page, v_token, v_head},
          {pointer<float>(k_scale), ks_page, ks_token, ks_head},
          {pointer<float>(v_scale), vs_page, vs_token, vs_head},
          pages,
          page_size,
          heads,
          dim,
          value_dim};
}

sk::RopeWrite rope_write(int dtype, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t cos, uintptr_t sin, int64_t q_row,
                         int64_t k_row, int64_t v_row, int64_t table_row, int64_t tokens, int64_t q_heads,
                         uintptr_t slots, bool hadamard, FieldsOf<cache> fields) {
  require(dtype >= 0 && dtype <= 2 && tokens >= 0 && q_heads >= 0, "rope_write_kv: dtype or sizes");
  const sk::Cache to = std::apply(cache, fields);
  require(to.dim % 2 == 0 && (!hadamard || (to.dim & (to.dim - 1)) == 0), "rope_write_kv: head dimension");
  return {static_cast<sk::Dtype>(dtype),
          pointer<void>(q),
          pointer<const void>(k),
          pointer<const void>(v),
          pointer<const float>(cos),
          pointer<const float>(sin),
          q_row,
          k_row,
          v_row,
          table_row,
          tokens,
          q_heads,
          pointer<const int64_t>(slots),
          hadamard,
          to};
}

sk::Attend attend(int dtype, uintptr_t q, uintptr_t out, int64_t q_batch, int64_t q_row, int64_t batch, int64_t rows,
                  int64_t heads, int64_t table_width, uintptr_t page_table, uintptr_t lengths, uintptr_t mask,
                  float scale, FieldsOf<cache> fields) {
  require(dtype >= 0 && dtype <= 2 && batch >= 0 && rows >= 0 && table_width >= 0, "attend: dtype or sizes");
  const sk::Cache from = std::apply(cache, fields);
  require(from.heads > 0 && heads >= 0 && heads % from.heads == 0, "attend: heads");
  return {static_cast<sk::Dtype>(dtype),
          pointer<const void>(q),
          pointer<void>(out),
          q_batch,
          q_row,
          batch,
          rows,
          heads,
          table_width,
          pointer<const int32_t>(page_table),
          pointer<const int32_t>(lengths),
          pointer<const uint8_t>(mask),
          scale,
          from};
}

void bind_attention(Kernels& m) {
  // Structures come as tuples of their fields, so that rope_attend takes both without naming them again.
  m.def(
      "rope_write_kv",
      [](FieldsOf<rope_write> call, int threads) { check(sk::rope_write_kv(std::apply(rope_write, call), threads)); },
      release_gil());
  m.def(
      "attend", [](FieldsOf<attend> call, int threads) { check(sk::attend(std::apply(attend, call), threads)); },
      release_gil());
}

// ---- decoder family -----------------------------------------------------------------------------

sk::NormArgs norm(int dtype, uintptr_t x, int64_t rows, int64_t cols, int64_t x_stride, uintptr_t weight, double eps,
                  uintptr_t residual, int64_t residual_stride, uintptr_t residual_out, int64_t residual_out_stride) {
  require_rows(dtype, rows, cols, cols);
  require((residual == 0) == (residual_out == 0) || rows * cols == 0, "residual: in and out come together");
  sk::NormArgs args{};
  args.dtype = static_cast<sk::Dtype>(dtype), args.eps = eps, args.rows = rows, args.cols = cols;
  args.x = pointer<void>(x), args.x_stride = x_stride, args.weight = pointer<void>(weight);
  args.residual = pointer<void>(residual), args.residual_stride = residual_stride;
  args.residual_out = pointer<void>(residual_out), args.residual_out_stride = residual_out_stride;
  return args;
}

using MatrixFields = std::variant<FieldsOf<int8_matrix>, FieldsOf<float_matrix>>;

sk::Matrix matrix(const MatrixFields& fields, const sk::NormArgs& norm) {
  require(fields.index() == 0 || norm.dtype == sk::Dtype::kF32, "float weight: rows of another dtype than float32");
  if (fields.index() == 0) return std::apply(int8_matrix, std::get<0>(fields));
  return std::apply(float_matrix, std::get<1>(fields));
}

void bind_decoder(Kernels& m) {
  m.def(
      "rms_norm_linear",
      [](FieldsOf<norm> rows, MatrixFields weight, uintptr_t bias, int bias_type, uintptr_t out, int64_t out_stride,
         int threads) {
        const sk::NormArgs args = std::apply(norm, rows);
        sk::rms_norm_linear(args, matrix(weight, args), bias_of(bias, bias_type),
                            {pointer<void>(out), out_stride}, threads);
      },
      release_gil());
  m.def(
      "rope_attend",
      [](FieldsOf<rope_write> write, FieldsOf<attend> attention, int threads) {
        check(sk::rope_attend(std::apply(rope_write, write), std::apply(attend, attention), threads));
      },
      release_gil());
  m.def(
      "gated_mlp",
      [](FieldsOf<norm> rows, MatrixFields gate_up, int gate, MatrixFields down, uintptr_t out, int64_t out_stride,
         int threads) {
        require(gate >= 0 && gate < static_cast<int>(sk::Gate::kCount), "gate: no such function");
        const sk::NormArgs args = std::apply(norm, rows);
        sk::gated_mlp(args, matrix(gate_up, args), static_cast<sk::Gate>(gate), matrix(down, args),
                      {pointer<void>(out), out_stride}, threads);
      },
      release_gil());
}

// ---- ggml family --------------------------------------------------------------------------------

void dequantize_ggml(int threads, int kind, uintptr_t blocks, int64_t row_stride, uintptr_t out, int64_t out_stride,
                     int64_t rows, int64_t blocks_per_row) {
  require(kind >= 0 && kind < static_cast<int>(sk::GgmlKind::kCount), "kind: not a ggml kind");
  require(blocks && out && rows >= 0 && blocks_per_row >= 0, "dequantize_ggml: bad address or size");
  sk::dequantize_ggml(threads, static_cast<sk::GgmlKind>(kind), pointer<const uint8_t>(blocks), row_stride,
                      pointer<float>(out), out_stride, rows, blocks_per_row);
}

void bind_ggml(Kernels& m) { m.def("dequantize_ggml", &dequantize_ggml, release_gil()); }

}  // namespace

PYBIND11_MODULE(_C_cpu, m) {
  m.doc() = "CPU kernels of specdec_kernels (raw pointers; use the package, not this module)";
  bind_program(m);
  bind_runtime(m);
  Kernels kernels(m);

  // quantize
  bind_quantize(kernels);

  // linear
  bind_linear(kernels);

  // verify
  bind_verify(m);

  // attention
  bind_attention(kernels);

  // guesses
  bind_guesses(m);

  // decoder
  bind_decoder(kernels);

  // ggml
  bind_ggml(kernels);

  // streaming
  bind_mapping(m);
  bind_uring(m);
}
