#include "cpu/draft_row.h"

#include <algorithm>

#include "cpu/verify.h"
#include "sk/accept.h"

namespace sk {

bool DraftRow::read(const Drafts& drafts, int64_t n, int64_t id, const Filters& filters, int threads) {
  id_ = id;
  weight_ = total_ = 1.0;
  spread_ = false;
  if (drafts.rows.data == nullptr || (drafts.kind != nullptr && drafts.kind[n])) {
    kind_ = Kind::kPoint;
    return true;
  }
  source_ = drafts.rows[n];
  ids_ = drafts.ids;
  if (drafts.are_logits) {
    kind_ = Kind::kLogits;
    row_.read(source_, threads);
    if (row_.nan() || row_.empty()) return false;
    row_.weigh(filters, threads);
  } else {
    kind_ = Kind::kProbs;
    if (!source_.all_probabilities(threads)) return false;
  }
  const int64_t j = column(id);
  const bool listed = j < source_.size && (ids_ == nullptr || ids_[j] == id);
  if (!listed) return false;
  if (kind_ == Kind::kProbs) {
    weight_ = source_[j];
  } else {
    weight_ = row_.weight(j);
    total_ = 0.0;
  }
  return weight_ > 0.0;
}

double DraftRow::probability() {
  if (total_ == 0.0) total_ = row_.total();
  if (ids_ != nullptr && !is_point() && !spread_) spread();
  return weight_ / total_;
}

// Columns are evaluated in whole groups of their own: one by one their exponentials take ten times as long.
void DraftRow::spread() {
  const int64_t columns = source_.size, groups = (columns + kGroup - 1) / kGroup;
  q_.resize(groups * kGroup);
  for (int64_t g = 0; g < groups; ++g) {
    double* const q = &q_[g * kGroup];
    if (kind_ == Kind::kProbs) {
      for (int64_t j = g * kGroup; j < std::min((g + 1) * kGroup, columns); ++j) q[j - g * kGroup] = source_[j];
    } else if (row_.group(g, q) != 0.0) {
      for (int i = 0; i < kGroup; ++i) q[i] /= total_;
    }
  }
  first_.clear();
  for (int64_t j = 0; j < columns; ++j)
    while (static_cast<int64_t>(first_.size()) * kGroup <= ids_[j]) first_.push_back(j);
  spread_ = true;
}

bool DraftRow::accepts(double u, Row* p) {
  if (kind_ != Kind::kLogits) return p->exceeds(id_, u * weight_);
  const double w = p->weight(id_);
  do {  // two sums, both between bounds
    if (u * weight_ * p->at_most() < w * row_.at_least()) return true;
    if (u * weight_ * p->at_least() >= w * row_.at_most()) return false;
  } while (static_cast<int>(p->refine()) | static_cast<int>(row_.refine()));
  return false;
}

int64_t DraftRow::column(int64_t id) const {
  return ids_ == nullptr ? id : std::lower_bound(ids_, ids_ + source_.size, id) - ids_;
}

void DraftRow::group(int64_t g, double* q) const {
  if (ids_ == nullptr && kind_ == Kind::kLogits) {
    if (row_.group(g, q) == 0.0) return;
    for (int i = 0; i < kGroup; ++i) q[i] /= total_;
    return;
  }
  std::fill(q, q + kGroup, 0.0);
  const int64_t begin = g * kGroup, end = begin + kGroup;
  if (ids_ == nullptr) {
    for (int64_t i = begin; i < std::min(end, source_.size); ++i) q[i - begin] = source_[i];
    return;
  }
  if (g >= static_cast<int64_t>(first_.size())) return;
  for (int64_t j = first_[g]; j < source_.size && ids_[j] < end; ++j)
    if (ids_[j] >= begin) q[ids_[j] - begin] = q_[j];  // always, unless somebody writes to the ids meanwhile
}

}  // namespace sk
