// A draw: the race of groups of sk/accept.h, run by one block.
//
// A group of mass m ends at E/m, and E >= u. The survey bounds every mass from above, so u/bound is a time before which
// the group can't end: only groups that could still win are evaluated, the most promising first. Of a row of mass 1 that
// is about one per unit of time, 1/(what a residual leaves) in all, instead of the whole row.
#pragma once
#include "sk/gpu/verify_row.cuh"

namespace sk::gpu {

constexpr int kMostWaves = kWideBlock / kSmallestWave;

// The sum over group g of weight(id), by the lanes of one wave.
template <class Weight>
__device__ double group_mass(int64_t g, int64_t size, const Weight& weight) {
  double mass = 0.0;
#pragma unroll 1
  for (int i = threadIdx.x % wave(); i < kGroup; i += wave())
    if (g * kGroup + i < size) mass += weight(g * kGroup + i);
  return reduce_wave(mass, Sum());
}

struct Finish {
  double time;
  int64_t group;  // -1: nobody
  __device__ bool before(const Finish& other) const {
    return time < other.time || (time == other.time && group < other.group);
  }
};

// The winner among the groups of this wave: it takes as many neighbouring groups at a time as it has lanes.
template <class Weight>
__device__ Finish race_of_wave(const Row& row, double scale, const Noise& noise, const Weight& weight) {
  const int lane = threadIdx.x % wave();
  const int64_t groups = row.source.groups();
  Finish best{INFINITY, -1};
#pragma unroll 1
  for (int64_t base = threadIdx.x - lane; base < groups; base += kWideBlock) {
    const double bound = base + lane < groups ? scale * row.bound(base + lane) : 0.0;
    double earliest = bound > 0.0 ? noise.race(base + lane) / bound : INFINITY;
    for (;;) {
      const double next = reduce_wave(earliest, Min());
      if (next == INFINITY || next > best.time) break;
      const int who = reduce_wave(earliest == next ? lane : wave(), Min());
      if (lane == who) earliest = INFINITY;
      const double mass = group_mass(base + who, row.source.size, weight);
      const Finish finish{exponential(noise.race(base + who)) / mass, base + who};
      if (mass > 0.0 && (best.group < 0 || finish.before(best))) best = finish;
    }
  }
  return best;
}

struct Finishes {
  Finish of_wave[kMostWaves];
  double weights[kGroup];  // of the winner's ids
};

// An id drawn from weight(id) <= scale * row.weight(id); -1 if all are 0.
template <class Weight>
__device__ int64_t draw(Finishes& shared, const Row& row, double scale, const Noise& noise, const Weight& weight) {
  Finish* const finishes = shared.of_wave;
  double* const weights = shared.weights;
  const Finish mine = race_of_wave(row, scale, noise, weight);
  if (threadIdx.x % wave() == 0) finishes[threadIdx.x / wave()] = mine;
  __syncthreads();
  Finish best = finishes[0];
  for (int w = 1; w < kWideBlock / wave(); ++w)
    if (finishes[w].group >= 0 && (best.group < 0 || finishes[w].before(best))) best = finishes[w];
  if (best.group >= 0 && threadIdx.x < kGroup) {
    const int64_t id = best.group * kGroup + threadIdx.x;
    weights[threadIdx.x] = id < row.source.size ? weight(id) : 0.0;
  }
  __syncthreads();
  if (best.group < 0) return -1;
  double mass = 0.0, running = 0.0;
#pragma unroll 1
  for (int i = 0; i < kGroup; ++i) mass += weights[i];
  const double bound = noise.pick(best.group) * mass;
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < kGroup; ++i) {
    if (!(weights[i] > 0.0)) continue;
    last = i;
    running += weights[i];
    if (running > bound) break;
  }
  __syncthreads();  // the next draw writes to them
  return best.group * kGroup + last;
}

}  // namespace sk::gpu
