// The hot loops over rows of logits, one set per number format, chosen by instruction set at the time of the call.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

// Weights in float: 2^(max(l - max, low) * scale). Relative error of a few 1e-7 near 1, 2e-6 at e^-30.
struct FloatWeights {
  float max, scale;
  float low;  // where the weight is 2^-126
};

constexpr int kThresholds = 8;

struct RowKernels {
  // out[b] = largest entry of the b-th block of `block` entries (a multiple of 64), NaN ignored, -inf if there is none.
  // Returns whether a NaN was met.
  bool (*max_blocks)(const void* row, int64_t blocks, int64_t block, float* out);
  // 64 entries as f32, NaN as -inf.
  void (*load64)(const void* group, float* out);
  // mass[g] = sum of the weights of group g, where mass[g] was below -least.
  void (*masses)(const void* row, int64_t groups, const FloatWeights& weights, double least, double* mass);
  // Adds to sums[j] the weights of the entries >= least[j], ascending, kThresholds of them; least[0] > -inf.
  void (*sums_from)(const void* row, int64_t groups, const float* top, const FloatWeights& weights, const float* least,
                    double* sums);
  // Writes the entries in [least, most] and returns how many; -1 if they may be too many for `room`, of which 64 are
  // spare.
  int64_t (*collect)(const void* row, int64_t groups, const float* top, float least, float most, int64_t room,
                     float* out);
  // Whether all n entries are finite and >= 0.
  bool (*all_probabilities)(const void* row, int64_t n);
  // The first of n entries that equals the value; n if there is none.
  int64_t (*find)(const void* row, int64_t n, float value);
};
const RowKernels& row_kernels(Dtype dtype);

struct GroupKernels {
  // w = exp((l - max) * inv_t) where l >= cut and w >= least, else 0, for 64 entries; returns their sum. The order of
  // the sum is fixed. Relative error of w below 1e-11.
  double (*exp64)(const float* l, double max, double inv_t, float cut, double least, double* w);
  // out[g] = -(not less than the mass of a group whose largest entry is top[g]); 0 where top[g] < cut.
  void (*bounds)(const float* top, int64_t groups, const FloatWeights& weights, float cut, double* out);
  // Makes bounds of all masses where entries below `least` lose their weight; 0 where all do.
  void (*limit)(const float* top, int64_t groups, float least, double* mass);
  // The sums of the positive and of the negative entries of x.
  void (*tally)(const double* x, int64_t n, double* positive, double* negative);
  int64_t (*count_from)(const float* x, int64_t n, float least);  // how many are >= least
  // Word 0 of Philox for the groups first .. first + 15; c2 = stream << 24 | index.
  void (*first_words)(uint64_t seed, uint64_t position, uint32_t c2, uint32_t first, uint32_t* out);
};
const GroupKernels& group_kernels();

double exp_one(double x);  // the same function as in exp64

}  // namespace sk
