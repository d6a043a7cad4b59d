// Verification of drafts by the token rule (Leviathan et al. 2211.17192, Chen et al. 2302.01318), and plain sampling.
//
// Per request, row by row until the first refusal: one pass over the row for its maxima, one for the masses of groups
// of 64 ids (and a selection if there are filters), then a coin decides about the draft. Only the row that gives the
// last token is touched again, in the draw. Rows after the first refusal are never read.
#include "cpu/verify.h"

#include <algorithm>
#include <cmath>

#include "cpu/draft_row.h"
#include "cpu/draw.h"
#include "cpu/float_mode.h"
#include "cpu/threads.h"
#include "sk/accept.h"

namespace sk {
namespace {

constexpr double kNotLess = 1.0 + 1e-5;  // makes an upper bound of a mass in float arithmetic
constexpr int64_t kInlineIds = 32768;  // fewer ids than this are not worth a second thread

class RowWeights final : public Weights {
 public:
  explicit RowWeights(const Row& row) : row_(row) {}
  double group(int64_t g, double* w) const override { return row_.group(g, w); }
  const std::vector<double>& mass() const override { return row_.mass(); }

 private:
  const Row& row_;
};

// What is left of p after a refusal: max(p - q, 0). For a point mass that is p without the refused id.
class Residual final : public Weights {
 public:
  void set(Row& p, DraftRow& q) {
    p_ = &p;
    q_ = &q;
    mass_ = p.mass();
    if (q.is_point()) {
      double w[kGroup];
      double& m = mass_[q.id() / kGroup];
      if (m > 0) m = group(q.id() / kGroup, w);
      return;
    }
    q.probability();
    total_ = p.total();
    for (double& m : mass_) m = -std::fabs(m) * kNotLess / total_;
  }

  double group(int64_t g, double* w) const override {
    p_->group(g, w);
    if (q_->is_point()) {
      if (g == q_->id() / kGroup) w[q_->id() % kGroup] = 0.0;
      return sum64(w);
    }
    double q[kGroup];
    q_->group(g, q);
    for (int i = 0; i < kGroup; ++i) w[i] = std::max(w[i] / total_ - q[i], 0.0);
    return sum64(w);
  }

  const std::vector<double>& mass() const override { return mass_; }

 private:
  const Row* p_ = nullptr;
  const DraftRow* q_ = nullptr;
  double total_ = 1.0;
  std::vector<double> mass_;
};

// Kept per thread, so that a call allocates nothing once they have grown.
struct Scratch {
  Row row;
  DraftRow draft;
  Residual residual;
};
Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

// One request's way through its rows.
class Request {
 public:
  Request(const VerifyCall& call, int64_t b, int threads)
      : call_(call),
        b_(b),
        threads_(threads),
        start_(call.cu_drafts[b]),
        drafts_(call.cu_drafts[b + 1] - start_),
        filters_(call.sampling.filters(b)),
        greedy_(filters_.temperature == 0.0f),
        tokens_(call.tokens + b * call.width),
        logprobs_(call.logprobs ? call.logprobs + b * call.width : nullptr) {
    if (!greedy_) {
      seed_ = static_cast<uint64_t>(call.sampling.seed[b]);
      position_ = static_cast<uint64_t>(call.sampling.position[b]);
    }
  }

  void run() {
    while (judge(emitted_ < drafts_ ? call_.draft_tokens[start_ + emitted_] : -1)) ++accepted_;
    call_.num_accepted[b_] = accepted_;
    call_.flags[b_] = flags_;
    for (int64_t i = emitted_; i < call_.width; ++i) {
      tokens_[i] = -1;
      if (logprobs_) logprobs_[i] = NAN;
    }
  }

 private:
  // Judges the draft at the next row, -1 = none, and emits a token; returns whether the draft was accepted.
  bool judge(int64_t draft) { return greedy_ ? judge_greedy(draft) : judge_random(draft); }

  Source target() const { return call_.target[start_ + b_ + emitted_]; }

  bool judge_greedy(int64_t draft) {
    int64_t best;
    if (logprobs_) {
      Row& row = scratch().row;
      read(row);
      best = row.empty() ? -1 : row.argmax();
    } else {
      bool hard;
      best = row_argmax(target(), threads_, &hard);
      if (hard) flags_ |= kHardTarget;
    }
    emit(best);
    return draft >= 0 && best == draft;
  }

  bool judge_random(int64_t draft) {
    Scratch& s = scratch();
    read(s.row);
    if (!s.row.empty()) s.row.weigh(filters_, threads_);
    if (draft < 0) {
      last(nullptr);
      return false;
    }
    if (!s.draft.read(call_, start_ + emitted_, draft, filters_, threads_)) {
      flags_ |= kBadDraft;
      last(nullptr);
      return false;
    }
    if (s.row.empty()) {
      last(nullptr);
      return false;
    }
    const double u = uniform(seed_, position_, Stream::kCoin, static_cast<uint32_t>(emitted_), 0);
    if (s.draft.accepts(u, &s.row)) {
      emit(draft);
      return true;
    }
    s.residual.set(s.row, s.draft);
    last(&s.residual);
    return false;
  }

  void read(Row& row) {
    row.read(target(), threads_);
    if (row.nan() || row.infinite()) flags_ |= kHardTarget;
  }

  // Draws the last token from the residual, or from p where there is none or nothing left in it.
  void last(const Residual* residual) {
    const Row& row = scratch().row;
    if (row.empty()) return emit(-1);
    const bool plain = drafts_ == 0 || call_.draft_tokens[start_] < 0;
    const Noise noise{seed_, position_, plain ? Stream::kPlain : Stream::kLast, static_cast<uint32_t>(emitted_)};
    int64_t id = residual ? draw(*residual, noise) : -1;
    if (id < 0) id = draw(RowWeights(row), noise);
    emit(id);
  }

  void emit(int64_t id) {
    if (id < 0) {
      flags_ |= kNoCandidate;
      return;
    }
    tokens_[emitted_] = id;
    if (logprobs_) logprobs_[emitted_] = static_cast<float>(scratch().row.log_softmax(id));
    ++emitted_;
  }

  const VerifyCall& call_;
  const int64_t b_;
  const int threads_;
  const int64_t start_, drafts_;
  const Filters filters_;
  const bool greedy_;
  int64_t* const tokens_;
  float* const logprobs_;
  uint64_t seed_ = 0, position_ = 0;
  int64_t emitted_ = 0;
  int32_t accepted_ = 0, flags_ = 0;
};

// Threads share out the requests, or, if there are fewer requests than threads, the ids of each row.
template <class F>
void over_requests(int threads, int64_t requests, int64_t vocabulary, F&& one) {
  if (vocabulary * requests < kInlineIds) threads = 1;
  if (requests < threads) {
    const IeeeMode mode;
    for (int64_t b = 0; b < requests; ++b) one(b, threads);
    return;
  }
  parallel_for(threads, requests, std::max<int64_t>(1, kInlineIds / vocabulary), [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    for (int64_t b = begin; b < end; ++b) one(b, 1);
  });
}

}  // namespace

int64_t longest_chain(const int32_t* cu_drafts, int64_t requests, const int64_t* draft_tokens, int64_t drafts,
                      int64_t vocabulary) {
  if (cu_drafts[0] != 0 || cu_drafts[requests] != drafts) return -1;
  int64_t longest = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t start = cu_drafts[b], stop = cu_drafts[b + 1];
    if (stop < start || stop > drafts) return -1;
    longest = std::max(longest, stop - start);
    for (int64_t i = start; i < stop && draft_tokens[i] != -1; ++i)
      if (draft_tokens[i] < 0 || draft_tokens[i] >= vocabulary) return -1;
  }
  return longest;
}

void verify(const VerifyCall& call, int threads) {
  over_requests(threads, call.requests, call.target.columns, [&](int64_t b, int t) { Request(call, b, t).run(); });
}

void sample(const SampleCall& call, int threads) {
  over_requests(threads, call.requests, call.logits.columns, [&](int64_t b, int t) {
    const Filters filters = call.sampling.filters(b);
    const bool greedy = filters.temperature == 0.0f;
    Row& row = scratch().row;
    bool hard;
    int64_t id = -1;
    if (greedy && !call.logprobs) {
      id = row_argmax(call.logits[b], t, &hard);
    } else {
      row.read(call.logits[b], t);
      if (!row.empty() && greedy) id = row.argmax();
      if (!row.empty() && !greedy) {
        row.weigh(filters, t);
        id = draw(RowWeights(row),
                  Noise{static_cast<uint64_t>(call.sampling.seed[b]), static_cast<uint64_t>(call.sampling.position[b]),
                        static_cast<Stream>(call.stream), static_cast<uint32_t>(call.index[b])});
      }
    }
    call.tokens[b] = id;
    if (call.logprobs) call.logprobs[b] = id < 0 ? NAN : static_cast<float>(row.log_softmax(id));
  });
}

}  // namespace sk
