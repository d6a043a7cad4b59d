// One row of logits or probabilities as it lies in memory: f32, f16 or bf16, at any address.
//
// Rows are streamed in quads, four neighbouring values per lane and one load where the address allows it. The dtype is
// looked at once per kAhead quads, so that one kernel serves all; a template per dtype of target and draft would be nine.
#pragma once
#include "sk/gpu/compat.h"  // first: the vendor's memcpy has to be known before numerics.h uses it

#include <cfloat>
#include <cmath>

#include "gpu/launch.h"
#include "sk/accept.h"

namespace sk::gpu {

constexpr int kQuad = 4;
constexpr int kAhead = 4;                // quads that a lane has under way
constexpr int kTeam = kGroup / kQuad;    // lanes that hold one group of 64 ids
constexpr int kTeams = kWideBlock / kTeam;

struct Quad {
  float v[kQuad];
};

template <class T>
struct alignas(kQuad * sizeof(T)) Packed {
  T v[kQuad];
};

struct Source {
  const void* data;
  Dtype dtype;
  int64_t size;

  __device__ float operator[](int64_t i) const {
    switch (dtype) {
      case Dtype::kF16: return to_f32(static_cast<const F16*>(data)[i]);
      case Dtype::kBF16: return to_f32(static_cast<const BF16*>(data)[i]);
      default: return static_cast<const float*>(data)[i];
    }
  }
  __device__ int64_t groups() const { return (size + kGroup - 1) / kGroup; }

  // out[k] = the four values from first + k * step on; `beyond` past the end of the row.
  template <int kCount>
  __device__ void quads(int64_t first, int64_t step, float beyond, Quad (&out)[kCount]) const {
    switch (dtype) {
      case Dtype::kF16: return quads_of<F16>(first, step, beyond, out);
      case Dtype::kBF16: return quads_of<BF16>(first, step, beyond, out);
      default: return quads_of<float>(first, step, beyond, out);
    }
  }

 private:
  template <class T, int kCount>
  __device__ void quads_of(int64_t first, int64_t step, float beyond, Quad (&out)[kCount]) const {
    const T* x = static_cast<const T*>(data);
    const bool whole = reinterpret_cast<uintptr_t>(x) % sizeof(Packed<T>) == 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int64_t i = first + k * step;
      if (whole && i + kQuad <= size) {
        const Packed<T> packed = *reinterpret_cast<const Packed<T>*>(x + i);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) out[k].v[j] = to_f32(packed.v[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kQuad; ++j) out[k].v[j] = i + j < size ? to_f32(x[i + j]) : beyond;
      }
    }
  }
};

__device__ inline Source row_of(const Rows& rows, int64_t i) {
  const int64_t bytes = rows.dtype == Dtype::kF32 ? sizeof(float) : sizeof(F16);
  return {static_cast<const char*>(rows.data) + i * rows.stride * bytes, rows.dtype, rows.columns};
}

// NaN is never a candidate.
__device__ inline float clean(float x) { return x == x ? x : -INFINITY; }

// Which lane of which team this thread is; a team lies inside one wave.
__device__ inline int team() { return threadIdx.x / kTeam; }
__device__ inline int lane_of_team() { return threadIdx.x % kTeam; }

}  // namespace sk::gpu
