#include "cpu/draft_row.h"

#include <algorithm>

#include "cpu/verify.h"
#include "sk/accept.h"

namespace sk {
namespace {

// Bit patterns of numbers that are finite and >= 0: up to `largest`, and -0.
template <class Bits>
bool all_probabilities(const void* data, int64_t n, Bits largest, Bits minus_zero) {
  const Bits* bits = static_cast<const Bits*>(data);
  Bits bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= static_cast<Bits>((bits[i] > largest) & (bits[i] != minus_zero));
  return bad == 0;
}

bool usable(const Source& probs) {
  switch (probs.dtype) {
    case Dtype::kF16: return all_probabilities<uint16_t>(probs.data, probs.size, 0x7bff, 0x8000);
    case Dtype::kBF16: return all_probabilities<uint16_t>(probs.data, probs.size, 0x7f7f, 0x8000);
    default: return all_probabilities<uint32_t>(probs.data, probs.size, 0x7f7fffff, 0x80000000);
  }
}

}  // namespace

bool DraftRow::read(const VerifyCall& call, int64_t n, int64_t id, const Filters& filters, int threads) {
  id_ = id;
  probability_ = 1.0;
  if (call.drafts.data == nullptr || (call.draft_kind != nullptr && call.draft_kind[n])) {
    kind_ = Kind::kPoint;
    return true;
  }
  source_ = call.drafts[n];
  ids_ = call.draft_ids;
  if (call.drafts_are_logits) {
    kind_ = Kind::kLogits;
    row_.read(source_, threads);
    if (row_.nan() || row_.empty()) return false;
    row_.weigh(filters, threads);
  } else {
    kind_ = Kind::kProbs;
    if (!usable(source_)) return false;
  }
  const int64_t j = column(id);
  const bool listed = j < source_.size && (ids_ == nullptr || ids_[j] == id);
  probability_ = listed ? value(j) : 0.0;
  return probability_ > 0.0;
}

int64_t DraftRow::column(int64_t id) const {
  return ids_ == nullptr ? id : std::lower_bound(ids_, ids_ + source_.size, id) - ids_;
}

double DraftRow::value(int64_t column) const {
  return kind_ == Kind::kProbs ? static_cast<double>(source_[column]) : row_.weight(column) / row_.total();
}

void DraftRow::group(int64_t g, double* q) const {
  const int64_t begin = g * kGroup, end = begin + kGroup;
  if (ids_ == nullptr && kind_ == Kind::kLogits) {
    row_.group(g, q);
    for (int i = 0; i < kGroup; ++i) q[i] /= row_.total();
    return;
  }
  std::fill(q, q + kGroup, 0.0);
  if (ids_ == nullptr) {
    for (int64_t i = begin; i < std::min(end, source_.size); ++i) q[i - begin] = value(i);
    return;
  }
  for (int64_t j = column(begin); j < source_.size && ids_[j] < end; ++j) q[ids_[j] - begin] = value(j);
}

}  // namespace sk
