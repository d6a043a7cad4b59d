// One row of raw logits and the distribution that it stands for, kept as a few numbers and evaluated 64 ids at a time.
//
// With w = exp((l - max)/T) every filter is a threshold: top-k and top-p keep a prefix of the order (logit descending,
// id ascending), so the support is (cut, last id kept at the cut) and w >= min_p. Nothing of the size of the vocabulary
// is stored; per 64 ids there are the largest logit and the mass.
//
// A row is read once, for the largest logit of every group. That bounds the mass of each group, and so the sum of all
// weights, and most questions are decided by bounds: is u < w/total, where does the nucleus end, which group can still
// win a race. Weights are evaluated in stages, heaviest groups first, until the answer is certain.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/candidates.h"
#include "cpu/row_kernels.h"
#include "cpu/source.h"

namespace sk {

struct Filters {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

// Of the order (logit descending, id ascending): everything above cut, and what equals it up to id last.
struct Prefix {
  float cut;
  int64_t last;
  double mass;  // negative: not known yet
};

class Row {
 public:
  void read(const Source& source, int threads);  // first: the largest logit of every group
  bool nan() const { return nan_; }
  bool infinite() const { return point_ >= 0; }  // a +inf: a point mass on the first one
  bool empty() const { return empty_; }          // no candidate: no other question may be asked
  int64_t argmax() const;
  double log_softmax(int64_t id) const;  // of the row as read, before temperature and filters

  void weigh(const Filters& filters, int threads);  // then: support and weights, for temperature > 0
  double weight(int64_t id) const;
  double group(int64_t g, double* w) const;  // the weights of ids 64 g .. 64 g + 63; returns their sum
  int64_t groups() const { return static_cast<int64_t>(top_.size()); }

  // The sum of each group; a negative number says that it was not evaluated and is at most that much.
  const std::vector<double>& mass() const { return mass_; }

  // The sum of all weights lies between these; refine() brings them closer, or returns false if they are equal.
  double at_least() const { return low_; }
  double at_most() const { return high_; }
  bool refine();
  double total();                          // refines to the end; the first call is not for several threads at once
  bool exceeds(int64_t id, double share);  // weight(id) > share * total(), without more refinement than that takes

 private:
  void load(int64_t g, float* l) const;
  void load_support(int64_t g, float* l) const;  // with -inf for what equals the cut and lies behind `last`
  bool exact(double inv_t) const;
  FloatWeights float_weights(double inv_t) const;
  void bound(float cut);
  void evaluate(double least);
  void settle(double total);

  void keep(const Prefix& prefix);
  void keep(const Candidates::End& end, Candidates* candidates);
  Candidates* keep_first(int64_t count);
  Candidates* keep_nucleus(double share, Candidates* support);
  float keep_weights(double least, Candidates* support);
  bool gather(float floor, float ceiling, Candidates* out) const;
  float floor_of(double log_weight) const;
  float count_floor(int64_t k) const;
  void sums_from(const float* at, bool by_mass, double* sums) const;
  Prefix narrow(double need, bool by_mass, float low, Candidates* found) const;
  Prefix everything() const { return {cut_, last_, -1.0}; }
  Prefix ending(float cut, int64_t n, double mass) const;
  int64_t nth_equal(float value, int64_t* n) const;

  static constexpr int kLastStage = 12;  // that of refine() in which every weight that matters is evaluated

  Source source_{};
  std::vector<float> top_;  // largest logit per group
  std::vector<double> mass_;
  bool nan_ = false, empty_ = true;
  int64_t point_ = -1;
  float max_ = 0, cut_ = 0;
  int64_t last_ = 0;
  double inv_t_ = 1, least_ = 0;
  double low_ = 0, high_ = 0;
  int stage_ = 0, threads_ = 1;
};

double sum64(const double* w);  // in the order of GroupKernels::exp64

}  // namespace sk
