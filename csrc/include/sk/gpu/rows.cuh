// rows_int8: rows of a packed int8 weight matrix (linear_layout.cuh), dequantised to f32.
//
// A block per row. A thread takes steps: 4 consecutive codes, which lie 64 bytes from the next 4 of the same row. A
// rotated matrix holds codes of W H, H the Hadamard matrix of a group's length (Sylvester order): H H is that length
// times the identity, so another transform and a division by the length, a power of two, give W back. The block does it
// in place in the output, one stage after the other, in the order of operations of every other backend.
#pragma once
#include "sk/gpu/linear_layout.cuh"
#include "sk/gpu/pack.cuh"
#include "sk/gpu/reduce.cuh"

#include "gpu/launch.h"

namespace sk::gpu {

constexpr int kRowThreads = 256;

template <class Team>
__device__ void rotate_back(float* row, int64_t k, int64_t group) {
  for (int64_t distance = 1; distance < group; distance *= 2) {
    __syncthreads();
    for (int64_t pair = Team::rank(); pair < k / 2; pair += Team::size()) {
      const int64_t low = pair / distance * (2 * distance) + pair % distance, high = low + distance;
      const float a = row[low], b = row[high];
      row[low] = a + b, row[high] = a - b;
    }
  }
  __syncthreads();
  const float factor = 1.0f / static_cast<float>(group);
  for (int64_t i = Team::rank(); i < k; i += Team::size()) row[i] *= factor;
}

__global__ void __launch_bounds__(kRowThreads, 2) rows_kernel(const RowsInt8 a) {
  using Team = BlockTeam<kRowThreads>;
  const int64_t steps = (a.group + kStep - 1) / kStep, groups = a.group > 0 ? a.k / a.group : 0;
  for (int64_t r = Team::first(); r < a.count; r += Team::step()) {
    const int64_t id = a.ids[r];
    float* const out = a.out + r * a.out_stride;
    if (id < 0 || id >= a.n) {  // can't be refused from here
      for (int64_t i = Team::rank(); i < a.k; i += Team::size()) out[i] = float_of(0x7fc00000u);
      continue;
    }
    const int64_t panel = id / kPanel, lane = id % kPanel;
    const uint8_t* const codes = a.codes + (panel * groups * steps * kPanel + lane) * kStep;
    const float* const scale = a.scale + panel * groups * kPanel + lane;
    for (int64_t s = Team::rank(); s < groups * steps; s += Team::size()) {
      const int64_t g = divide(s, steps), at = (s - g * steps) * kStep;
      const auto four = *reinterpret_cast<const Pack<uint8_t, kStep>*>(codes + s * kStepBytes);
      for (int j = 0; j < kStep; ++j)
        if (at + j < a.group)
          out[g * a.group + at + j] = static_cast<float>(four.v[j] - 128) * scale[g * kPanel];
    }
    if (a.rotated) rotate_back<Team>(out, a.k, a.group);
  }
}

}  // namespace sk::gpu
