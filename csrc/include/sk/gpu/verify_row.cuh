// One row of logits and the distribution that it stands for, as a few numbers that the whole block shares.
//
// With w = exp((l - max)/T) all filters together keep the ranks from one cut on (verify_select.cuh). So p(id) is one
// logit, one comparison and one exponential away, in float64; nothing of the size of the vocabulary is written.
#pragma once
#include "sk/gpu/verify_select.cuh"
#include "sk/gpu/verify_survey.cuh"

namespace sk::gpu {

using WideBlock = BlockTeam<kWideBlock>;

struct Filters {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
};

struct Row {
  Source source;
  const Group* groups;  // its survey
  float max;            // -inf: no candidate, and no other question may be asked
  bool nan;             // met; of probabilities: an entry that is none
  int64_t point;        // of a row with +inf: the first one, from here on the only candidate, of logit 0; else -1
  int64_t best;         // the first id of the largest logit, if it was asked for
  double inverse;       // 1/T
  Ranks ranks;
  uint64_t cut;
  double mass;   // of the whole row, relative to max
  double total;  // of the support

  __device__ bool empty() const { return max == -INFINITY; }
  __device__ bool hard() const { return nan || point >= 0; }

  // First: what the survey says. This object lies in shared memory; all threads of the block call `read` and `weigh`.
  __device__ void read(const Source& row, const Group* survey, bool logits, bool argmax) {
    float top = -INFINITY;
    int tainted = 0;
    for (int64_t g = threadIdx.x; g < row.groups(); g += kWideBlock) {
      top = Max()(top, survey[g].top);
      tainted |= survey[g].tainted();
    }
    top = WideBlock::reduce(top, Max());
    tainted = WideBlock::reduce(tainted, Max());
    const bool infinite = logits && top == INFINITY;
    const int64_t first = infinite || (argmax && top > -INFINITY) ? first_equal(row, survey, top) : -1;
    if (threadIdx.x == 0) {
      source = row;
      groups = survey;
      max = infinite ? 0.0f : top;
      nan = tainted != 0;
      best = first;
      point = infinite ? first : -1;
      inverse = mass = total = 1.0;  // without `weigh` the row stands for all of itself
      ranks = Ranks::of_row(row);
      cut = ranks.lowest();
    }
    __syncthreads();
  }

  __device__ float logit(int64_t id) const {
    if (point >= 0) return id == point ? 0.0f : -INFINITY;
    return clean(source[id]);
  }

  // f(id, quad) for the whole row, shared out among the threads; -inf behind the end, NaN as it is.
  template <class F>
  __device__ void each_quad(const F& f) const {
    const Source row = source;
    const int64_t step = kWideBlock * kQuad;
    for (int64_t base = threadIdx.x * kQuad; base < row.size; base += kAhead * step) {
      Quad quads[kAhead];
      row.quads(base, step, -INFINITY, quads);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) f(base + k * step, quads[k]);
    }
  }

  // log sum exp(l - max) of the row itself, before temperature and filters.
  __device__ double log_sum() const {
    if (point >= 0) return 0.0;
    const float top = max;
    double sum = 0.0;
    each_quad([&](int64_t, const Quad& quad) {
      float some = 0.0f;
      for (const float l : quad.v) some += l > -INFINITY ? expf(l - top) : 0.0f;
      sum += some;
    });
    return log(WideBlock::reduce(sum, Sum()));
  }
  __device__ float log_softmax(int64_t id, double log_sum) const {
    return static_cast<float>(static_cast<double>(logit(id)) - max - log_sum);
  }

  // Then: support and masses, for temperature > 0.
  __device__ void weigh(const Filters& filters, Histogram& shared) {
    if (threadIdx.x == 0) inverse = 1.0 / filters.temperature;
    __syncthreads();
    if (point >= 0) return;
    double sum = 0.0;
    for (int64_t g = threadIdx.x; g < source.groups(); g += kWideBlock) sum += unfiltered(g);
    sum = WideBlock::reduce(sum, Sum());
    if (threadIdx.x == 0) mass = total = sum;
    __syncthreads();

    const bool by_count = filters.top_k > 0 && filters.top_k < source.size, nucleus = filters.top_p < 1.0f;
    const int64_t count = by_count ? filters.top_k : source.size;
    uint64_t enough = cut;  // a cut that is known to be below the one that is sought
    const uint64_t floor =
        filters.min_p > 0.0f ? ranks.from(max + filters.temperature * log(static_cast<double>(filters.min_p))) : cut;
    // Up to three selections: of the groups' largest logits, which the k first ids can't be below; of the k first ids;
    // of the nucleus in them. min-p is a floor of the last one.
    for (int step = 0; step < 3; ++step) {
      uint64_t low = cut;
      Need need{false, static_cast<uint64_t>(count)};
      if (step == 0) {
        if (!by_count || count > source.groups()) continue;
      } else if (step == 1) {
        if (!by_count) continue;
        low = Max()(enough, nucleus ? cut : floor);
      } else if (nucleus) {
        // At most `count` ids of this weight hold half of what the nucleus may miss.
        const double lightest = log(0.5 * (1.0 - filters.top_p) * total / static_cast<double>(count));
        const double logit = fmax(max + filters.temperature * lightest, -static_cast<double>(FLT_MAX));
        low = Max()(Max()(ranks.first(fminf(static_cast<float>(logit), max)), floor), cut);
        need = {true, static_cast<uint64_t>(filters.top_p * total * kMassUnit)};
      } else {
        if (floor <= cut) break;
        low = floor;
        need.amount = ~uint64_t{0};  // everything from there on
      }
      const Prefix prefix = select(shared, low, ranks.last(max), need,
                                   [&](uint64_t from, uint64_t to, auto&& f) { visit(step == 0, from, to, f); });
      if (step == 0) {
        enough = prefix.cut & ~ranks.last_id();
        continue;
      }
      if (threadIdx.x == 0) cut = prefix.cut, total = prefix.mass;
      __syncthreads();
    }
  }

  // Of one id, relative to the largest logit; 0 outside of the support.
  __device__ double weight(int64_t id) const {
    const float l = logit(id);
    return l > -INFINITY && ranks.of(l, id) >= cut ? exp((static_cast<double>(l) - max) * inverse) : 0.0;
  }
  __device__ double probability(int64_t id) const { return weight(id) / total; }

  // Before the filters.
  __device__ double unfiltered_probability(int64_t id) const {
    return exp((static_cast<double>(logit(id)) - max) * inverse) / mass;
  }

  // sum p log(p + 1e-5).
  __device__ double negentropy() const {
    if (point >= 0) return log(1.0 + 1e-5);
    const Ranks order = ranks;
    const uint64_t first = cut;
    const float top = max, scale = static_cast<float>(fmin(inverse, static_cast<double>(FLT_MAX)));
    const float share = static_cast<float>(1.0 / total);
    double sum = 0.0;
    each_quad([&](int64_t id, const Quad& quad) {
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const float l = quad.v[j];
        if (!(l > -INFINITY) || order.of(l, id + j) < first) continue;
        const float p = expf((l - top) * scale) * share;
        sum += p * logf(p + 1e-5f);
      }
    });
    return WideBlock::reduce(sum, Sum());
  }

  // Not less than the sum of weight over the group.
  __device__ double bound(int64_t g) const {
    if (point >= 0) return g == point / kGroup ? 1.0 : 0.0;
    return ranks.last(groups[g].top) < cut ? 0.0 : 1.00001 * unfiltered(g);
  }

 private:
  __device__ double unfiltered(int64_t g) const {
    const Group group = groups[g];
    return group.top == -INFINITY ? 0.0 : group.size() * exp((static_cast<double>(group.top) - max) * inverse);
  }

  // The first id of the largest logit.
  __device__ static int64_t first_equal(const Source& row, const Group* survey, float value) {
    int64_t g = row.groups();
    for (int64_t i = threadIdx.x; i < g; i += kWideBlock)
      if (survey[i].top == value) g = i;
    g = WideBlock::reduce(g, Min());
    int64_t id = g * kGroup + threadIdx.x;
    if (threadIdx.x >= kGroup || id >= row.size || row[id] != value) id = row.size;
    return WideBlock::reduce(id, Min());
  }

  // Calls f(rank, mass) for the ids with ranks in [low, high], or for the largest logits of the groups as if they were
  // ids of a row.
  template <class F>
  __device__ void visit(bool tops, uint64_t low, uint64_t high, const F& f) const {
    const Source row = source;
    const Group* const survey = groups;
    const Ranks order = ranks;
    const auto offer = [&](float l, int64_t id, float w) {
      const uint64_t rank = order.of(l, id);
      if (rank >= low && rank <= high) f(rank, static_cast<uint64_t>(w * static_cast<float>(kMassUnit)));
    };
    if (tops) {
      for (int64_t g = threadIdx.x; g < row.groups(); g += kWideBlock) offer(survey[g].top, g, 0.0f);
      return;
    }
    const float top = max, scale = static_cast<float>(fmin(inverse, static_cast<double>(FLT_MAX)));
    for (int64_t g = team(); g < row.groups(); g += kTeams) {
      if (order.last(survey[g].top) < low) continue;
      const int64_t id = g * kGroup + lane_of_team() * kQuad;
      Quad quad[1];
      row.quads(id, 0, -INFINITY, quad);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const float l = quad[0].v[j];
        if (l > -INFINITY) offer(l, id + j, expf((l - top) * scale));  // no NaN, nothing masked or behind the end
      }
    }
  }
};

}  // namespace sk::gpu
