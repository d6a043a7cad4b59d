// The entries of a row from some logit upwards, in no order: what a filter has to choose from.
#pragma once
#include <cstdint>

#include "sk/accept.h"

namespace sk {

class Candidates {
 public:
  static constexpr int64_t kMost = 2048;

  // Where a prefix of the order (logit descending) ends: it holds every entry above cut, `equal` of those that equal
  // it, and weighs `mass`.
  struct End {
    float cut;
    int64_t equal;
    double mass;
  };

  void clear() { size_ = 0; }
  float* end() { return logit_ + size_; }
  int64_t room() const { return kMost + kGroup - size_; }
  bool add(int64_t n);                   // n logits have been written to end(); false if n < 0
  void weigh(double max, double inv_t);  // w = exp((l - max) * inv_t) of each
  int64_t size() const { return size_; }
  double mass() const;
  double mass_from(double least) const;  // of the weights >= least

  // The shortest prefix that holds `need` entries, or weights that sum to `need`; false if all together don't.
  bool first(int64_t need, End* end) { return pick<false>(static_cast<double>(need), end); }
  bool nucleus(double need, End* end) { return pick<true>(need, end); }
  void keep(const End& end);

 private:
  template <bool kByMass>
  bool pick(double need, End* end);
  void swap(int64_t i, int64_t j);

  int64_t size_ = 0;
  float logit_[kMost + kGroup];
  double weight_[kMost + kGroup];
};

}  // namespace sk
