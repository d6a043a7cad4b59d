// The survey: the one pass that reads a row from memory. It leaves 8 bytes per 64 ids, from which everything else
// starts: the group's largest logit, and the mass of its ids relative to that one, sum exp((l - top)/T).
//
// A team of 16 lanes holds one group at a time, so that neither the wave size nor the split of a row over blocks can
// show in a number.
#pragma once
#include "sk/gpu/reduce.cuh"
#include "sk/gpu/verify_source.cuh"

namespace sk::gpu {

// A minus sign of the mass (of -0, too) says that the group holds a NaN, or a number that is no probability.
struct alignas(8) Group {
  float top, mass;

  __device__ bool tainted() const { return (bits_of(mass) & 0x80000000u) != 0; }
  __device__ float size() const { return float_of(bits_of(mass) & 0x7fffffffu); }
};

enum class Reading { kMaxima, kMasses, kProbabilities };

// How a row is read, and with what 1/T (in f32; l - top is 0 or far from it where 1/T has no f32).
struct Look {
  Reading reading;
  float inverse;
};

__device__ inline Look look_of(float temperature) {
  if (temperature == 0.0f) return {Reading::kMaxima, 0.0f};
  return {Reading::kMasses, fminf(1.0f / temperature, FLT_MAX)};
}

__device__ inline Group group_of(const Quad& quad, const Look& look) {
  float top = -INFINITY, mass = 0.0f;
  bool tainted = false;
  if (look.reading == Reading::kProbabilities) {
    for (const float x : quad.v) tainted |= !(x >= 0.0f && x < INFINITY);
  } else {
    for (const float x : quad.v) {
      tainted |= x != x;
      top = Max()(top, x);  // a NaN loses here
    }
    top = reduce_lanes<kTeam>(top, Max());
    if (look.reading == Reading::kMasses) {
      for (const float x : quad.v) mass += x > -INFINITY ? expf((x - top) * look.inverse) : 0.0f;
      mass = reduce_lanes<kTeam>(mass, Sum());
      if (top == INFINITY) mass = 0.0f;  // the row is a point mass
    }
  }
  if (any_in_wave(tainted)) tainted = reduce_lanes<kTeam>(static_cast<int>(tainted), Max()) != 0;
  return {top, tainted ? -mass : mass};
}

// Surveys groups begin .. end - 1 of a row with all threads of a block.
__device__ inline void survey(const Source& row, const Look& look, int64_t begin, int64_t end, Group* out) {
  const float beyond = look.reading == Reading::kProbabilities ? 0.0f : -INFINITY;
  for (int64_t base = begin; base < end; base += kAhead * kTeams) {
    Quad quads[kAhead];
    row.quads((base + team()) * kGroup + lane_of_team() * kQuad, kTeams * kGroup, beyond, quads);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t g = base + k * kTeams + team();
      const Group group = group_of(quads[k], look);
      if (lane_of_team() == 0 && g < end) out[g] = group;
    }
  }
}

}  // namespace sk::gpu
