#include "cpu/row_kernels.h"

#include <cmath>
#include <cstring>

#include "cpu/exp64.h"
#include "cpu/isa.h"
#include "cpu/row_vectors.h"
#include "sk/accept.h"

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own headers, where they want an undefined vector
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace sk {
namespace {

namespace scalar {
#include "cpu/row_kernels.inl"
#include "cpu/weight_kernels.inl"
}  // namespace scalar
#if SK_X86
SK_TARGET_AVX2_BEGIN
namespace avx2 {
#include "cpu/row_kernels.inl"
#include "cpu/weight_kernels.inl"
}  // namespace avx2
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
namespace avx512 {
#define SK_ROW_SCALE 1
#include "cpu/row_kernels.inl"
#include "cpu/weight_kernels.inl"
}  // namespace avx512
SK_TARGET_END
#endif

#define SK_ROW_KERNELS(space, T, max)                                   \
  {space::max,          space::load64<T>,  space::masses<T>,            \
   space::sums_from<T>, space::collect<T>, space::all_probabilities<T>, \
   space::find<T>}
#define SK_ROW_SET(space)                                                                        \
  {SK_ROW_KERNELS(space, float, max_blocks<float>), SK_ROW_KERNELS(space, F16, max_blocks<F16>), \
   SK_ROW_KERNELS(space, BF16, max_pairs)}
#define SK_GROUP_SET(space) \
  {space::exp64, space::bounds, space::limit, space::tally, space::count_from, space::first_words}

#if SK_X86
constexpr RowKernels kRow[3][3] = {SK_ROW_SET(scalar), SK_ROW_SET(avx2), SK_ROW_SET(avx512)};
constexpr GroupKernels kGroups[3] = {SK_GROUP_SET(scalar), SK_GROUP_SET(avx2), SK_GROUP_SET(avx512)};
#else
constexpr RowKernels kRow[1][3] = {SK_ROW_SET(scalar)};
constexpr GroupKernels kGroups[1] = {SK_GROUP_SET(scalar)};
#endif

}  // namespace

const RowKernels& row_kernels(Dtype dtype) { return kRow[static_cast<int>(isa())][static_cast<int>(dtype)]; }
const GroupKernels& group_kernels() { return kGroups[static_cast<int>(isa())]; }

double exp_one(double x) {
  exp_in_place<double, uint64_t>(x);
  return x;
}

}  // namespace sk
