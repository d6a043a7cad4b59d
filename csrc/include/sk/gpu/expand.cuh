// expand: a packed int8 matrix (linear_layout.cuh) as ordinary rows of floats, for a dense product.
//
// All that counts is to read and write whole lines. A thread takes 4 of a panel's 16 rows and 16 bytes of output per
// row: for 16-bit floats two steps, so two loads of 16 bytes and four stores of 16 bytes, for float32 one step. Eight
// neighbouring lanes are neighbours along k and four such eights hold the 16 rows: a wave of 32 reads 1 KB (or 512 B)
// without a gap and writes 128 bytes of each of four rows at a time. Nothing goes through shared memory.
//
// A rotated matrix holds codes of W H; times H again, over the group's length, they are W (rows.cuh). Groups that those
// eight lanes hold, up to 64 values of 16 bits, are rotated in registers: near pairs are a thread's own, the others
// come from the lane at that distance. Both lanes of a pair compute what they keep, a + b or a - b, so the bits are the
// library's. Longer groups go through shared memory, one group of some rows per block: expand_long_kernel.
#pragma once
#include "sk/gpu/linear_layout.cuh"
#include "sk/gpu/pack.cuh"
#include "sk/gpu/reduce.cuh"
#include "sk/gpu/rotate.cuh"

#include "gpu/launch.h"

namespace sk::gpu {

constexpr int kExpandThreads = 256;
constexpr int kAcross = 8;                           // lanes side by side along k
constexpr int kQuads = kPanel / kStep;               // lanes that share a step: 4 rows each
constexpr int kTileUnits = kExpandThreads / kQuads;  // units that a block takes at once
static_assert(kAcross * kQuads == kSmallestWave, "a panel's rows lie in one wave");

// A unit is what a thread reads of each of its rows: kPackOf<T> values of one group, or its last few.
template <class T>
struct ExpandUnits {
  static constexpr int kValues = kPackOf<T>, kSteps = kValues / kStep;
  int64_t groups, steps, parts;  // steps and units of a group
  explicit SK_HD ExpandUnits(const ExpandInt8& a)
      : groups(a.k / a.group), steps((a.group + kStep - 1) / kStep), parts((steps + kSteps - 1) / kSteps) {}
  SK_HD int64_t tiles() const { return (groups * parts + kTileUnits - 1) / kTileUnits; }  // of a panel
};

// Four rows of a unit, dequantised; 0 where the group has no such step.
template <class T>
__device__ void expand_load(const uint8_t* codes, int64_t step, int64_t steps, const Pack<float, kStep>& scale,
                            Pack<float, kPackOf<T>> (&rows)[kStep]) {
#pragma unroll
  for (int s = 0; s < ExpandUnits<T>::kSteps; ++s) {
    Pack<uint8_t, kStep * kStep> line{};
    const bool here = step + s < steps;
    if (here) line = *reinterpret_cast<const Pack<uint8_t, kStep * kStep>*>(codes + (step + s) * kStepBytes);
#pragma unroll
    for (int r = 0; r < kStep; ++r)
#pragma unroll
      for (int j = 0; j < kStep; ++j)
        rows[r].v[s * kStep + j] = here ? static_cast<float>(line.v[r * kStep + j] - 128) * scale.v[r] : 0.0f;
  }
}

// values H / group, for groups within the eight lanes. All lanes of the wave come here.
template <int kValues>
__device__ void expand_rotate(Pack<float, kValues>& values, int group) {
#pragma unroll
  for (int h = 1; h < kValues; h *= 2)
    if (h < group)
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        if ((i & h) == 0) {
          const float a = values.v[i], b = values.v[i + h];
          values.v[i] = a + b, values.v[i + h] = a - b;
        }
#pragma unroll
  for (int distance = 1; distance < kAcross; distance *= 2)
    if (distance * kValues < group) {
      const bool second = (threadIdx.x & distance) != 0;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const float own = values.v[i], other = shuffle_xor(own, distance);
        values.v[i] = second ? other - own : own + other;
      }
    }
  const float factor = 1.0f / static_cast<float>(group);  // a power of two: exact
#pragma unroll
  for (int i = 0; i < kValues; ++i) values.v[i] *= factor;
}

template <class T>
__device__ PackOf<T> expand_narrow(const Pack<float, kPackOf<T>>& values) {
  PackOf<T> out;
#pragma unroll
  for (int i = 0; i < kPackOf<T>; ++i) out.v[i] = from_f32<T>(values.v[i]);
  return out;
}

template <class T>
__global__ void __launch_bounds__(kExpandThreads, 2) expand_kernel(const ExpandInt8 a) {
  constexpr int kValues = kPackOf<T>;
  const ExpandUnits<T> units(a);
  const int across = threadIdx.x % kAcross, quad = threadIdx.x / kAcross % kQuads;
  const int own = static_cast<int>(threadIdx.x) / kSmallestWave * kAcross + across;  // unit of a tile
  const int64_t per_panel = units.tiles(), tiles = (a.n + kPanel - 1) / kPanel * per_panel;
  const bool whole = aligned<PackOf<T>>(a.out) && a.out_stride % kValues == 0 && a.group % kValues == 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t panel = divide(tile, per_panel), unit = (tile - panel * per_panel) * kTileUnits + own;
    const int64_t g = divide(unit, units.parts), at = (unit - g * units.parts) * kValues;  // in the group
    const bool real = g < units.groups;
    const int64_t row = panel * kPanel + quad * kStep, place = panel * units.groups + (real ? g : 0);
    const float* const scale = a.scale + place * kPanel + quad * kStep;
    const uint8_t* const codes = a.codes + place * units.steps * kStepBytes + quad * kStep * kStep;
    const auto scales = load_pack<kStep>(scale, 0, kStep, aligned<Pack<float, kStep>>(scale));
    Pack<float, kValues> rows[kStep];
    expand_load<T>(codes, real ? at / kStep : units.steps, units.steps, scales, rows);
    T* const out = static_cast<T*>(a.out) + row * a.out_stride + g * a.group;
#pragma unroll
    for (int r = 0; r < kStep; ++r) {
      if (a.rotated) expand_rotate(rows[r], static_cast<int>(a.group));
      if (real && row + r < a.n) store_pack(expand_narrow<T>(rows[r]), out + r * a.out_stride, at, a.group, whole);
    }
  }
}

// Rotated groups that do not fit eight lanes: a block takes as many rows of a panel's group as its memory holds.
template <class T>
__global__ void __launch_bounds__(kExpandThreads, 2) expand_long_kernel(const ExpandInt8 a) {
  constexpr int kValues = kPackOf<T>;
  SK_SHARED(float, values, kLongestRotation);
  const int group = static_cast<int>(a.group), steps = group / kStep;
  const int together = Min()(static_cast<int>(kLongestRotation) / group, kPanel);  // rows; a power of two
  const int64_t groups = a.k / a.group, parts = kPanel / together;
  const int64_t units = (a.n + kPanel - 1) / kPanel * groups * parts;
  const float factor = 1.0f / static_cast<float>(group);
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t place = divide(unit, parts), panel = divide(place, groups), g = place - panel * groups;
    const int first = static_cast<int>(unit - place * parts) * together;
    const uint8_t* const codes = a.codes + place * steps * kStepBytes + first * kStep;
    const float* const scale = a.scale + place * kPanel + first;
    for (int i = threadIdx.x; i < steps * together; i += kExpandThreads) {
      const int r = i % together, step = i / together;
      const auto four = *reinterpret_cast<const Pack<uint8_t, kStep>*>(codes + step * kStepBytes + r * kStep);
#pragma unroll
      for (int j = 0; j < kStep; ++j)
        values[r * group + step * kStep + j] = static_cast<float>(four.v[j] - 128) * scale[r];
    }
    __syncthreads();
    rotate<kExpandThreads>(values, together * group, group);
    for (int i = threadIdx.x; i < together * group / kValues; i += kExpandThreads) {
      const int r = i * kValues / group, at = i * kValues % group;
      const int64_t row = panel * kPanel + first + r;
      if (row >= a.n) continue;
      Pack<float, kValues> some;
#pragma unroll
      for (int j = 0; j < kValues; ++j) some.v[j] = values[r * group + at + j] * factor;
      T* const out = static_cast<T*>(a.out) + row * a.out_stride + g * a.group;
      store_pack(expand_narrow<T>(some), out, at, a.group, aligned<PackOf<T>>(out));
    }
    __syncthreads();  // the next unit writes to the same memory
  }
}

}  // namespace sk::gpu
