// The Hadamard rotation of scale groups (specdec_kernels/rotation.py) in a block's shared memory.
#pragma once
#include "sk/gpu/compat.h"

namespace sk::gpu {

// (a, b) -> (a + b, a - b) at distance 1, 2, 4, ... inside groups of `group` values; a power of two, `count` in all.
template <int kThreads>
__device__ void rotate(float* values, int count, int group) {
  for (int h = 1; h < group; h *= 2) {
    for (int pair = threadIdx.x; pair < count / 2; pair += kThreads) {
      float* const at = values + ((pair & ~(h - 1)) << 1 | (pair & (h - 1)));
      const float a = at[0], b = at[h];
      at[0] = a + b;
      at[h] = a - b;
    }
    __syncthreads();
  }
}

}  // namespace sk::gpu
