// Temperature and filters of a row: where the support ends.
//
// The entries that a filter has to choose from are few on rows of language models: those from some logit upwards are
// gathered, and a quickselect finds the end of the prefix. Flat rows are for row_narrow.cpp.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <memory>

#include "cpu/candidates.h"
#include "cpu/row.h"

namespace sk {
namespace {

constexpr double kFloors[] = {-3.0, -6.0, -9.0};  // log weights from which on a nucleus is looked for first
constexpr int kSteps = sizeof kFloors / sizeof *kFloors;

Candidates& scratch() {
  thread_local const std::unique_ptr<Candidates> candidates = std::make_unique<Candidates>();
  return *candidates;
}

}  // namespace

void Row::weigh(const Filters& filters, int threads) {
  inv_t_ = 1.0 / filters.temperature;
  threads_ = threads;
  least_ = 0.0;
  cut_ = -FLT_MAX;
  last_ = source_.size - 1;
  stage_ = 0;
  low_ = 0.0;
  high_ = INFINITY;
  const bool by_count = filters.top_k > 0 && filters.top_k < source_.size;
  const bool by_mass = filters.top_p < 1.0f, by_weight = filters.min_p > 0.0f;
  bound(cut_);
  if (!by_count && !by_mass && !by_weight) return;

  Candidates* support = nullptr;  // the entries of the support, once they are gathered
  if (by_count) support = keep_first(filters.top_k);
  if (by_mass) support = keep_nucleus(filters.top_p, support);
  float floor = cut_;
  if (by_weight) floor = keep_weights(filters.min_p, support);
  group_kernels().limit(top_.data(), groups(), floor, mass_.data());
}

void Row::keep(const Prefix& prefix) {
  cut_ = prefix.cut;
  last_ = prefix.last;
  settle(prefix.mass < 0.0 ? total() : prefix.mass);
}

void Row::keep(const Candidates::End& end, Candidates* candidates) {
  candidates->keep(end);
  keep(ending(end.cut, end.equal, end.mass));
}

Candidates* Row::keep_first(int64_t count) {
  Candidates& found = scratch();
  const float floor = count_floor(count);
  if (!gather(floor, max_, &found)) {
    keep(narrow(static_cast<double>(count), false, floor, &found));
    return nullptr;
  }
  Candidates::End end;
  if (found.first(count, &end)) {
    keep(end, &found);
  } else {
    settle(found.mass());  // fewer than that: everything
  }
  return &found;
}

// The total need not be known well: a prefix that was found for the lower bound is certain if it does for the upper
// one.
Candidates* Row::keep_nucleus(double share, Candidates* support) {
  Candidates::End end;
  if (support) {
    if (support->nucleus(share * low_, &end)) keep(end, support);
    return support;
  }
  refine();
  // Weights under half of (1 - share) * total / size together hold too little to be missed.
  const float lowest = floor_of(std::log(0.5 * (1.0 - share) * low_ / source_.size));
  Candidates& found = scratch();
  for (int step = 0;; ++step) {
    const float floor = step < kSteps ? std::max(floor_of(kFloors[step]), lowest) : lowest;
    if (!gather(floor, max_, &found)) break;
    bool enough = found.nucleus(share * low_, &end);
    while (enough && end.mass < share * high_ && refine())
      if (end.mass < share * low_) enough = found.nucleus(share * low_, &end);
    if (enough) {
      keep(end, &found);
      return &found;
    }
    if (floor > lowest) continue;
    settle(total());  // rounding: no prefix is heavy enough, so everything
    return nullptr;
  }
  keep(narrow(share * total(), true, lowest, &found));
  return nullptr;
}

// Returns a logit below which nothing is kept.
float Row::keep_weights(double least, Candidates* support) {
  const float floor = floor_of(std::log(least) - 1e-6);
  Candidates& found = scratch();
  if (!support && gather(floor, max_, &found)) support = &found;
  least_ = least;
  if (support) {
    settle(support->mass_from(least));
    return floor;
  }
  double sum = 0.0, w[kGroup];
  for (int64_t g = 0; g < groups(); ++g)
    if (top_[g] >= floor) sum += group(g, w);
  settle(sum);
  return floor;
}

void Row::settle(double total) {
  low_ = high_ = total;
  stage_ = kLastStage;
}

// A logit that is not above those of this log weight.
float Row::floor_of(double log_weight) const {
  const double floor = std::max<double>(max_ + log_weight / inv_t_, -FLT_MAX);
  return std::max({std::nextafter(static_cast<float>(floor), -INFINITY), cut_, -FLT_MAX});
}

// The entries of [floor, ceiling]; false if they are too many.
bool Row::gather(float floor, float ceiling, Candidates* out) const {
  out->clear();
  const bool plain = point_ < 0 && (floor > cut_ || last_ == source_.size - 1);
  const int64_t whole = plain ? source_.size / kGroup : 0;
  const RowKernels& kernels = row_kernels(source_.dtype);
  if (!out->add(kernels.collect(source_.data, whole, top_.data(), floor, ceiling, out->room(), out->end())))
    return false;
  float l[kGroup];
  for (int64_t g = whole; g < groups(); ++g) {
    if (top_[g] < floor) continue;
    load_support(g, l);
    if (!out->add(row_kernels(Dtype::kF32).collect(l, 1, &top_[g], floor, ceiling, out->room(), out->end())))
      return false;
  }
  out->weigh(max_, inv_t_);
  return true;
}

// No candidate below this logit is among the k largest: at least k groups have a largest entry that is not below it.
float Row::count_floor(int64_t k) const {
  if (k > groups()) return -FLT_MAX;
  uint32_t low = order_key(-FLT_MAX), high = order_key(max_);
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const int64_t count = group_kernels().count_from(top_.data(), groups(), of_order_key(middle));
    if (count < k) {
      high = middle - 1;
    } else {
      low = middle;
      if (count <= k + k / 4) break;
    }
  }
  return of_order_key(low);
}

}  // namespace sk
