#include "cpu/row.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <functional>
#include <utility>

#include "cpu/float_mode.h"
#include "cpu/threads.h"
#include "sk/accept.h"

namespace sk {
namespace {

constexpr int64_t kScanBlock = 2048;   // ids per maximum when only the argmax is wanted
constexpr double kNegligible = -30.0;  // 10^6 weights of e^-30 are 1e-7 of the total

// out[b] = largest entry of block b, the last block may be short; returns whether a NaN was met.
bool block_tops(const Source& x, int64_t block, float* out, int threads) {
  const RowKernels& kernels = row_kernels(x.dtype);
  const int64_t full = x.size / block;
  std::atomic<bool> nan{false};
  parallel_for(threads, full, 32768 / block, [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    if (kernels.max_blocks(x.at(begin * block), end - begin, block, out + begin)) nan = true;
  });
  if (full * block == x.size) return nan;
  float top = -INFINITY;
  int64_t i = full * block;
  const int64_t groups = (x.size - i) / kGroup;
  for (int64_t g = 0; g < groups; ++g, i += kGroup) {
    float one;
    if (kernels.max_blocks(x.at(i), 1, kGroup, &one)) nan = true;
    top = std::max(top, one);
  }
  for (; i < x.size; ++i) {
    const float v = x[i];
    if (v != v) nan = true;
    top = v > top ? v : top;
  }
  out[full] = top;
  return nan;
}

void load_group(const Source& x, int64_t g, float* l) {
  if ((g + 1) * kGroup <= x.size) {
    row_kernels(x.dtype).load64(x.at(g * kGroup), l);
    return;
  }
  const int64_t n = x.size - g * kGroup;
  for (int64_t i = 0; i < kGroup; ++i) {
    const float v = i < n ? x[g * kGroup + i] : -INFINITY;
    l[i] = v == v ? v : -INFINITY;
  }
}

// The first id of [begin, size) that equals a value which is known to be there.
int64_t first_equal(const Source& x, int64_t begin, float value) {
  for (int64_t g = begin / kGroup;; ++g) {
    float l[kGroup];
    load_group(x, g, l);
    for (int i = 0; i < kGroup; ++i)
      if (l[i] == value) return g * kGroup + i;
  }
}

}  // namespace

float Source::operator[](int64_t i) const {
  switch (dtype) {
    case Dtype::kF16: return to_f32(static_cast<const F16*>(data)[i]);
    case Dtype::kBF16: return to_f32(static_cast<const BF16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

int64_t row_argmax(const Source& source, int threads, bool* hard) {
  thread_local std::vector<float> tops;
  tops.resize((source.size + kScanBlock - 1) / kScanBlock);
  const bool nan = block_tops(source, kScanBlock, tops.data(), threads);
  const auto best = std::max_element(tops.begin(), tops.end());
  *hard = nan || *best == INFINITY;
  return *best == -INFINITY ? -1 : first_equal(source, (best - tops.begin()) * kScanBlock, *best);
}

double sum64(const double* w) {
  double lane[8];
  for (int j = 0; j < 8; ++j) lane[j] = w[j];
  for (int i = 8; i < kGroup; i += 8)
    for (int j = 0; j < 8; ++j) lane[j] += w[i + j];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

void Row::read(const Source& source, int threads) {
  source_ = source;
  top_.resize((source.size + kGroup - 1) / kGroup);
  nan_ = block_tops(source, kGroup, top_.data(), threads);
  const auto best = std::max_element(top_.begin(), top_.end());
  max_ = *best;
  empty_ = max_ == -INFINITY;
  point_ = -1;
  if (max_ == INFINITY) {  // from here on, a row with one candidate of logit 0
    point_ = first_equal(source, (best - top_.begin()) * kGroup, INFINITY);
    std::fill(top_.begin(), top_.end(), -INFINITY);
    top_[point_ / kGroup] = max_ = 0.0f;
  }
}

void Row::load(int64_t g, float* l) const {
  if (point_ < 0) return load_group(source_, g, l);
  for (int64_t i = 0; i < kGroup; ++i) l[i] = g * kGroup + i == point_ ? 0.0f : -INFINITY;
}

int64_t Row::argmax() const {
  if (point_ >= 0) return point_;
  const int64_t g = std::find(top_.begin(), top_.end(), max_) - top_.begin();
  return first_equal(source_, g * kGroup, max_);
}

double Row::log_softmax(int64_t id) const {
  if (point_ >= 0) return 0.0;
  double sum = 0.0, w[kGroup];
  for (int64_t g = 0; g < groups(); ++g) {
    if (static_cast<double>(top_[g]) - max_ < kNegligible) continue;
    float l[kGroup];
    load(g, l);
    sum += group_kernels().exp64(l, max_, 1.0, -FLT_MAX, 0.0, w);
  }
  return (static_cast<double>(source_[id]) - max_) - std::log(sum);
}

void Row::weigh(const Filters& filters, int threads) {
  inv_t_ = 1.0 / filters.temperature;
  least_ = 0.0;
  log_least_ = -INFINITY;
  cut_ = -FLT_MAX;
  last_ = source_.size - 1;
  int64_t count = source_.size;
  if (filters.top_k > 0 && filters.top_k < count) {
    count = filters.top_k;
    keep(select(count, false, count_floor(count)));
  } else if (filters.top_p < 1.0f) {
    masses(threads);
  }
  if (filters.top_p < 1.0f)
    keep(select(filters.top_p * total_, true, mass_floor((1.0 - filters.top_p) * total_ / count)));
  if (filters.min_p > 0.0f) {
    least_ = filters.min_p;
    log_least_ = std::log(least_) - 1e-6;
  }
  masses(threads);
}

void Row::keep(const Prefix& prefix) {
  cut_ = prefix.cut;
  last_ = prefix.last;
  total_ = prefix.mass;
}

void Row::masses(int threads) {
  mass_.resize(top_.size());
  // The fast way: whole groups, no min-p (whose bound is a comparison on exact weights), a usual temperature. Ids at
  // the cut end with last_: before its group they count, behind it they don't.
  const bool fast = point_ < 0 && least_ == 0.0 && inv_t_ > 1e-30 && inv_t_ < 1e30;
  const int64_t boundary = last_ / kGroup, whole = source_.size / kGroup;
  const float negligible = static_cast<float>(std::max<double>(max_ + kNegligible / inv_t_, -FLT_MAX));
  const MassParameters before{max_, static_cast<float>(inv_t_), cut_, negligible};
  const MassParameters after{max_, static_cast<float>(inv_t_), std::nextafter(cut_, INFINITY), negligible};
  const RowKernels& kernels = row_kernels(source_.dtype);
  parallel_for(threads, groups(), 256, [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    const auto run = [&](int64_t first, int64_t stop, const MassParameters& parameters) {
      first = std::max(first, begin);
      stop = std::min(stop, end);
      if (first >= stop) return;
      kernels.masses(source_.at(first * kGroup), stop - first, &top_[first], parameters, &mass_[first]);
    };
    if (fast) {
      run(0, std::min(boundary, whole), before);
      run(boundary + 1, whole, after);
    }
    for (int64_t g = begin; g < end; ++g)
      if (!fast || g == boundary || g >= whole) mass_[g] = mass_of(g);
  });
  total_ = 0.0;
  for (const double m : mass_) total_ += std::max(m, 0.0);
}

double Row::mass_of(int64_t g) const {
  const double log_bound = (static_cast<double>(top_[g]) - max_) * inv_t_;
  if (top_[g] < cut_ || log_bound < log_least_) return 0.0;
  double w[kGroup];
  return log_bound < kNegligible ? -1.0 : group(g, w);
}

double Row::bound(int64_t g) const { return kGroup * exp_one((static_cast<double>(top_[g]) - max_) * inv_t_); }

double Row::group(int64_t g, double* w) const {
  float l[kGroup];
  load(g, l);
  if ((g + 1) * kGroup - 1 > last_)
    for (int64_t i = 0; i < kGroup; ++i)
      if (l[i] == cut_ && g * kGroup + i > last_) l[i] = -INFINITY;
  return group_kernels().exp64(l, max_, inv_t_, cut_, least_, w);
}

double Row::weight(int64_t id) const {
  const float l = point_ >= 0 ? (id == point_ ? 0.0f : -INFINITY) : source_[id];
  if (!(l > cut_ || (l == cut_ && id <= last_))) return 0.0;
  const double w = exp_one((static_cast<double>(l) - max_) * inv_t_);
  return w >= least_ ? w : 0.0;
}

// No candidate below this logit is among the k largest: the k-th largest of the groups' largest ones.
float Row::count_floor(int64_t k) const {
  if (k > groups()) return -FLT_MAX;
  thread_local std::vector<float> tops;
  tops = top_;
  std::nth_element(tops.begin(), tops.begin() + (k - 1), tops.end(), std::greater<float>());
  return std::max(tops[k - 1], -FLT_MAX);
}

// No id of the nucleus is below this logit: all ids of weight under `share` together hold too little to be missed.
float Row::mass_floor(double share) const {
  const double floor = max_ + std::log(0.5 * share) / inv_t_;
  return std::max({static_cast<float>(std::max(floor, static_cast<double>(-FLT_MAX))), cut_, -FLT_MAX});
}

// The shortest prefix of the order that holds `need` ids (or, by_mass, weights that sum to `need`), by radix selection
// on the logits' ordered bits: three histograms of 11, 11 and 10 bits, each inside the bin in which the last one ended.
// Ids below `floor` are known not to be in it.
Row::Prefix Row::select(double need, bool by_mass, float floor) const {
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
      load(g, l);
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
