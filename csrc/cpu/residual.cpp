#include "cpu/residual.h"

#include <algorithm>
#include <cmath>

#include "cpu/float_mode.h"
#include "cpu/threads.h"
#include "sk/accept.h"

namespace sk {
namespace {

constexpr int64_t kGrain = 128;          // groups per piece of work
constexpr double kNotLess = 1.0 + 1e-5;  // makes an upper bound of a mass in float arithmetic
constexpr double kSmall = 1e-9;          // looked at only if not much else is left
constexpr double kNothing = 1e-17;       // what a group may hold of the whole without being evaluated

double sum(const std::vector<double>& mass) {  // of what was evaluated
  double all = 0.0;
  for (const double m : mass) all += std::max(m, 0.0);
  return all;
}

}  // namespace

void Residual::start(Row& p, int threads) {
  p_ = &p;
  threads_ = threads;
  steps_.clear();
  taken_.clear();
  in_double_ = complete_ = false;
  scaled_ = nullptr;
}

double Residual::group(int64_t g, double* w) const {
  const double all = p_->group(g, w);
  if (steps_.empty()) return all;
  for (const Step& step : steps_) {
    if (step.q->is_point()) {
      if (step.q->id() / kGroup == g) w[step.q->id() % kGroup] = 0.0;
      continue;
    }
    double q[kGroup];
    load(*step.q, step.taken, g, q);
    for (int i = 0; i < kGroup; ++i) {
      const double left = step.factor * w[i] - step.scale * q[i];
      w[i] = left > 0.0 ? left : 0.0;
    }
  }
  return sum64(w);
}

// q of a group without the first `taken` ids that were taken.
void Residual::load(const DraftRow& q, size_t taken, int64_t g, double* out) const {
  q.group(g, out);
  for (size_t i = 0; i < taken; ++i)
    if (taken_[i] / kGroup == g) out[taken_[i] % kGroup] = 0.0;
}

// Turns all masses into bounds, of what is left after another step of this factor.
void Residual::forget(double factor) {
  for (double& m : mass_) m = -std::fabs(m) * factor * kNotLess;
  in_double_ = true;
  complete_ = false;
}

// Evaluates the groups that may have more than `least`.
void Residual::evaluate(double least) {
  parallel_for(threads_, p_->groups(), kGrain, [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    double w[kGroup];
    for (int64_t g = begin; g < end; ++g)
      if (mass_[g] < -least) mass_[g] = group(g, w);
  });
}

double Residual::total() {
  if (complete_) return total_;
  if (untouched()) mass_ = p_->mass();
  if (!in_double_) forget(1.0);
  evaluate(kSmall);
  evaluate(kNothing * sum(mass_));
  total_ = sum(mass_);
  complete_ = true;
  if (total_ > 0.0 || steps_.empty()) return total_;
  steps_.pop_back();
  mass_ = p_->mass();
  double factor = 1.0;
  for (const Step& step : steps_) factor *= step.factor;
  forget(factor);
  return total();
}

double Residual::probability(int64_t id) {
  if (untouched()) return p_->weight(id) / p_->total();
  const double all = total();
  double w[kGroup];
  group(id / kGroup, w);
  return w[id % kGroup] / all;
}

bool Residual::accepts(double u, DraftRow& q) {
  if (untouched() && taken_.empty()) return q.accepts(u, p_);
  return u * proposal(q, false) < probability(q.id());
}

double Residual::proposal(DraftRow& q, bool in_double) {
  const double given = q.probability();
  if (scaled_ == &q && (scale_in_double_ || !in_double)) return given * scale_;
  const bool as_given = q.is_point() || (taken_.empty() && (q.given() || !in_double));
  scaled_ = &q;
  scale_ = 1.0;
  scale_in_double_ = in_double || !as_given;
  if (as_given) return given;
  thread_local std::vector<double> memory;
  std::vector<double>& share = memory;  // the caller's, for all threads
  share.resize(p_->groups());
  parallel_for(threads_, p_->groups(), kGrain, [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    double w[kGroup];
    for (int64_t g = begin; g < end; ++g) {
      load(q, taken_.size(), g, w);
      share[g] = sum64(w);
    }
  });
  scale_ = 1.0 / sum(share);
  return given * scale_;
}

void Residual::refuse(DraftRow& q, double r) {
  Step step{&q, 1.0, 1.0, taken_.size()};
  if (q.is_point()) {
    if (untouched()) mass_ = p_->mass();
    steps_.push_back(step);
    const int64_t g = q.id() / kGroup;
    double w[kGroup];
    if (mass_[g] != 0.0) mass_[g] = group(g, w);
    complete_ = false;
  } else {
    proposal(q, true);
    step.scale = scale_;
    step.factor = r / total();
    steps_.push_back(step);
    forget(step.factor);
  }
  taken_.push_back(q.id());
  scaled_ = nullptr;
}

double Residual::take(DraftRow& q, double r) {
  const double before = total();
  refuse(q, r);
  const size_t steps = steps_.size();
  const double after = total();
  if (steps_.size() < steps) return 0.0;
  return q.is_point() ? r * after / before : after;
}

}  // namespace sk
