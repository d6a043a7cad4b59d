// silu(gate) * up and gelu(gate) * up, plain or followed by int8 quantisation while the row is still in the cache
// (row_output.h). silu(x) = x / (1 + exp(-x)); gelu: gelu.h. Shazeer, "GLU Variants Improve Transformer", 2020.
#include "cpu/exp.h"
#include "cpu/float_mode.h"
#include "cpu/gelu.h"
#include "cpu/row_output.h"
#include "cpu/threads.h"

namespace sk {
namespace {

#define SK_BODY "cpu/gate_rows.inc"
#include "cpu/each_isa.inc"

template <class T>
struct Kernels {
  decltype(&scalar::gate_row<T>) gate;
  RowWriter<T> write;
};

template <class T>
Kernels<T> kernels() {
  const Isa which = isa();
  const QuantizeGroup<float> quantize = quantize_group<float>(which);
#if SK_X86
  if (which == Isa::kAvx512) return {&avx512::gate_row<T>, {&avx512::store_row<T>, quantize}};
  if (which == Isa::kAvx2) return {&avx2::gate_row<T>, {&avx2::store_row<T>, quantize}};
#endif
  return {&scalar::gate_row<T>, {&scalar::store_row<T>, quantize}};
}

template <class T>
void gate_rows(const GateArgs& a) {
  const Kernels<T> kernel = kernels<T>();
  parallel_for(a.threads, a.rows, grain_for(a.cols, 16384), [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    float* const y = row_scratch(a.cols);
    for (int64_t r = begin; r < end; ++r) {
      const T* gate = row_of<T>(a.gate_up, r, a.stride);
      kernel.gate(a.gate, gate, gate + a.cols, a.cols, y);
      kernel.write(y, a.cols, r, a.out);
    }
  });
}

}  // namespace

void gate_mul(const GateArgs& args) {
  switch (args.dtype) {
    case Dtype::kF32: return gate_rows<float>(args);
    case Dtype::kF16: return gate_rows<F16>(args);
    case Dtype::kBF16: return gate_rows<BF16>(args);
  }
}

}  // namespace sk
