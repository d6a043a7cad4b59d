// quantize_int8 and dequantize_int8 on the GPU. The formula is sk/quantize.h's, shared with the CPU, so codes are
// equal.
//
// One team per group: a wave for short groups, a block for long ones. A thread takes packs of 16 bytes, size() packs
// apart. Pass 1 finds the group's range, pass 2 makes the codes; the first kHeld packs of every thread stay in
// registers between the passes, so a row of up to kHeld * 16 bytes * threads is read once, and a longer one again from
// the cache. Where a row does not start on a 16-byte boundary, packs are read element by element.
#pragma once
#include "sk/gpu/compat.h"  // first: the vendor's memcpy has to be known before numerics.h uses it
#include "sk/gpu/reduce.cuh"

#include "gpu/launch.h"
#include "sk/philox.h"
#include "sk/quantize.h"

namespace sk::gpu {

constexpr int kQuantizeThreads = 256;
constexpr int kHeld = 4;

// n consecutive values, moved as one word where the address allows it.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T v[kCount];
};

template <class T>
constexpr int kPackOf = 16 / sizeof(T);

template <class P>
__device__ bool aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % alignof(P) == 0;
}

// kCount values from `i` on; those at or beyond n are 0, which widens no range.
template <int kCount, class T>
__device__ Pack<T, kCount> load_pack(const T* x, int64_t i, int64_t n, bool whole) {
  if (whole && i + kCount <= n) return *reinterpret_cast<const Pack<T, kCount>*>(x + i);
  Pack<T, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.v[k] = i + k < n ? x[i + k] : T{};
  return pack;
}

template <class T, int kCount>
__device__ void store_pack(const Pack<T, kCount>& pack, T* out, int64_t i, int64_t n, bool whole) {
  if (whole && i + kCount <= n) {
    *reinterpret_cast<Pack<T, kCount>*>(out + i) = pack;
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    if (i + k < n) out[i + k] = pack.v[k];
}

// The range of a group. The magnitude is a bit pattern without sign: as integers NaN > Inf > numbers.
struct Range {
  uint32_t magnitude = 0;
  float low = 0.0f, high = 0.0f;

  __device__ void add(float x) {
    const uint32_t bits = bits_of(x) & 0x7fffffffu;
    magnitude = Max()(magnitude, bits);
    low = Min()(low, x);  // a NaN loses here, and shows in the magnitude
    high = Max()(high, x);
  }
};

template <class Team>
__device__ Grid grid_of(Range range, bool symmetric) {
  const float magnitude = float_of(Team::reduce(range.magnitude, Max()));
  if (symmetric) return symmetric_grid(magnitude);
  const float low = Team::reduce(range.low, Min()), high = Team::reduce(range.high, Max());
  return magnitude != magnitude ? asymmetric_grid(magnitude, magnitude) : asymmetric_grid(low, high);
}

// quantize_one for a value of the group that the grid was made from: int32 is wide enough, and fast.
__device__ inline int8_t quantize_member(float x, const Grid& grid) {
  const int32_t q = static_cast<int32_t>(rintf(x / grid.scale)) + grid.zero_point;
  return static_cast<int8_t>(q < grid.lowest ? grid.lowest : (q > 127 ? 127 : q));
}

// u in [0, 1) of 24 bits for stochastic rounding of element i.
__device__ inline float dither(uint64_t seed, uint64_t i) {
  const Philox4 r = philox4x32(seed, static_cast<uint32_t>(i >> 2), static_cast<uint32_t>(i >> 34),
                               static_cast<uint32_t>(Stream::kRound) << 24, 0);
  const uint32_t word = i & 2 ? (i & 1 ? r.w[3] : r.w[2]) : (i & 1 ? r.w[1] : r.w[0]);
  return static_cast<float>(word >> 8) * 5.9604644775390625e-08f;  // 2^-24
}

template <class T, class Team>
__global__ void __launch_bounds__(kQuantizeThreads, 2) quantize_kernel(const QuantizeInt8 a) {
  constexpr int kPack = kPackOf<T>;
  const int64_t groups = a.shape.groups, n = a.shape.width;
  const bool symmetric = a.zero_point.data == nullptr;
  const int64_t stride = static_cast<int64_t>(Team::size()) * kPack;  // between the packs of a thread
  for (int64_t unit = Team::first(); unit < a.shape.rows * groups; unit += Team::step()) {
    const int64_t r = groups == 1 ? unit : unit / groups, g = unit - r * groups;  // a 64-bit division is long
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride + g * n;
    int8_t* q = a.q + r * a.q_stride + g * n;
    const bool whole_x = aligned<Pack<T, kPack>>(x), whole_q = aligned<Pack<int8_t, kPack>>(q);
    const int64_t mine = static_cast<int64_t>(Team::rank()) * kPack;

    Pack<T, kPack> held[kHeld];
    Range range;
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      held[h] = load_pack<kPack>(x, mine + h * stride, n, whole_x);
      for (const T& v : held[h].v) range.add(to_f32(v));
    }
    for (int64_t i = mine + kHeld * stride; !a.fixed && i < n; i += stride) {
      const auto pack = load_pack<kPack>(x, i, n, whole_x);
      for (const T& v : pack.v) range.add(to_f32(v));
    }

    Grid grid{};
    if (a.fixed) {
      const float scale = a.scale.at(r, g);  // one that is no positive number can't be refused from here: codes 0
      const bool usable = scale > 0.0f && bits_of(scale) < 0x7f800000u;
      grid = {scale, symmetric ? 0 : a.zero_point.at(r, g), symmetric ? -127 : -128, !usable};
    } else {
      grid = grid_of<Team>(range, symmetric);
      if (Team::rank() == 0) {
        a.scale.at(r, g) = grid.scale;
        if (!symmetric) a.zero_point.at(r, g) = grid.zero_point;
      }
    }

    if (a.stochastic) {  // rare, and bound by the random numbers: one value at a time keeps it small
      const uint64_t index = a.offset + static_cast<uint64_t>(unit) * static_cast<uint64_t>(n);
      for (int64_t i = Team::rank(); i < n; i += Team::size())
        q[i] = grid.blank ? 0 : quantize_one(to_f32(x[i]), grid, dither(a.seed, index + static_cast<uint64_t>(i)));
      continue;
    }
    const auto codes = [&](const Pack<T, kPack>& pack, int64_t i) {
      Pack<int8_t, kPack> out;
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        const float v = to_f32(pack.v[k]);
        out.v[k] = grid.blank ? 0 : a.fixed ? quantize_one(v, grid) : quantize_member(v, grid);
      }
      store_pack(out, q, i, n, whole_q);
    };
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
      if (mine + h * stride < n) codes(held[h], mine + h * stride);
    for (int64_t i = mine + kHeld * stride; i < n; i += stride) codes(load_pack<kPack>(x, i, n, whole_x), i);
  }
}

template <class T, class Team>
__global__ void __launch_bounds__(kQuantizeThreads, 2) dequantize_kernel(const DequantizeInt8 a) {
  constexpr int kPack = kPackOf<T>;
  const int64_t groups = a.shape.groups, n = a.shape.width;
  const int64_t stride = static_cast<int64_t>(Team::size()) * kPack;
  for (int64_t unit = Team::first(); unit < a.shape.rows * groups; unit += Team::step()) {
    const int64_t r = groups == 1 ? unit : unit / groups, g = unit - r * groups;  // a 64-bit division is long
    const int8_t* q = a.q + r * a.q_stride + g * n;
    T* out = static_cast<T*>(a.out) + r * a.out_stride + g * n;
    const bool whole_q = aligned<Pack<int8_t, kPack>>(q), whole_out = aligned<Pack<T, kPack>>(out);
    const float scale = a.scale.at(r, g);
    const int32_t zero_point = a.zero_point.data == nullptr ? 0 : a.zero_point.at(r, g);
    for (int64_t i = static_cast<int64_t>(Team::rank()) * kPack; i < n; i += stride) {
      const Pack<int8_t, kPack> codes = load_pack<kPack>(q, i, n, whole_q);
      Pack<T, kPack> values;
#pragma unroll
      for (int k = 0; k < kPack; ++k) values.v[k] = from_f32<T>(dequantize_one(codes.v[k], scale, zero_point));
      store_pack(values, out, i, n, whole_out);
    }
  }
}

}  // namespace sk::gpu
