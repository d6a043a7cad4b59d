// sum p log(p + 1e-5) = log(1e-5) + sum p log1p(y), y = 1e5 p. Most ids of a vocabulary are so unlikely that three
// terms of the logarithm's series do.
#include "cpu/entropy.h"

#include <cmath>

#include "sk/accept.h"

namespace sk {

double negative_entropy(Row& row) {
  constexpr double kFloor = 1e-5, kSeries = 1e-3;  // the series' error: y^4/4, 3e-13 of p
  constexpr double kNothing = 1e-12;               // a group of less adds less than 1e5 of its square
  const double per_weight = 1.0 / row.total();
  double sum = std::log(kFloor);
  for (int64_t g = 0; g < row.groups(); ++g) {
    const double most = std::fabs(row.mass()[g]) * per_weight;
    if (most < kNothing) continue;
    double w[kGroup];
    row.group(g, w);
    const bool small = most < kSeries * kFloor;
    for (int i = 0; i < kGroup; ++i) {
      const double p = w[i] * per_weight, y = p / kFloor;
      if (small)
        sum += p * (y - y * y * (0.5 - y * (1.0 / 3.0)));
      else if (p > 0.0)
        sum += p * std::log(1.0 + y);
    }
  }
  return sum;
}

}  // namespace sk
