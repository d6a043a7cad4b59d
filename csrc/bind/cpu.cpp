// Python module _C_cpu. Integers in (addresses, sizes, strides in elements), range checks, the GIL released, errors as
// exceptions. Shapes, dtypes, strides and devices were checked in Python (specdec_kernels/validate.py); the checks here
// only keep a slip on that side from becoming a wild pointer. One section per kernel family.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cpu/attention.h"
#include "cpu/ggml.h"
#include "cpu/isa.h"
#include "cpu/threads.h"
#include "sk/numerics.h"

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

namespace {

template <class T>
[[maybe_unused]] T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

[[maybe_unused]] void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void bind_runtime(py::module_& m) {
  m.def("isa", [] { return sk::isa_name(sk::isa()); });
  m.def("machine_isa", [] { return sk::isa_name(sk::machine_isa()); });
  m.def("set_isa", [](const std::string& name) { return sk::set_isa(name.c_str()); });
  m.def("pool_workers", &sk::pool_workers);
}

// ---- quantize family -------------------------------------------------------------------------------------------------

// ---- linear family ---------------------------------------------------------------------------------------------------

// ---- verify family ---------------------------------------------------------------------------------------------------

// ---- attention family ------------------------------------------------------------------------------------------------

void check(const char* message) {
  if (message != nullptr) throw py::value_error(message);
}

void bind_attention(py::module_& m) {
  m.def(
      "rope_write_kv",
      [](uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t cos, uintptr_t sin, int64_t q_row, int64_t k_row, int64_t v_row,
         int64_t table_row, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim, uintptr_t k_cache,
         uintptr_t v_cache, uintptr_t k_scale, uintptr_t v_scale, uintptr_t slots, int64_t cache_slots) {
        require(tokens >= 0 && kv_heads >= 0 && dim >= 0 && dim % 2 == 0, "rope_write_kv: sizes");
        require((k_scale == 0) == (v_scale == 0), "rope_write_kv: both scales or none");
        const char* message;
        {
          py::gil_scoped_release release;
          message = sk::rope_write_kv({pointer<float>(q), pointer<const float>(k), pointer<const float>(v),
                                       pointer<const float>(cos), pointer<const float>(sin), q_row, k_row, v_row, table_row,
                                       tokens, q_heads, kv_heads, dim, pointer<void>(k_cache), pointer<void>(v_cache),
                                       pointer<float>(k_scale), pointer<float>(v_scale), pointer<const int64_t>(slots),
                                       cache_slots});
        }
        check(message);
      });
  m.def("attend", [](uintptr_t q, uintptr_t out, int64_t q_batch, int64_t q_row, int64_t batch, int64_t rows, int64_t heads,
                     int64_t kv_heads, int64_t dim, uintptr_t k_cache, uintptr_t v_cache, uintptr_t k_scale,
                     uintptr_t v_scale, int64_t page_size, int64_t pages, int64_t table_width, uintptr_t page_table,
                     uintptr_t lengths, uintptr_t mask, float scale, int threads) {
    require(batch >= 0 && rows >= 0 && dim >= 0 && page_size > 0, "attend: sizes");
    require(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), "attend: heads");
    require((k_scale == 0) == (v_scale == 0), "attend: both scales or none");
    const char* message;
    {
      py::gil_scoped_release release;
      message = sk::attend({pointer<const float>(q), pointer<float>(out), q_batch, q_row, batch, rows, heads, kv_heads, dim,
                            pointer<const void>(k_cache), pointer<const void>(v_cache), pointer<const float>(k_scale),
                            pointer<const float>(v_scale), page_size, pages, table_width,
                            pointer<const int32_t>(page_table), pointer<const int32_t>(lengths),
                            pointer<const uint8_t>(mask), scale},
                           threads);
    }
    check(message);
  });
}

// ---- ggml family -----------------------------------------------------------------------------------------------------

void dequantize_ggml(int threads, int kind, uintptr_t blocks, int64_t row_stride, uintptr_t out, int64_t out_stride,
                     int64_t rows, int64_t blocks_per_row) {
  require(kind >= 0 && kind < static_cast<int>(sk::GgmlKind::kCount), "kind: not a ggml kind");
  require(blocks && out && rows >= 0 && blocks_per_row >= 0, "dequantize_ggml: bad address or size");
  sk::dequantize_ggml(threads, static_cast<sk::GgmlKind>(kind), pointer<const uint8_t>(blocks), row_stride,
                      pointer<float>(out), out_stride, rows, blocks_per_row);
}

void bind_ggml(py::module_& m) { m.def("dequantize_ggml", &dequantize_ggml, release_gil()); }

}  // namespace

PYBIND11_MODULE(_C_cpu, m) {
  m.doc() = "CPU kernels of specdec_kernels (raw pointers; use the package, not this module)";
  bind_runtime(m);

  // quantize

  // linear

  // verify

  // attention
  bind_attention(m);

  // ggml
  bind_ggml(m);
}
