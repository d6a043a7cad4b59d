#include "cpu/candidates.h"

#include <algorithm>
#include <cmath>

#include "cpu/row_kernels.h"
#include "sk/accept.h"

namespace sk {

bool Candidates::add(int64_t n) {
  if (n < 0) return false;
  size_ += n;
  return true;
}

void Candidates::weigh(double max, double inv_t) {
  std::fill(logit_ + size_, logit_ + (size_ + kGroup - 1) / kGroup * kGroup, -INFINITY);
  for (int64_t i = 0; i < size_; i += kGroup)
    group_kernels().exp64(logit_ + i, max, inv_t, -INFINITY, 0.0, weight_ + i);
}

double Candidates::mass() const {
  double sum = 0.0;
  for (int64_t i = 0; i < size_; ++i) sum += weight_[i];
  return sum;
}

double Candidates::mass_from(double least) const {
  double sum = 0.0;
  for (int64_t i = 0; i < size_; ++i) sum += weight_[i] >= least ? weight_[i] : 0.0;
  return sum;
}

void Candidates::swap(int64_t i, int64_t j) {
  std::swap(logit_[i], logit_[j]);
  std::swap(weight_[i], weight_[j]);
}

// Quickselect: [begin, stop) holds the end of the prefix; everything before it belongs to the prefix.
template <bool kByMass>
bool Candidates::pick(double need, End* end) {
  int64_t begin = 0, stop = size_;
  double held = 0.0, mass = 0.0;  // of the entries before begin: what counts for need, and their weight
  while (begin < stop) {
    const float a = logit_[begin], b = logit_[begin + (stop - begin) / 2], c = logit_[stop - 1];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    int64_t above = begin, other = stop;  // [begin, above) > pivot, [other, stop) < pivot
    double mass_above = 0.0, mass_equal = 0.0, each = 0.0;
    for (int64_t i = begin; i < other;) {
      if (logit_[i] > pivot) {
        mass_above += weight_[i];
        swap(i++, above++);
      } else if (logit_[i] < pivot) {
        swap(i, --other);
      } else {
        each = weight_[i++];
        mass_equal += each;
      }
    }
    const double held_above = held + (kByMass ? mass_above : static_cast<double>(above - begin));
    const int64_t equal = other - above;
    if (above > begin && held_above >= need) {
      stop = above;
      continue;
    }
    const double held_equal = held_above + (kByMass ? mass_equal : static_cast<double>(equal));
    if (held_equal >= need) {
      double wanted = kByMass ? std::ceil((need - held_above) / each) : need - held_above;
      wanted = std::min(std::max(wanted, 1.0), static_cast<double>(equal));
      const int64_t n = static_cast<int64_t>(wanted);
      *end = {pivot, n, mass + mass_above + static_cast<double>(n) * each};
      return true;
    }
    held = held_equal;
    mass += mass_above + mass_equal;
    begin = other;
  }
  return false;
}

template bool Candidates::pick<false>(double, End*);
template bool Candidates::pick<true>(double, End*);

// Entries that equal the cut are alike, so any of them may go.
void Candidates::keep(const End& end) {
  int64_t kept = 0, equal = 0;
  for (int64_t i = 0; i < size_; ++i) {
    if (!(logit_[i] > end.cut || (logit_[i] == end.cut && equal++ < end.equal))) continue;
    logit_[kept] = logit_[i];
    weight_[kept++] = weight_[i];
  }
  size_ = kept;
}

}  // namespace sk
