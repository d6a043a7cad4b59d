// A token drawn from weights by an exponential race of groups of 64 ids (sk/accept.h).
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/row.h"
#include "sk/accept.h"

namespace sk {

// Weights of a vocabulary, 64 ids at a time.
class Weights {
 public:
  virtual double group(int64_t g, double* w) const = 0;  // fills w; returns the sum
  virtual const std::vector<double>& mass() const = 0;   // the sums; -b: not evaluated, at most b

 protected:
  ~Weights() = default;
};

int64_t draw(const Weights& weights, const Noise& noise);  // -1 if every weight is 0

}  // namespace sk
