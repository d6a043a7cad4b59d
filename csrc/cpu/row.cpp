#include "cpu/row.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/even_grain.h"
#include "cpu/float_mode.h"
#include "cpu/threads.h"

namespace sk {
namespace {

// How far below the largest logit (over T) the groups lie that each stage evaluates. What lies below the last is less
// than 1e-7 of the total: 10^6 weights of e^-30.
constexpr double kStages[] = {7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 18.0, 30.0};
constexpr int64_t kEvaluation = 128;  // the bytes that could be read in the time that a group takes
constexpr double kLog2E = 1.4426950408889634;

}  // namespace

double sum64(const double* w) {
  double lane[8];
  for (int j = 0; j < 8; ++j) lane[j] = w[j];
  for (int i = 8; i < kGroup; i += 8)
    for (int j = 0; j < 8; ++j) lane[j] += w[i + j];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

void Row::read(const Source& source, int threads) {
  source_ = source;
  threads_ = threads;
  top_.resize(source.groups());
  nan_ = source.block_tops(kGroup, top_.data(), threads);
  max_ = largest(top_);
  empty_ = max_ == -INFINITY;
  point_ = -1;
  if (max_ == INFINITY) {  // from here on, a row with one candidate of logit 0
    const int64_t g = first_group(top_, max_);
    point_ = source.find(g * kGroup, source.size, max_);
    std::fill(top_.begin(), top_.end(), -INFINITY);
    top_[g] = max_ = 0.0f;
  }
}

void Row::load(int64_t g, float* l) const {
  if (point_ < 0) return source_.load(g, l);
  for (int64_t i = 0; i < kGroup; ++i) l[i] = g * kGroup + i == point_ ? 0.0f : -INFINITY;
}

void Row::load_support(int64_t g, float* l) const {
  load(g, l);
  if ((g + 1) * kGroup - 1 <= last_) return;
  for (int64_t i = 0; i < kGroup; ++i)
    if (l[i] == cut_ && g * kGroup + i > last_) l[i] = -INFINITY;
}

int64_t Row::argmax() const {
  if (point_ >= 0) return point_;
  const int64_t g = first_group(top_, max_);
  return source_.find(g * kGroup, source_.size, max_);
}

// Float arithmetic will do, unless the row is a point mass in place of what is in memory or the temperature is extreme.
bool Row::exact(double inv_t) const { return point_ >= 0 || !(inv_t > 1e-30 && inv_t < 1e30); }

FloatWeights Row::float_weights(double inv_t) const {
  const double scale = inv_t * kLog2E;
  return {max_, static_cast<float>(scale), static_cast<float>(-126.0 / scale)};
}

// Bounds for all masses; nothing is evaluated. Groups without an entry >= cut have no mass.
void Row::bound(float cut) {
  mass_.resize(top_.size());
  if (!exact(inv_t_)) {
    group_kernels().bounds(top_.data(), groups(), float_weights(inv_t_), cut, mass_.data());
    return;
  }
  for (int64_t g = 0; g < groups(); ++g)
    mass_[g] = top_[g] >= cut ? -kGroup * exp_one((static_cast<double>(top_[g]) - max_) * inv_t_) : 0.0;
}

// Evaluates the groups that may have more than `least`.
void Row::evaluate(double least) {
  const int64_t whole = exact(inv_t_) ? 0 : source_.size / kGroup;
  const int threads = kStages[stage_] < 14.0 ? 1 : threads_;  // the first stages are too small to be shared
  parallel_for(threads, groups(), even_grain(groups(), groups() * kEvaluation, threads),
               [&](int64_t begin, int64_t end) {
                 const IeeeMode mode;
                 const int64_t stop = std::min(end, whole);
                 if (begin < stop)
                   row_kernels(source_.dtype)
                       .masses(source_.at(begin * kGroup), stop - begin, float_weights(inv_t_), least, &mass_[begin]);
                 double w[kGroup];
                 for (int64_t g = std::max(begin, stop); g < end; ++g)
                   if (mass_[g] < -least) mass_[g] = group(g, w);
               });
}

bool Row::refine() {
  if (stage_ == kLastStage) return false;
  evaluate(kGroup * std::exp(-kStages[stage_]));
  double rest;
  group_kernels().tally(mass_.data(), groups(), &low_, &rest);
  high_ = ++stage_ == kLastStage ? low_ : low_ - rest;
  return true;
}

double Row::total() {
  if (stage_ < kLastStage - 1) stage_ = kLastStage - 1;
  refine();
  return low_;
}

bool Row::exceeds(int64_t id, double share) {
  const double w = weight(id);
  do {
    if (w > share * high_) return true;
    if (w <= share * low_) return false;
  } while (refine());
  return false;
}

double Row::weight(int64_t id) const {
  const float l = point_ >= 0 ? (id == point_ ? 0.0f : -INFINITY) : source_[id];
  if (!(l > cut_ || (l == cut_ && id <= last_))) return 0.0;
  const double w = exp_one((static_cast<double>(l) - max_) * inv_t_);
  return w >= least_ ? w : 0.0;
}

double Row::group(int64_t g, double* w) const {
  if (mass_[g] == 0.0) {  // behind a filter: most groups of a row with a nucleus
    std::fill(w, w + kGroup, 0.0);
    return 0.0;
  }
  float l[kGroup];
  load_support(g, l);
  return group_kernels().exp64(l, max_, inv_t_, cut_, least_, w);
}

double Row::log_softmax(int64_t id) const {
  if (point_ >= 0) return 0.0;
  thread_local std::vector<double> mass;
  mass.resize(top_.size());
  const FloatWeights weights = float_weights(1.0);
  group_kernels().bounds(top_.data(), groups(), weights, -FLT_MAX, mass.data());
  const int64_t whole = source_.size / kGroup;
  row_kernels(source_.dtype)
      .masses(source_.data, whole, weights, kGroup * std::exp(-kStages[kLastStage - 1]), mass.data());
  if (whole < groups()) {
    float l[kGroup];
    double w[kGroup];
    load(whole, l);
    mass[whole] = group_kernels().exp64(l, max_, 1.0, -FLT_MAX, 0.0, w);
  }
  double sum, rest;
  group_kernels().tally(mass.data(), groups(), &sum, &rest);
  return (static_cast<double>(source_[id]) - max_) - std::log(sum);
}

}  // namespace sk
