// The distribution q that a draft was drawn from: a point mass, raw logits under the request's own filters, or
// probabilities as they are; over the whole vocabulary or over a part of it.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/row.h"

namespace sk {

struct Drafts;

class DraftRow {
 public:
  // Draft n, of token id. False if its row is unusable: NaN, a negative or infinite probability, q(id) = 0.
  bool read(const Drafts& drafts, int64_t n, int64_t id, const Filters& filters, int threads);
  bool is_point() const { return kind_ == Kind::kPoint; }
  bool given() const { return kind_ == Kind::kProbs; }  // probabilities, whatever they sum to
  int64_t id() const { return id_; }
  double probability();                    // q(id) > 0
  bool accepts(double u, Row* p);          // the token rule, u * q(id) < p(id), of a target row p
  void group(int64_t g, double* q) const;  // q of the target ids 64 g .. 64 g + 63, once probability() was asked for

 private:
  enum class Kind { kPoint, kLogits, kProbs };

  int64_t column(int64_t id) const;  // the first column of an id >= id
  void spread();                     // q of all columns, for group()

  Kind kind_ = Kind::kPoint;
  Row row_;
  Source source_{};
  const int32_t* ids_ = nullptr;
  int64_t id_ = 0;
  double weight_ = 1.0, total_ = 1.0;  // q = weight / total; for logits, total is 0 until it is needed

  // With ids, what group() reads: q of every column, and the first column of every group of target ids.
  std::vector<double> q_;
  std::vector<int64_t> first_;
  bool spread_ = false;
};

}  // namespace sk
