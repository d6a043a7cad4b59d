// Teams: the threads that work on one item together: some lanes of a wave, a wave, or a whole block. A kernel is written
// once against the team's rank, size and reduction; how many lanes a wave has never shows.
//
// Items are dealt out by first() and step(). A loop over them goes on while any(mine is left): the teams that share a
// wave must all come to its exchanges, also those that have no item left.
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

// kLanes neighbouring lanes, a power of two that divides every wave size.
template <int kBlock, int kLanes>
struct LaneTeam {
  static constexpr int kThreads = kBlock;
  __device__ static int size() { return kLanes; }
  __device__ static int rank() { return threadIdx.x % kLanes; }
  __device__ static int64_t first() {
    return static_cast<int64_t>(blockIdx.x) * (kBlock / kLanes) + threadIdx.x / kLanes;
  }
  __device__ static int64_t step() { return static_cast<int64_t>(gridDim.x) * (kBlock / kLanes); }
  __device__ static bool any(bool mine) { return any_in_wave(mine); }
  template <class T, class Op>
  __device__ static T reduce(T value, Op op) {
    return reduce_lanes<kLanes>(value, op);
  }
};

// kBlock threads per block, a multiple of every wave size.
template <int kBlock>
struct WaveTeam {
  static constexpr int kThreads = kBlock;
  __device__ static int size() { return wave(); }
  __device__ static int rank() { return threadIdx.x % wave(); }
  __device__ static int64_t first() {
    return static_cast<int64_t>(blockIdx.x) * (kThreads / wave()) + threadIdx.x / wave();
  }
  __device__ static int64_t step() { return static_cast<int64_t>(gridDim.x) * (kThreads / wave()); }
  __device__ static bool any(bool mine) { return mine; }
  template <class T, class Op>
  __device__ static T reduce(T value, Op op) {
    return reduce_wave(value, op);
  }
};

template <int kBlock>
struct BlockTeam {
  static constexpr int kThreads = kBlock;
  __device__ static int size() { return kThreads; }
  __device__ static int rank() { return threadIdx.x; }
  __device__ static int64_t first() { return blockIdx.x; }
  __device__ static int64_t step() { return gridDim.x; }
  __device__ static bool any(bool mine) { return mine; }
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
