// Teams: the threads that work on one item together, either one wave or a whole block. A kernel is written once against
// the team's rank, size and reduction; how many lanes a wave has never shows.
//
// Reductions end with the same result in every thread: both lanes of an exchange combine the same two values. With exact
// operations (integers, maxima) the order in which the threads are combined can't show either; a Sum of floating-point
// numbers may differ in the last bits between wave sizes, not between runs.
#pragma once
#include "sk/gpu/compat.h"

namespace sk::gpu {

struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};
struct Min {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

// A butterfly over kLanes neighbouring lanes; kLanes divides every wave size.
template <int kLanes, class T, class Op>
__device__ T reduce_lanes(T value, Op op) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value = op(value, shuffle_xor(value, distance));
  return value;
}

// A butterfly over the lanes of a full wave.
template <class T, class Op>
__device__ T reduce_wave(T value, Op op) {
#pragma unroll
  for (int distance = wave() / 2; distance > 0; distance /= 2) value = op(value, shuffle_xor(value, distance));
  return value;
}

// kThreads per block, a multiple of every wave size.
template <int kThreads>
struct WaveTeam {
  __device__ static int size() { return wave(); }
  __device__ static int rank() { return threadIdx.x % wave(); }
  __device__ static int64_t first() {
    return static_cast<int64_t>(blockIdx.x) * (kThreads / wave()) + threadIdx.x / wave();
  }
  __device__ static int64_t step() { return static_cast<int64_t>(gridDim.x) * (kThreads / wave()); }
  template <class T, class Op>
  __device__ static T reduce(T value, Op op) {
    return reduce_wave(value, op);
  }
};

template <int kThreads>
struct BlockTeam {
  __device__ static int size() { return kThreads; }
  __device__ static int rank() { return threadIdx.x; }
  __device__ static int64_t first() { return blockIdx.x; }
  __device__ static int64_t step() { return gridDim.x; }
  template <class T, class Op>
  __device__ static T reduce(T value, Op op) {
    SK_SHARED(T, parts, kThreads / kSmallestWave);
    value = reduce_wave(value, op);
    if (threadIdx.x % wave() == 0) parts[threadIdx.x / wave()] = value;
    __syncthreads();
    value = parts[0];
    for (int w = 1; w < kThreads / wave(); ++w) value = op(value, parts[w]);
    __syncthreads();  // the next reduction may write to parts
    return value;
  }
};

}  // namespace sk::gpu
