// The hot loops over rows of logits, one set per number format, chosen by instruction set at the time of the call.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

struct MassParameters {
  float max, inv_t;
  float cut;         // entries below have no weight
  float negligible;  // groups whose largest entry is below are not evaluated
};

struct RowKernels {
  // out[b] = largest entry of the b-th block of `block` entries (a multiple of 64), NaN ignored, -inf if there is none.
  // Returns whether a NaN was met.
  bool (*max_blocks)(const void* row, int64_t blocks, int64_t block, float* out);
  // 64 entries as f32, NaN as -inf.
  void (*load64)(const void* group, float* out);
  // out[g] = sum of exp((l - max) * inv_t) over the entries l >= cut of group g, given the groups' largest entries;
  // 0 without such an entry, -1 where it was not evaluated. In float arithmetic: to a few 1e-6 where the largest weight
  // of the group is e^-30, to some 1e-7 where it is near 1.
  void (*masses)(const void* row, int64_t groups, const float* top, const MassParameters& parameters, double* out);
};
const RowKernels& row_kernels(Dtype dtype);

struct GroupKernels {
  // w = exp((l - max) * inv_t) where l >= cut and w >= least, else 0, for 64 entries; returns their sum. The order of
  // the sum is fixed. Relative error of w below 1e-11.
  double (*exp64)(const float* l, double max, double inv_t, float cut, double least, double* w);
  // Word 0 of Philox for the groups first .. first + 15; c2 = stream << 24 | index.
  void (*first_words)(uint64_t seed, uint64_t position, uint32_t c2, uint32_t first, uint32_t* out);
};
const GroupKernels& group_kernels();

double exp_one(double x);  // the same function as in exp64

}  // namespace sk
