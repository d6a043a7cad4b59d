// One request of a call as the GPU sees it: its numbers, read and checked. What could not be checked before the launch
// is checked here, before an address is formed from it.
#pragma once
#include "sk/gpu/verify_row.cuh"

namespace sk::gpu {

struct Request {
  int64_t b, start;
  int64_t proposed;  // drafts before the first -1
  Filters filters;
  float theta;
  int32_t bad;  // nothing of it may be used. No bool: clang would copy the padding behind one through local memory
  uint64_t seed, position;

  __device__ bool greedy() const { return filters.temperature == 0.0f; }
};

__device__ inline bool sound(const Filters& f, float theta) {
  return f.temperature >= 0.0f && f.temperature < INFINITY && f.top_p >= 0.0f && f.min_p <= 1.0f && theta == theta;
}

// What is not about the drafts.
__device__ inline Request parameters_of(const Verify& call, int64_t b) {
  Request r{};
  r.b = b;
  const Sampling& s = call.sampling;
  r.filters = {s.temperature[b], s.top_k[b], s.top_p[b], s.min_p[b]};
  r.theta = call.rule == Rule::kThreshold ? call.theta[b] : 0.0f;
  r.bad = !sound(r.filters, r.theta) || (s.seed == nullptr && !r.greedy());
  if (s.seed != nullptr) {
    r.seed = static_cast<uint64_t>(s.seed[b]);
    r.position = static_cast<uint64_t>(s.position[b]);
  }
  const int32_t index = call.plain_index[b];
  r.bad |= index < 0 || index >= 1 << 24;
  return r;
}

// Requests follow each other from 0 to the number of drafts (of nodes, if they are trees).
__device__ inline bool bounds_are_sound(const Verify& call, int64_t b, int64_t start, int64_t stop) {
  return 0 <= start && start <= stop && stop <= call.drafts && (b > 0 || start == 0) &&
         (b + 1 < call.requests || stop == call.drafts);
}

__device__ inline Request request_of(const Verify& call, int64_t b) {
  Request r = parameters_of(call, b);
  if (call.cu_drafts == nullptr) return r;
  const int64_t start = call.cu_drafts[b], stop = call.cu_drafts[b + 1];
  r.bad |= !bounds_are_sound(call, b, start, stop) || stop - start >= call.width;
  if (r.bad) return r;
  r.start = start;
  for (int64_t i = start; i < stop && call.draft_tokens[i] != -1; ++i, ++r.proposed)
    r.bad |= call.draft_tokens[i] < 0 || call.draft_tokens[i] >= call.target.columns;
  return r;
}

__device__ inline bool is_point(const Verify& call, int64_t n) {
  return call.draft_rows.data == nullptr || (call.draft_kind != nullptr && call.draft_kind[n]);
}

// The temperature at which target and draft rows are looked at; threshold compares probabilities also when greedy.
__device__ inline float temperature_of(const Verify& call, const Request& r) {
  return r.greedy() && call.rule == Rule::kThreshold ? 1.0f : r.filters.temperature;
}

__device__ inline Look target_look(const Verify& call, const Request& r) { return look_of(temperature_of(call, r)); }

__device__ inline Look draft_look(const Verify& call, const Request& r) {
  return call.drafts_are_logits ? look_of(temperature_of(call, r)) : Look{Reading::kProbabilities, 0.0f};
}

// p(x) of a row with candidates; of a greedy request 1 at the largest logit.
__device__ inline double probability_of(const Request& r, const Row& row, int64_t x) {
  return r.greedy() ? static_cast<double>(row.best == x) : row.probability(x);
}

// p(x) > min(eps, delta*exp(-H)), H = -sum p log(p + 1e-5) (Medusa 2401.10774). With all threads of the block.
__device__ inline bool is_typical(const Verify& call, const Request& r, const Row& row, int64_t x) {
  const double p = probability_of(r, row, x);
  if (p > static_cast<double>(call.eps)) return true;  // whatever H is
  return p > call.delta * exp(r.greedy() ? log(1.0 + 1e-5) : row.negentropy());
}

// P_target(x)/P_draft > theta before the filters, and x in the support.
__device__ inline bool is_above(const Request& r, const Row& row, int64_t x, double draft) {
  return row.unfiltered_probability(x) / draft > static_cast<double>(r.theta) && row.weight(x) > 0.0;
}

// Whether the rule looks at draft i's row.
__device__ inline bool reads_draft(const Verify& call, const Request& r, int64_t i) {
  return i < r.proposed && !is_point(call, r.start + i) && call.rule != Rule::kTypical &&
         (!r.greedy() || call.rule == Rule::kThreshold);
}

// The workspace: surveys, one slot per row with chunks, else one per block, with room for a target row and a draft row;
// behind them `width` numbers per block.
struct Slots {
  Group* base;
  int64_t target, draft;  // groups
  int64_t count, width;

  __device__ explicit Slots(const Verify& call)
      : base(static_cast<Group*>(call.workspace)),
        target((call.target.columns + kGroup - 1) / kGroup),
        draft(call.draft_rows.data == nullptr ? 0 : (call.draft_rows.columns + kGroup - 1) / kGroup),
        count(call.plan.chunks > 0 ? call.requests * call.width : call.plan.blocks),
        width(call.width) {}
  __device__ Group* of_target(int64_t slot) const { return base + slot * (target + draft); }
  __device__ Group* of_draft(int64_t slot) const { return of_target(slot) + target; }
  __device__ double* ratios(int64_t block) const { return reinterpret_cast<double*>(of_target(count)) + block * width; }
};

}  // namespace sk::gpu
