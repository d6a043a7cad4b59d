// What refused drafts leave of a row's distribution, evaluated 64 ids at a time.
//
//   w_0 = p,   w_i = max(r_i/T_{i-1} * w_{i-1} - q_i, 0),   T_i = sum w_i
//
// q_i is the refused draft's distribution as its turn saw it: without the ids of the siblings refused before it, and
// then renormalised, as drawing without replacement does. A point mass only takes its id away. A refusal that would
// leave nothing is passed over. Nothing is stored but the mass of every group.
//
// Where p is close to q, or r to 1, what is left is small against what it is taken from. So p, q and all sums are
// evaluated in double as soon as a distribution is taken away; before, the sums are the rows' own, good to 1e-6. Groups
// are evaluated when somebody asks for them: a draw asks for few.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/draft_row.h"
#include "cpu/draw.h"
#include "cpu/row.h"

namespace sk {

class Residual final : public Weights {
 public:
  void start(Row& p, int threads);  // nothing refused; p has been weighed

  bool accepts(double u, DraftRow& q);           // u * q < p, of a draft and what is left for it
  double probability(int64_t id);                // what is left of p(id), normalised
  double proposal(DraftRow& q, bool in_double);  // q(q.id()) as its turn sees it

  void refuse(DraftRow& q, double r);  // takes q from r times what is left
  double take(DraftRow& q, double r);  // the same; returns S = sum max(r*P - q, 0)

  // The sum of what is left, in double. If that is nothing, the last refusal is undone. (So after a draw from nothing,
  // call this and draw again.)
  double total();

  double group(int64_t g, double* w) const override;
  const std::vector<double>& mass() const override { return untouched() ? p_->mass() : mass_; }

 private:
  struct Step {
    const DraftRow* q;
    double factor, scale;  // w = max(factor * w - scale * q, 0)
    size_t taken;          // so many ids were gone when its turn came
  };

  bool untouched() const { return steps_.empty() && !in_double_; }
  void load(const DraftRow& q, size_t taken, int64_t g, double* out) const;
  void forget(double factor);
  void evaluate(double least);

  Row* p_ = nullptr;
  int threads_ = 1;
  std::vector<Step> steps_;
  std::vector<int64_t> taken_;  // the ids of all refused drafts
  std::vector<double> mass_;    // what is left of every group, as Row::mass()
  bool in_double_ = false;      // mass_ holds nothing that was summed in float
  bool complete_ = false;       // everything that matters is known, total_ is its sum
  double total_ = 0;

  const DraftRow* scaled_ = nullptr;  // whose scale is
  double scale_ = 1;
  bool scale_in_double_ = false;
};

}  // namespace sk
