// silu(gate) * up and gelu(gate) * up, plain or followed by int8 quantisation in the same pass.
//
// Both kernels take the values from the same function, which rounds them to T as the plain operation stores them, so
// that fused codes equal those of quantize_int8 on the plain result. No value depends on another one: groups are dealt
// out to teams as in quantize.cuh, and plain rows are cut into pieces.
// silu(x) = x / (1 + exp(-x)). GELU: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
#pragma once
#include "sk/gpu/codes.cuh"

#include "gpu/launch.h"

namespace sk::gpu {

// In forms that cancel nothing: 1 + erf(z) = erfc(-z), (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float gelu(float x) { return 0.5f * x * erfcf(x * -0.70710678118654752440f); }
__device__ inline float gelu_tanh(float x) {
  const float z = 0.79788456080286535588f * (x + 0.044715f * (x * x * x));
  return x / (1.0f + expf(-2.0f * z));
}

// The kernels are compiled for silu and for both kinds of GELU together.
template <bool kSilu>
__device__ float gated(float x, Gate gate) {
  if (kSilu) return silu(x);
  return gate == Gate::kGeluTanh ? gelu_tanh(x) : gelu(x);
}

// A row or group of gate_up: `up` begins `up_offset` values after `gate`.
template <class T, bool kSilu>
struct GateRow {
  RowIn<T> gate, up;
  Gate kind;
  __device__ GateRow(const GateMul& a, int64_t start, int64_t up_offset, int64_t n)
      : gate(a.gate_up, start, n), up(a.gate_up, start + up_offset, n), kind(a.gate) {}

  // The result's pack from value i on, made from the gate's.
  __device__ PackOf<T> operator()(PackOf<T> pack, int64_t i) const {
    const PackOf<T> factor = up(i);
#pragma unroll
    for (int k = 0; k < kPackOf<T>; ++k) {
      const T activated = from_f32<T>(gated<kSilu>(to_f32(pack.v[k]), kind));
      pack.v[k] = from_f32<T>(to_f32(activated) * to_f32(factor.v[k]));
    }
    return pack;
  }
  __device__ PackOf<T> operator()(int64_t i) const { return (*this)(gate(i), i); }
};

template <class T, class Team, bool kSilu>
__global__ void __launch_bounds__(Team::kThreads, 512 / Team::kThreads) gate_quantize_kernel(const GateMul a) {
  const int64_t width = a.shape.width;
  each_group<Team>(a.shape, [&](const Group& group) {
    const GateRow<T, kSilu> values(a, group.start(a.stride, width), a.shape.groups * width, group.n);
    HeldRow<T, Team> row(group.n, values.gate);
    row.change(values, [](int64_t) {});
    quantize_group(row, values, group, width, a.codes);
  });
}

// Here a group is a row, and a thread has one pack of it at a time.
template <class T, class Team, bool kSilu>
__global__ void __launch_bounds__(Team::kThreads, 512 / Team::kThreads) gate_kernel(const GateMul a) {
  constexpr int64_t kPiece = int64_t{Team::kThreads} * kPackOf<T>;
  const int64_t width = a.shape.width, pieces = (width + kPiece - 1) / kPiece;
  for (int64_t unit = Team::first(); unit < a.shape.rows * pieces; unit += Team::step()) {
    const int64_t r = pieces == 1 ? unit : divide(unit, pieces);
    const int64_t i = (unit - r * pieces) * kPiece + Team::rank() * kPackOf<T>;
    if (i >= width) continue;
    const GateRow<T, kSilu> values(a, r * a.stride, width, width);
    T* const out = static_cast<T*>(a.out) + r * a.out_stride;
    store_pack(values(i), out, i, width, aligned<PackOf<T>>(out));
  }
}

}  // namespace sk::gpu
