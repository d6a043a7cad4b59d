#include "cpu/expand.h"

#include <cstring>
#include <memory>

#include "cpu/float_mode.h"
#include "cpu/rotate.h"
#include "cpu/threads.h"

namespace sk {
namespace {

#define SK_BODY "cpu/expand_group.inc"
#include "cpu/each_isa.inc"

template <class T>
struct Steps {
  void (*widen)(const int8_t* q, int64_t n, float scale, float* values);
  void (*narrow)(const float* values, int64_t n, T* out);
};

template <class T>
Steps<T> steps_for(Isa which) {
#if SK_X86
  if (which == Isa::kAvx512) return {&avx512::widen_codes, &avx512::narrow_values<T>};
  if (which == Isa::kAvx2) return {&avx2::widen_codes, &avx2::narrow_values<T>};
#endif
  (void)which;
  return {&scalar::widen_codes, &scalar::narrow_values<T>};
}

// Every 64th quadruple of bytes from `line` on: the codes of one group of one row. Writes whole steps.
void gather(const uint8_t* line, int64_t steps, int8_t* q) {
  for (int64_t i = 0; i < steps; ++i, line += kStepBytes, q += kStep) {
    uint32_t word;
    std::memcpy(&word, line, 4);
    word ^= 0x80808080u;
    std::memcpy(q, &word, 4);
  }
}

template <class T>
void expand_rows(const Int8Matrix& w, T* out, int64_t stride, int threads) {
  const Int8Shape& shape = w.shape;
  const Steps<T> of = steps_for<T>(isa());
  const RotateGroup<float> rotate = rotate_group<float>(isa());
  const float factor = 1.0f / static_cast<float>(shape.group);
  const int64_t steps = shape.steps(), grain = 1 + (1 << 14) / (kPanelRows * shape.k);
  parallel_for(threads, shape.panels(), grain, [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    const std::unique_ptr<int8_t[]> q(new int8_t[static_cast<size_t>(steps * kStep)]);
    const std::unique_ptr<float[]> values(new float[static_cast<size_t>(shape.group)]);
    for (int64_t p = begin; p < end; ++p) {
      const uint8_t* line = w.codes + p * shape.panel_bytes();
      const float* scale = w.scale + p * shape.groups() * kPanelRows;
      const int64_t rows = shape.n - p * kPanelRows < kPanelRows ? shape.n - p * kPanelRows : kPanelRows;
      for (int64_t g = 0; g < shape.groups(); ++g, line += steps * kStepBytes, scale += kPanelRows)
        for (int64_t r = 0; r < rows; ++r) {  // a group's lines stay in the cache for all rows of the panel
          gather(line + r * kStep, steps, q.get());
          of.widen(q.get(), shape.group, scale[r], values.get());
          if (shape.rotated) rotate(values.get(), shape.group, factor, values.get());
          of.narrow(values.get(), shape.group, out + (p * kPanelRows + r) * stride + g * shape.group);
        }
    }
  });
}

}  // namespace

void expand(const Int8Matrix& w, const OutRows& out, int threads) {
  switch (out.type) {
    case Dtype::kF32: return expand_rows(w, static_cast<float*>(out.data), out.stride, threads);
    case Dtype::kF16: return expand_rows(w, static_cast<F16*>(out.data), out.stride, threads);
    case Dtype::kBF16: return expand_rows(w, static_cast<BF16*>(out.data), out.stride, threads);
  }
}

}  // namespace sk
