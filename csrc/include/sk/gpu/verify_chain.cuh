// verify and sample on the GPU: one block walks the rows of one request. The rules are those of
// specdec_kernels/reference/verify.py.
//
// All threads of the block follow the same path and share out the work inside a row. Rows behind the first refusal are
// not looked at (they are surveyed only where a first launch has surveyed all rows at once).
#pragma once
#include "sk/gpu/verify_draw.cuh"
#include "sk/gpu/verify_request.cuh"

namespace sk::gpu {

// What the block keeps in shared memory.
struct Desk {
  Request request;
  Row target, draft;  // those that are looked at; of probabilities only draft.source and draft.nan count
  Histogram histogram;
  Finishes finishes;
};

class Chain {
 public:
  __device__ Chain(const Verify& call, int64_t b, Desk& desk)
      : call_(call), desk_(desk), r_(desk.request), target_(desk.target), draft_(desk.draft) {
    __syncthreads();  // the block may still be at the request before
    if (threadIdx.x == 0) desk.request = request_of(call, b);
    __syncthreads();
  }

  __device__ void run(bool ids_are_bad) {
    int64_t emitted = 0;
    if (ids_are_bad || r_.bad) {
      flags_ = kBadValue;
    } else {
      const bool refused = walk();
      emitted = at_ + finish(refused);
    }
    if (threadIdx.x != 0) return;
    if (call_.num_accepted != nullptr) call_.num_accepted[r_.b] = static_cast<int32_t>(at_);
    if (call_.flags != nullptr) call_.flags[r_.b] = flags_;
    for (int64_t i = emitted; i < call_.width; ++i) {
      call_.tokens[r_.b * call_.width + i] = -1;
      if (call_.logprobs != nullptr) call_.logprobs[r_.b * call_.width + i] = NAN;
    }
  }

 private:
  enum class Judgement { kAccepted, kStopped, kRefused };  // stopped: what comes next is drawn from p
  enum class Stage { kForward, kBack, kLast };
  enum class Settled { kNo, kYes, kAsk };

  // Goes to the row that gives the last token, at_; returns whether it is drawn from what a draft has left of p. The
  // block rule goes forward to the block's end, then back to the longest prefix that is accepted.
  __device__ bool walk() {
    if (is_block()) set_ratio(0, 1.0);
    for (Stage stage = Stage::kForward;;) {
      look_at_row();
      if (stage == Stage::kLast) return true;
      if (stage == Stage::kForward) {
        const Judgement judgement = at_ < r_.proposed ? judge() : Judgement::kStopped;
        if (judgement == Judgement::kAccepted) {
          note(token());
          ++at_;
          continue;
        }
        if (!is_block()) return judgement == Judgement::kRefused;
        end_ = at_;
      } else if (coin_of(at_ - 1) < chance(ratio(at_))) {
        return true;
      }
      int64_t next = stage == Stage::kForward ? end_ : at_ - 1;
      Settled settled = Settled::kNo;
      for (; next > 0; --next)
        if ((settled = settle(next)) != Settled::kNo) break;
      if (next == end_) return false;
      at_ = next;
      stage = settled == Settled::kAsk ? Stage::kBack : Stage::kLast;
    }
  }

  __device__ Judgement judge() {
    const int64_t x = token();
    if (call_.rule == Rule::kTypical)
      return !target_.empty() && is_typical(call_, r_, target_, x) ? Judgement::kAccepted : Judgement::kStopped;
    if (r_.greedy() && call_.rule != Rule::kThreshold)
      return !target_.empty() && target_.best == x ? Judgement::kAccepted : Judgement::kStopped;
    const double q = draft_probability(x);
    if (!(q > 0.0)) {
      flags_ |= kBadDraft;
      return Judgement::kStopped;
    }
    if (target_.empty()) return Judgement::kStopped;
    if (call_.rule == Rule::kThreshold)
      return is_above(r_, target_, x, q) ? Judgement::kAccepted : Judgement::kStopped;
    const double p = target_.probability(x);
    if (is_block()) {
      set_ratio(at_ + 1, fmin(ratio_ * p / q, 1.0));
      return Judgement::kAccepted;  // for now
    }
    return accept_token(r_.seed, r_.position, static_cast<uint32_t>(at_), q, p) ? Judgement::kAccepted
                                                                                        : Judgement::kRefused;
  }

  // ---- block verification (Sun et al. 2403.10444): ratio i is r_i --------------------------------------------------

  __device__ bool is_block() const { return call_.rule == Rule::kBlock && !r_.greedy(); }

  __device__ double* ratios() const { return Slots(call_).ratios(call_.plan.chunks > 0 ? r_.b : blockIdx.x); }
  __device__ double ratio(int64_t i) const { return ratios()[i]; }
  __device__ void set_ratio(int64_t i, double r) {
    ratio_ = r;
    if (threadIdx.x == 0) ratios()[i] = r;
  }
  __device__ double coin_of(int64_t i) const { return coin(r_.seed, r_.position, static_cast<uint32_t>(i)); }

  // Whether the first i drafts are accepted, as far as that shows without row i: h <= r, and r = 1 makes h = 1.
  __device__ Settled settle(int64_t i) const {
    const double r = ratio(i);
    if (!(coin_of(i - 1) < r)) return Settled::kNo;
    return i == end_ || r == 1.0 ? Settled::kYes : Settled::kAsk;
  }

  // h = S/(S + 1 - r), S = sum max(r p - q, 0), of the row at hand.
  __device__ double chance(double r) const {
    double s = 0.0;
    if (is_point(call_, r_.start + at_)) {
      s = r * (1.0 - target_.probability(token()));
    } else {
      for (int64_t v = threadIdx.x; v < target_.source.size; v += kWideBlock) {
        const double p = target_.probability(v);
        if (p > 0.0) s += fmax(r * p - draft_probability(v), 0.0);
      }
      s = WideBlock::reduce(s, Sum());
    }
    return block_chance(s, r);
  }

  __device__ int64_t token() const { return call_.draft_tokens[r_.start + at_]; }

  // Puts row at_ of the target, and that of its draft, on the desk.
  __device__ void look_at_row() {
    const int sides = reads_draft(call_, r_, at_) ? 2 : 1;
    for (int side = 0; side < sides; ++side) {
      const bool of_draft = side == 1, logits = !of_draft || call_.drafts_are_logits;
      const int64_t slot = call_.plan.chunks > 0 ? r_.b * call_.width + at_ : blockIdx.x;
      const Source source = of_draft ? row_of(call_.draft_rows, r_.start + at_)
                                     : row_of(call_.target, r_.start + r_.b + at_);
      const Slots slots(call_);
      Group* const groups = of_draft ? slots.of_draft(slot) : slots.of_target(slot);
      if (call_.plan.chunks == 0) {
        survey(source, of_draft ? draft_look(call_, r_) : target_look(call_, r_), 0, source.groups(), groups);
        __syncthreads();
      }
      Row& row = of_draft ? desk_.draft : desk_.target;
      row.read(source, groups, logits, r_.greedy() && !of_draft);
      const float temperature = temperature_of(call_, r_);
      if (logits && !row.empty() && temperature > 0.0f) {
        const bool filtered = !of_draft || call_.rule != Rule::kThreshold;
        const Filters& f = r_.filters;
        row.weigh(filtered ? Filters{temperature, f.top_k, f.top_p, f.min_p} : Filters{temperature, 0, 1.0f, 0.0f},
                  desk_.histogram);
      }
      if (!of_draft && row.hard()) flags_ |= kHardTarget;
    }
  }

  // q(id) of the draft at hand; 0 everywhere if its row is unusable.
  __device__ double draft_probability(int64_t id) const {
    if (is_point(call_, r_.start + at_)) return id == token() ? 1.0 : 0.0;
    if (draft_.nan || (call_.drafts_are_logits && draft_.empty())) return 0.0;
    int64_t column = id;
    if (call_.draft_ids != nullptr) {
      column = first_at_least(call_.draft_ids, draft_.source.size, id);
      if (column == draft_.source.size || call_.draft_ids[column] != id) return 0.0;
    }
    return call_.drafts_are_logits ? draft_.probability(column) : static_cast<double>(draft_.source[column]);
  }

  __device__ static int64_t first_at_least(const int32_t* ids, int64_t size, int64_t id) {
    int64_t low = 0;
    while (low < size) {
      const int64_t middle = (low + size) / 2;
      if (ids[middle] < id)
        low = middle + 1;
      else
        size = middle;
    }
    return low;
  }

  // Emits the last token, drawn from what the refused draft has left of p, or from p; returns how many that were.
  __device__ int64_t finish(bool refused) {
    if (target_.empty()) {
      flags_ |= kNoCandidate;
      return 0;
    }
    int64_t id = r_.greedy() ? target_.best : -1;
    const bool plain = r_.proposed == 0;
    const Noise noise{r_.seed, r_.position, plain ? call_.plain : Stream::kLast,
                      static_cast<uint32_t>(plain ? call_.plain_index[r_.b] : at_)};
    const double r = is_block() ? ratio(at_) : 1.0;
    for (int attempt = refused ? 0 : 1; attempt < 2 && id < 0; ++attempt, refused = false)
      id = draw(desk_.finishes, target_, 1.0 / target_.total, noise, [&](int64_t v) {
        const double p = target_.probability(v);
        return refused ? fmax(r * p - draft_probability(v), 0.0) : p;
      });
    if (id < 0) {  // can't be: p has a candidate
      flags_ |= kNoCandidate;
      return 0;
    }
    note(id);
    return 1;
  }

  // Writes down token at_.
  __device__ void note(int64_t id) {
    const int64_t at = r_.b * call_.width + at_;
    if (call_.logprobs != nullptr) {
      const float logprob = target_.log_softmax(id, target_.log_sum());
      if (threadIdx.x == 0) call_.logprobs[at] = logprob;
    }
    if (threadIdx.x == 0) call_.tokens[at] = id;
  }

  const Verify& call_;
  Desk& desk_;
  const Request& r_;
  const Row &target_, &draft_;
  int64_t at_ = 0, end_ = 0;
  double ratio_ = 1.0;  // of the last row that was judged
  int32_t flags_ = 0;
};

// Whether the ids of a cut vocabulary are not what they have to be: ascending, and in the target's vocabulary.
__device__ inline bool ids_are_bad(const Verify& call) {
  if (call.draft_ids == nullptr) return false;
  int bad = 0;
  for (int64_t j = threadIdx.x; j < call.draft_rows.columns; j += kWideBlock) {
    const int32_t id = call.draft_ids[j];
    bad |= id < 0 || id >= call.target.columns || (j > 0 && call.draft_ids[j - 1] >= id);
  }
  return WideBlock::reduce(bad, Max()) != 0;
}

// First launch where a call has chunks: one block per chunk of a row of the target, or of the drafts.
__global__ void __launch_bounds__(kWideBlock) verify_survey_kernel(const Verify call) {
  const int64_t unit = blockIdx.x / call.plan.chunks, chunk = blockIdx.x % call.plan.chunks;
  const int sides = call.draft_rows.data == nullptr ? 1 : 2;
  const int64_t slot = unit / sides, b = slot / call.width, i = slot % call.width;
  const Request r = request_of(call, b);
  if (r.bad || i > r.proposed) return;
  const bool of_draft = unit % sides == 1;
  if (of_draft && !reads_draft(call, r, i)) return;
  const Source row = of_draft ? row_of(call.draft_rows, r.start + i) : row_of(call.target, r.start + b + i);
  const Slots slots(call);
  const int64_t each = (row.groups() + call.plan.chunks - 1) / call.plan.chunks;
  const int64_t begin = chunk * each, end = Min()(begin + each, row.groups());
  survey(row, of_draft ? draft_look(call, r) : target_look(call, r), begin, end,
         of_draft ? slots.of_draft(slot) : slots.of_target(slot));
}

__global__ void __launch_bounds__(kWideBlock, 1) verify_kernel(const Verify call) {
  SK_SHARED(Desk, desk, 1);
  const bool bad = ids_are_bad(call);
  for (int64_t b = blockIdx.x; b < call.requests; b += gridDim.x) Chain(call, b, *desk).run(bad);
}

}  // namespace sk::gpu
