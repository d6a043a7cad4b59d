// Bindings of norms and gates (plain and quantising), of the rotary write to a cache, and of a packed matrix as floats.
#include <array>
#include <tuple>

#include "bind/gpu.h"

namespace sk::gpu::bind {
namespace {

using Rows2d = std::pair<uintptr_t, int64_t>;  // address and row stride, or (0, 0)
using Groups = std::tuple<uintptr_t, int64_t, int64_t>;  // address, row stride, group stride, or zeros
using Strides = std::array<int64_t, 3>;

// Codes, scales and sums: q is (0, 0) where a plain result is asked for.
Codes codes_of(const Rows2d& q, const Groups& scale, const Groups& sums) {
  const auto [scales, scale_row, scale_group] = scale;
  const auto [totals, sums_row, sums_group] = sums;
  return {pointer<int8_t>(q.first), q.second, {pointer<float>(scales), scale_row, scale_group},
          {pointer<int32_t>(totals), sums_row, sums_group}};
}

void norm_(int dtype, int64_t rows, int64_t width, const Rows2d& x, const Rows2d& residual, const Rows2d& residual_out,
           uintptr_t weight, uintptr_t bias, double eps, bool centred, const Rows2d& out, int64_t group,
           const Rows2d& q, const Groups& scale, const Groups& sums, int device, uintptr_t stream) {
  Norm args{};
  require(rows >= 0 && width >= 0 && (rows * width == 0 || group > 0), "rows, width, group: expected no negative number");
  require(rows * width == 0 || (x.first && weight), "x, weight: expected addresses");
  require(rows * width == 0 || !residual.first || residual_out.first, "residual_out: expected an address");
  args.rows = rows, args.width = width, args.eps = eps, args.centred = centred;
  args.x = pointer<const void>(x.first), args.x_stride = x.second;
  args.residual = pointer<const void>(residual.first), args.residual_stride = residual.second;
  args.residual_out = pointer<void>(residual_out.first), args.residual_out_stride = residual_out.second;
  args.weight = pointer<const void>(weight), args.bias = pointer<const void>(bias);
  args.quantize = std::get<0>(scale) != 0;
  args.out = pointer<void>(out.first), args.out_stride = out.second;
  args.group = group, args.codes = codes_of(q, scale, sums);
  require(rows * width == 0 || (args.quantize ? q.first : out.first), "out: expected an address");
  check(norm(args, static_cast<Dtype>(dtype), device, pointer<void>(stream)), "norm");
}

void gate_mul_(int dtype, int gate, int64_t rows, int64_t groups, int64_t width, const Rows2d& gate_up,
               const Rows2d& out, const Rows2d& q, const Groups& scale, const Groups& sums, int device,
               uintptr_t stream) {
  GateMul args{};
  require(rows >= 0 && groups >= 0 && width >= 0, "rows, groups and width: expected no negative number");
  args.shape = {rows, groups, width};
  args.gate = static_cast<Gate>(gate);
  args.gate_up = pointer<const void>(gate_up.first), args.stride = gate_up.second;
  args.quantize = std::get<0>(scale) != 0;
  args.out = pointer<void>(out.first), args.out_stride = out.second;
  args.codes = codes_of(q, scale, sums);
  const bool given = gate_up.first && (args.quantize ? q.first : out.first);
  require(rows * groups * width == 0 || given, "gate_up, out: expected addresses");
  check(gate_mul(args, static_cast<Dtype>(dtype), device, pointer<void>(stream)), "gate_mul");
}

KvCache cache_of(uintptr_t data, const Strides& strides, uintptr_t scale, const Strides& scale_strides, int dtype) {
  KvCache cache{};
  cache.data = pointer<void>(data), cache.scale = pointer<float>(scale), cache.dtype = static_cast<Dtype>(dtype);
  for (int i = 0; i < 3; ++i) cache.strides[i] = strides[i], cache.scale_strides[i] = scale_strides[i];
  return cache;
}

void rope_write_kv_int8_(int dtype, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t v_dim,
                         const Rows2d& q, const Rows2d& k, const Rows2d& v, const Rows2d& cos, const Rows2d& sin,
                         uintptr_t slots, int64_t pages, int64_t page_size, int cache_dtype, uintptr_t k_cache,
                         const Strides& k_strides, uintptr_t k_scale, const Strides& k_scale_strides,
                         uintptr_t v_cache, const Strides& v_strides, uintptr_t v_scale,
                         const Strides& v_scale_strides, int device, uintptr_t stream) {
  RopeWrite args{};
  require(tokens >= 0 && q_heads >= 0 && kv_heads >= 0 && dim >= 0 && dim % 2 == 0 && v_dim >= 0,
          "tokens, heads, dims: expected no negative number, dim even");
  require(pages >= 0 && page_size >= 1, "pages, page_size: expected no negative number");
  require(tokens == 0 || slots, "slots: expected an address");
  require((k_scale == 0) == (v_scale == 0), "k_scale, v_scale: expected both or none");
  args.tokens = tokens, args.q_heads = q.first ? q_heads : 0, args.kv_heads = kv_heads;
  args.dim = dim, args.v_dim = v_dim, args.pages = pages, args.page_size = page_size;
  args.q = pointer<void>(q.first), args.q_stride = q.second;
  args.k = pointer<const void>(k.first), args.k_stride = k.second;
  args.v = pointer<const void>(v.first), args.v_stride = v.second;
  args.cos = pointer<const float>(cos.first), args.cos_stride = cos.second;
  args.sin = pointer<const float>(sin.first), args.sin_stride = sin.second;
  args.slots = pointer<const int64_t>(slots);
  args.k_cache = cache_of(k_cache, k_strides, k_scale, k_scale_strides, cache_dtype);
  args.v_cache = cache_of(v_cache, v_strides, v_scale, v_scale_strides, cache_dtype);
  check(rope_write_kv_int8(args, static_cast<Dtype>(dtype), device, pointer<void>(stream)), "rope_write_kv_int8");
}

void rows_int8_(int64_t count, uintptr_t ids, int64_t n, int64_t k, int64_t group, uintptr_t codes, uintptr_t scale,
                bool rotated, uintptr_t out, int64_t out_stride, int device, uintptr_t stream) {
  RowsInt8 args{};
  require(count >= 0 && n >= 0 && k >= 0 && (k == 0 || group > 0), "rows, n, k, group: expected no negative number");
  require(!rotated || (group & (group - 1)) == 0, "group: expected a power of two for a rotated matrix");
  require(count * k == 0 || (ids && out), "ids, out: expected addresses");
  args.count = k == 0 ? 0 : count, args.n = codes && scale ? n : 0, args.k = k, args.group = group;
  args.ids = pointer<const int64_t>(ids), args.codes = pointer<const uint8_t>(codes);
  args.scale = pointer<const float>(scale), args.rotated = rotated;
  args.out = pointer<float>(out), args.out_stride = out_stride;
  check(rows_int8(args, device, pointer<void>(stream)), "rows_int8");
}

void expand_(int64_t n, int64_t k, int64_t group, bool rotated, uintptr_t codes, uintptr_t scale, int dtype,
             uintptr_t out, int64_t out_stride, int device, uintptr_t stream) {
  require(n >= 0 && k > 0 && group > 0 && k % group == 0, "n, k, group: expected a matrix");
  require(!rotated || ((group & (group - 1)) == 0 && group <= kLongestRotation),
          "group: expected a power of two, not too long, for a rotated matrix");
  require(n == 0 || (codes && codes % 16 == 0 && scale && out), "codes, scale, out: expected addresses");
  ExpandInt8 args{};
  args.n = n, args.k = k, args.group = group, args.rotated = rotated;
  args.codes = pointer<const uint8_t>(codes), args.scale = pointer<const float>(scale);
  args.out = pointer<void>(out), args.out_stride = out_stride;
  check(expand(args, static_cast<Dtype>(dtype), device, pointer<void>(stream)), "expand");
}

}  // namespace

void bind_fused(py::module_& m) {
  m.def("norm", &norm_, release_gil());
  m.def("gate_mul", &gate_mul_, release_gil());
  m.def("rope_write_kv_int8", &rope_write_kv_int8_, release_gil());
  m.def("rows_int8", &rows_int8_, release_gil());
  m.def("expand", &expand_, release_gil());
}

}  // namespace sk::gpu::bind
