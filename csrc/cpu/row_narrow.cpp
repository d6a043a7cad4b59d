// Where the support of a flat row ends: one on which more entries compete for it than can be gathered.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/row.h"

namespace sk {
namespace {

constexpr int kLinearPasses = 3;

// Logits that divide (low, high] evenly, on their own scale or, where they cluster, on that of their bits. What lies
// below `usual` is not worth more than one of them.
void divide(float low, float usual, float high, bool linear, float* at) {
  const uint32_t low_key = order_key(low), high_key = order_key(high);
  const double start = usual < high ? std::max(low, usual) : low;
  for (int j = 0; j < kThresholds; ++j) {
    const double share = (j + (low < start ? 0.0 : 1.0)) / (kThresholds + 1);
    const float value = linear ? static_cast<float>(start + share * (high - start))
                               : of_order_key(low_key + static_cast<uint32_t>(share * (high_key - low_key)));
    at[j] = std::min(std::max(value, std::nextafter(low, INFINITY)), high);
  }
}

}  // namespace

// For kThresholds logits, ascending, what the support's entries from there upwards hold: ids or mass.
void Row::sums_from(const float* at, bool by_mass, double* sums) const {
  std::fill(sums, sums + kThresholds, 0.0);
  const int64_t whole = exact(inv_t_) ? 0 : source_.size / kGroup;
  const FloatWeights ones{max_, 0.0f, -FLT_MAX};
  row_kernels(source_.dtype)
      .sums_from(source_.data, whole, top_.data(), by_mass ? float_weights(inv_t_) : ones, at, sums);
  for (int64_t g = whole; g < groups(); ++g) {
    if (top_[g] < at[0]) continue;
    float l[kGroup];
    double w[kGroup];
    load_support(g, l);
    group_kernels().exp64(l, max_, inv_t_, at[0], 0.0, w);
    for (int i = 0; i < kGroup; ++i)
      for (int j = 0; j < kThresholds && l[i] >= at[j]; ++j) sums[j] += by_mass ? w[i] : 1.0;
  }
}

// The shortest prefix of the order that holds `need` ids (or, by_mass, weights that sum to it), its entries being >=
// low. The logits [low, high] between which it ends are narrowed to a ninth at a time, until the entries there can be
// gathered or are all equal.
Prefix Row::narrow(double need, bool by_mass, float low, Candidates* found) const {
  float high = max_, least_top = max_;
  for (const float top : top_)
    if (top > -INFINITY) least_top = std::min(least_top, top);
  const float usual = 3.0f * least_top - 2.0f * max_;
  double above = 0.0;  // held by the entries > high
  for (int pass = 0; low < high; ++pass) {
    float at[kThresholds];
    double sums[kThresholds];
    divide(low, usual, high, pass < kLinearPasses, at);
    sums_from(at, by_mass, sums);
    int j = 0;
    while (j < kThresholds && sums[j] >= need) ++j;
    if (j > 0) low = at[j - 1];
    if (j < kThresholds) {
      high = std::nextafter(at[j], -INFINITY);
      above = sums[j];
    }
    if (!gather(low, high, found)) continue;
    Candidates::End end;
    if (by_mass ? !found->nucleus(need - above, &end) : !found->first(static_cast<int64_t>(need - above), &end))
      return everything();
    return ending(end.cut, end.equal, by_mass ? above + end.mass : -1.0);
  }
  const double each = by_mass ? exp_one((static_cast<double>(low) - max_) * inv_t_) : 1.0;
  const double n = std::min(std::max(std::ceil((need - above) / each), 1.0), static_cast<double>(source_.size));
  return ending(low, static_cast<int64_t>(n), -1.0);
}

// The prefix that ends with the n-th id whose logit equals the cut, or the last one; mass < 0: still to be found.
Prefix Row::ending(float cut, int64_t n, double mass) const {
  const int64_t wanted = n, last = nth_equal(cut, &n);
  if (mass < 0.0) {
    float at[kThresholds];
    double sums[kThresholds];
    std::fill(at, at + kThresholds, std::nextafter(cut, INFINITY));
    sums_from(at, true, sums);
    mass = sums[0] + static_cast<double>(wanted - n) * exp_one((static_cast<double>(cut) - max_) * inv_t_);
  }
  return {cut, last, mass};
}

// The id of the n-th entry of the support, from 1, that equals value, or of the last one; n becomes how many are
// missing.
int64_t Row::nth_equal(float value, int64_t* n) const {
  if (point_ >= 0) return --*n, point_;
  const int64_t end = value == cut_ ? last_ + 1 : source_.size;
  int64_t last = -1;
  for (int64_t g = 0; g * kGroup < end; ++g) {
    if (top_[g] < value) continue;
    const int64_t stop = std::min(end, (g + 1) * kGroup);
    for (int64_t id = g * kGroup; (id = source_.find(id, stop, value)) < stop; ++id) {
      last = id;
      if (--*n == 0) return last;
    }
  }
  return last;
}

}  // namespace sk
