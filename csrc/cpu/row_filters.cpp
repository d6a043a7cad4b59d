// Temperature and filters of a row: where the support ends.
//
// The entries that a filter has to choose from are few on rows of language models: those from some logit upwards are
// gathered, and a quickselect finds the end of the prefix. Rows that are too flat for that are selected by their bits.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <utility>

#include "cpu/candidates.h"
#include "cpu/row.h"

namespace sk {
namespace {

constexpr int kSteps = 3;
constexpr double kFloors[kSteps] = {-3.0, -6.0, -9.0};  // log weights from which on a nucleus is looked for first

Candidates& scratch() {
  thread_local Candidates candidates;
  return candidates;
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
  bound(floor);
}

void Row::keep(const Prefix& prefix) {
  cut_ = prefix.cut;
  last_ = prefix.last;
  settle(prefix.mass);
}

void Row::keep(const Candidates::End& end, Candidates* candidates) {
  candidates->keep(end);
  keep({end.cut, nth_equal(end.cut, end.equal), end.mass});
}

Candidates* Row::keep_first(int64_t count) {
  Candidates& found = scratch();
  const float floor = count_floor(count);
  if (!gather(floor, &found)) {
    keep(select(static_cast<double>(count), false, floor));
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
    if (!gather(floor, &found)) break;
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
  keep(select(share * total(), true, lowest));
  return nullptr;
}

// Returns a logit below which nothing is kept.
float Row::keep_weights(double least, Candidates* support) {
  const float floor = floor_of(std::log(least) - 1e-6);
  Candidates& found = scratch();
  if (!support && gather(floor, &found)) support = &found;
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

bool Row::gather(float floor, Candidates* out) const {
  out->clear();
  float l[kGroup];
  for (int64_t g = 0; g < groups(); ++g) {
    if (top_[g] < floor) continue;
    load_support(g, l);
    if (!out->add(l, floor)) return false;
  }
  out->weigh(max_, inv_t_);
  return true;
}

// No candidate below this logit is among the k largest: the k-th largest of the groups' largest ones, by bisection on
// the floats' order.
float Row::count_floor(int64_t k) const {
  if (k > groups()) return -FLT_MAX;
  uint32_t low = order_key(-FLT_MAX), high = order_key(max_);  // at least k are >= low, unless some are -inf
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    if (group_kernels().count_from(top_.data(), groups(), of_order_key(middle)) >= k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return of_order_key(low);
}

// The shortest prefix of the order that holds `need` ids (or, by_mass, weights that sum to `need`), by radix selection
// on the logits' ordered bits: three histograms of 11, 11 and 10 bits, each inside the bin in which the last one ended.
// Ids below `floor` are known not to be in it.
Prefix Row::select(double need, bool by_mass, float floor) const {
  struct Bin {
    double mass;
    int64_t count;
  };
  thread_local std::vector<Bin> bins;
  double above_mass = 0.0;
  int64_t above_count = 0;
  uint32_t prefix = 0;
  Bin bin{};
  for (const auto [shift, bits] : {std::pair{21, 11}, std::pair{10, 11}, std::pair{0, 10}}) {
    bins.assign(size_t{1} << bits, Bin{0.0, 0});
    const bool first = shift == 21;
    for (int64_t g = 0; g < groups(); ++g) {
      if (top_[g] < floor || (!first && order_key(top_[g]) >> (shift + bits) < prefix)) continue;
      float l[kGroup];
      double w[kGroup];
      load_support(g, l);
      if (first) group_kernels().exp64(l, max_, inv_t_, floor, 0.0, w);
      for (int64_t i = 0; i < kGroup; ++i) {
        if (l[i] < floor) continue;
        const uint32_t key = order_key(l[i]);
        if (!first && key >> (shift + bits) != prefix) continue;
        Bin& b = bins[(key >> shift) & ((1u << bits) - 1)];
        b.mass += first ? w[i] : exp_one((static_cast<double>(l[i]) - max_) * inv_t_);
        ++b.count;
      }
    }
    int64_t b = static_cast<int64_t>(bins.size()) - 1;
    for (; b >= 0; --b) {
      bin = bins[b];
      if (bin.count == 0) continue;
      if (by_mass ? above_mass + bin.mass >= need : above_count + bin.count >= need) break;
      above_mass += bin.mass;
      above_count += bin.count;
    }
    if (b < 0) return {cut_, last_, above_mass};  // fewer than that: everything
    prefix = (prefix << bits) | static_cast<uint32_t>(b);
  }
  // All of the last bin are equal: take as many as are needed, lowest ids first.
  const float cut = of_order_key(prefix);
  const double each = exp_one((static_cast<double>(cut) - max_) * inv_t_);
  double wanted = by_mass ? std::ceil((need - above_mass) / each) : need - above_count;
  wanted = std::min(std::max(wanted, 1.0), static_cast<double>(bin.count));
  const int64_t n = static_cast<int64_t>(wanted);
  return {cut, n == bin.count ? source_.size - 1 : nth_equal(cut, n), above_mass + n * each};
}

// The id of the n-th entry, from 1, that equals value.
int64_t Row::nth_equal(float value, int64_t n) const {
  for (int64_t g = 0;; ++g) {
    if (top_[g] < value) continue;
    float l[kGroup];
    load(g, l);
    for (int64_t i = 0; i < kGroup; ++i)
      if (l[i] == value && --n == 0) return g * kGroup + i;
  }
}

}  // namespace sk
