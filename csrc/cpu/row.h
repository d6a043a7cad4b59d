// One row of raw logits and the distribution that it stands for, kept as a few numbers and evaluated 64 ids at a time.
//
// With w = exp((l - max)/T) every filter is a threshold: top-k and top-p keep a prefix of the order (logit descending,
// id ascending), so the support is (cut, last id kept at the cut) and w >= min_p. Nothing of the size of the vocabulary
// is stored; per 64 ids there are the largest logit and the mass. Groups whose mass cannot matter to the total
// (largest weight below e^-30) are evaluated only when a draw asks for them.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/row_kernels.h"

namespace sk {

struct Source {
  const void* data;
  Dtype dtype;
  int64_t size;

  const void* at(int64_t i) const { return static_cast<const char*>(data) + i * (dtype == Dtype::kF32 ? 4 : 2); }
  float operator[](int64_t i) const;
};

struct Filters {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

// The lowest id among the largest entries, NaN and -inf never, -1 without a candidate; *hard = NaN or +inf was met.
int64_t row_argmax(const Source& source, int threads, bool* hard);

class Row {
 public:
  void read(const Source& source, int threads);  // first: the largest logit of every group
  bool nan() const { return nan_; }
  bool infinite() const { return point_ >= 0; }  // a +inf: a point mass on the first one
  bool empty() const { return empty_; }          // no candidate: no other question may be asked
  int64_t argmax() const;
  double log_softmax(int64_t id) const;  // of the row as read, before temperature and filters

  void weigh(const Filters& filters, int threads);  // then: support and masses, for temperature > 0
  double total() const { return total_; }
  double weight(int64_t id) const;
  double group(int64_t g, double* w) const;  // the weights of ids 64 g .. 64 g + 63; returns their sum
  double bound(int64_t g) const;             // not less than that sum
  int64_t groups() const { return static_cast<int64_t>(top_.size()); }
  const std::vector<double>& mass() const { return mass_; }  // the sums; -1 = too small to matter, not evaluated

 private:
  struct Prefix {  // of the order: everything above cut, and what equals it up to id last
    float cut;
    int64_t last;
    double mass;
  };

  void load(int64_t g, float* l) const;
  void masses(int threads);
  double mass_of(int64_t g) const;
  void keep(const Prefix& prefix);
  Prefix select(double need, bool by_mass, float floor) const;
  int64_t nth_equal(float value, int64_t n) const;
  float count_floor(int64_t k) const;
  float mass_floor(double share) const;

  Source source_{};
  std::vector<float> top_;  // largest logit per group
  std::vector<double> mass_;
  bool nan_ = false, empty_ = true;
  int64_t point_ = -1;
  float max_ = 0, cut_ = 0;
  int64_t last_ = 0;
  double inv_t_ = 1, least_ = 0, log_least_ = 0, total_ = 0;
};

double sum64(const double* w);  // in the order of GroupKernels::exp64

}  // namespace sk
