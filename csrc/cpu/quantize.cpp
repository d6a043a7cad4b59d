// quantize_int8: floats to int8 codes with one scale (and zero point) per group of a row. Formula: sk/quantize.h.
//
// A group is read twice, once for its range and once for its codes; the second reading comes from the cache. Ranges are
// found with integer maxima on the bit patterns, which can't lose a NaN. Codes cost one IEEE division per value, or in
// the AVX2 and AVX-512 regions a multiplication that is proved to give the same code (codes_by_reciprocal_*.inc).
#include "cpu/quantize.h"

#include "cpu/float_mode.h"
#include "cpu/threads.h"
#include "sk/philox.h"

namespace sk {
namespace {

namespace scalar {
#define SK_F16C 0
#define SK_RECIPROCAL 0
#include "cpu/convert.inc"
#include "cpu/quantize_group.inc"
#undef SK_RECIPROCAL
#undef SK_F16C
}  // namespace scalar

#if SK_X86
#define SK_F16C 1
namespace avx2 {
SK_TARGET_AVX2_BEGIN
#define SK_RECIPROCAL 2
#include "cpu/convert.inc"
#include "cpu/quantize_group.inc"
#undef SK_RECIPROCAL
SK_TARGET_END
}  // namespace avx2
namespace avx512 {
SK_TARGET_AVX512_BEGIN
#define SK_RECIPROCAL 512
#include "cpu/convert.inc"
#include "cpu/quantize_group.inc"
#undef SK_RECIPROCAL
SK_TARGET_END
}  // namespace avx512
#undef SK_F16C
#endif

template <class T>
void quantize_rows(const QuantizeArgs& a) {
  const QuantizeGroup<T> quantize = quantize_group<T>(isa());
  const int64_t groups = a.group > 0 ? a.cols / a.group : 1;  // a row of no values still has its (zero) scale
  parallel_for(a.threads, a.rows * groups, grain_for(a.group), [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    int64_t r = begin / groups, g = begin % groups;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t column = g * a.group;
      quantize(static_cast<const T*>(a.x) + r * a.x_stride + column, a.group, a.rule,
               a.offset + static_cast<uint64_t>(r * a.cols + column), a.q + r * a.q_stride + column, a.scale.at(r, g),
               a.zero_point.at(r, g), a.sums.at(r, g));
      if (++g == groups) g = 0, ++r;
    }
  });
}

}  // namespace

template <class T>
QuantizeGroup<T> quantize_group(Isa which) {
#if SK_X86
  if (which == Isa::kAvx512) return {&avx512::quantize_group<T>};
  if (which == Isa::kAvx2) return {&avx2::quantize_group<T>};
#endif
  (void)which;
  return {&scalar::quantize_group<T>};
}
template QuantizeGroup<float> quantize_group<float>(Isa);
template QuantizeGroup<F16> quantize_group<F16>(Isa);
template QuantizeGroup<BF16> quantize_group<BF16>(Isa);

void quantize_int8(const QuantizeArgs& args) {
  switch (args.dtype) {
    case Dtype::kF32: return quantize_rows<float>(args);
    case Dtype::kF16: return quantize_rows<F16>(args);
    case Dtype::kBF16: return quantize_rows<BF16>(args);
  }
}

}  // namespace sk
