#include "cpu/draw.h"

#include <cmath>

namespace sk {
namespace {

// The race so far. E = -log1p(-u) is never less than u, so most groups lose without a logarithm, and most of those
// whose mass is not known lose by their bound.
struct Race {
  double best = INFINITY;
  int64_t winner = -1;

  bool lost(double u, double mass) const { return u > best * mass; }
  void enter(int64_t g, double u, double mass) {
    const double time = exponential(u) / mass;
    if (winner < 0 || time < best || (time == best && g < winner)) {
      best = time;
      winner = g;
    }
  }
};

}  // namespace

int64_t draw(const Weights& weights, const Noise& noise) {
  const std::vector<double>& mass = weights.mass();
  const int64_t groups = static_cast<int64_t>(mass.size());
  thread_local std::vector<uint32_t> words;
  words.resize((groups + 15) / 16 * 16);
  const uint32_t c2 = static_cast<uint32_t>(noise.stream) << 24 | noise.index;
  for (int64_t g = 0; g < groups; g += 16)
    group_kernels().first_words(noise.seed, noise.position, c2, static_cast<uint32_t>(g), words.data() + g);
  const auto u = [](int64_t g) { return words[g] * 2.3283064365386962890625e-10; };

  Race race;
  double w[kGroup];
  int64_t likely = -1;  // of the groups that were not evaluated, the one that wins if all are as heavy as they may be
  double earliest = INFINITY;
  for (int64_t g = 0; g < groups; ++g) {
    if (mass[g] > 0 && !race.lost(u(g), mass[g])) race.enter(g, u(g), mass[g]);
    if (mass[g] < 0 && u(g) < earliest * -mass[g]) {
      likely = g;
      earliest = u(g) / -mass[g];
    }
  }
  const auto evaluate = [&](int64_t g) {
    if (race.lost(u(g), -mass[g])) return;
    const double m = weights.group(g, w);
    if (m > 0 && !race.lost(u(g), m)) race.enter(g, u(g), m);
  };
  if (likely >= 0) evaluate(likely);
  for (int64_t g = 0; likely >= 0 && g < groups; ++g)
    if (mass[g] < 0 && g != likely) evaluate(g);
  if (race.winner < 0) return -1;

  const double bound = noise.pick(race.winner) * weights.group(race.winner, w);
  double running = 0.0;
  int64_t last = -1;
  for (int64_t i = 0; i < kGroup; ++i) {
    if (!(w[i] > 0)) continue;
    last = race.winner * kGroup + i;
    running += w[i];
    if (running > bound) break;
  }
  return last;
}

}  // namespace sk
