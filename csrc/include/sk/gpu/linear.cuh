// linear_int8 on the GPU: y = x w^T with int8 codes on both sides, for few rows of x, where the time is that of reading
// the weights once.
//
// A block takes one panel of 16 channels and up to kRows rows of x. Its waves share the panel's k axis evenly, whatever
// the groups are: with K = N = 4096 that is 256 blocks of 8 waves (4 of 64 lanes), each of which has 8 rounds of 512
// bytes on their way. Each wave adds its int32 sums of a group to that group's place in shared memory. They are exact,
// so neither the order nor the split can change a bit. Then f32(sum) * f32(s_x * s_w) is added up over the groups in
// ascending order, product and sum rounded apart, the bias last. k is not split over blocks: where N alone fills the
// device, another launch or a counter would cost more than it brings (predicted); f32 sums over groups can't be split.
//
// Rows of x come from the workspace, prepared by a launch of their own, or, for a single short row, from shared memory,
// prepared by the block while its first weights are on their way (linear_prepare.cuh has the reasons). More rows than a
// block takes are further blocks, next to each other, so that they find the panel in the cache.
#pragma once
#include "sk/gpu/linear_prepare.cuh"
#include "sk/gpu/linear_units.cuh"

namespace sk::gpu {

template <class Unit>
struct Flight {
  typename Unit::Weights weights[Unit::kFlight];
  typename Unit::Words words[Unit::kWordsAhead ? Unit::kFlight : 1];
};

// What a wave goes through: `left` times Unit::steps() steps, from step `step` of group `group` on.
template <class Unit>
struct Course {
  const uint8_t* panel;
  XWords x;
  int64_t first;  // row of x
  int rows;
  Walk walk;
  int group, step, left;

  __device__ const uint8_t* start() const { return panel + static_cast<int64_t>(group) * walk.steps * kStepBytes; }
  __device__ typename Unit::Weights weights() const { return Unit::weights(start(), step, walk.steps); }
  __device__ typename Unit::Words words() const {
    return Unit::words(x, first, rows, static_cast<int64_t>(group) * walk.rounds, step, walk.steps);
  }
  __device__ void next() {
    --left;
    step += Unit::steps();
    if (step >= walk.steps) step = 0, ++group;
  }
};

template <class Unit>
__device__ void take(Flight<Unit>& flight, Course<Unit>& ahead) {
#pragma unroll
  for (int i = 0; i < Unit::kFlight; ++i) {
    if (ahead.left <= 0) continue;
    flight.weights[i] = ahead.weights();
    if constexpr (Unit::kWordsAhead) flight.words[i] = ahead.words();
    ahead.next();
  }
}

__device__ inline float bias_of(const LinearInt8& a, int64_t channel) {
  switch (a.bias_type) {
    case Dtype::kF32: return static_cast<const float*>(a.bias)[channel];
    case Dtype::kF16: return to_f32(static_cast<const F16*>(a.bias)[channel]);
    default: return to_f32(static_cast<const BF16*>(a.bias)[channel]);
  }
}

__device__ inline void write(const LinearInt8& a, int64_t row, int64_t channel, float y) {
  if (channel >= a.n) return;
  if (a.bias != nullptr) y += bias_of(a, channel);
  const int64_t at = row * a.out_stride + channel;
  switch (a.out_type) {
    case Dtype::kF32: static_cast<float*>(a.out)[at] = y; break;
    case Dtype::kF16: static_cast<F16*>(a.out)[at] = from_f32<F16>(y); break;
    case Dtype::kBF16: static_cast<BF16*>(a.out)[at] = from_f32<BF16>(y); break;
  }
}

// One panel, rows first .. first + rows - 1. `prologue` makes what the units read of x; it may synchronise.
template <class Unit, class Prologue>
__device__ void multiply_panel(const LinearInt8& a, const XWords& x, const PerGroup<const float>& x_scale,
                               int64_t panel, int64_t first, int rows, const Prologue& prologue) {
  constexpr int kRows = Unit::kRows, kGroups = kRows == 1 ? 4 * kPanel : 2 * kLinearThreads / kRows;  // per turn
  constexpr int kMine = (kRows * kPanel + kLinearThreads - 1) / kLinearThreads;  // results of a thread
  SK_SHARED(uint32_t, totals, kGroups * kRows * kPanel);
  SK_SHARED(float, w_scales, kGroups* kPanel);
  SK_SHARED(float, x_scales, kGroups* kRows);
  const Walk walk(a);
  const float* const w_scale = a.scale + panel * walk.groups * kPanel;
  const int tid = threadIdx.x, waves = kLinearThreads / wave(), results = rows * kPanel;
  const int pieces = (walk.steps + Unit::steps() - 1) / Unit::steps();  // of a group
  float y[kMine];
  for (int i = 0; i < kMine; ++i) y[i] = 0.0f;

  for (int begin = 0; begin < walk.groups; begin += kGroups) {
    const int count = Min()(kGroups, walk.groups - begin);
    const int pieces_here = count * pieces, mine = tid / wave();
    const int from = pieces_here * mine / waves, to = pieces_here * (mine + 1) / waves;
    Course<Unit> here{a.codes + panel * walk.panel_bytes(), x,        first, rows, walk, begin + from / pieces,
                      from % pieces * Unit::steps(),        to - from};
    Course<Unit> ahead = here;
    Flight<Unit> flight;
    take(flight, ahead);

    for (int i = tid; i < count * kPanel; i += kLinearThreads) w_scales[i] = w_scale[begin * kPanel + i];
    for (int i = tid; i < count * results; i += kLinearThreads) totals[i / results * kRows * kPanel + i % results] = 0;
    if (begin == 0) prologue();
    __syncthreads();
    for (int i = tid; i < count * rows; i += kLinearThreads)
      x_scales[i / rows * kRows + i % rows] = x_scale.at(first + i % rows, begin + i / rows);

    Unit unit;
    unit.clear();
    while (here.left > 0) {
#pragma unroll
      for (int i = 0; i < Unit::kFlight; ++i) {
        if (here.left <= 0) continue;
        if constexpr (Unit::kWordsAhead)
          unit.multiply(flight.weights[i], flight.words[i], rows);
        else
          unit.multiply(flight.weights[i], here.words(), rows);
        const int group = here.group;
        here.next();
        if (here.group != group || here.left == 0) {
          unit.add_to(totals + (group - begin) * kRows * kPanel, rows);
          unit.clear();
        }
      }
      take(flight, ahead);
    }
    __syncthreads();

    for (int i = 0; i < kMine; ++i) {
      const int at = tid + i * kLinearThreads, r = at / kPanel, channel = at % kPanel;
      if (r >= rows) continue;
#pragma unroll 4
      for (int g = 0; g < count; ++g)
        y[i] += static_cast<float>(static_cast<int32_t>(totals[g * kRows * kPanel + at])) *
                (x_scales[g * kRows + r] * w_scales[g * kPanel + channel]);
    }
    __syncthreads();  // the next turn, or panel, clears the totals
  }
  for (int i = 0; i < kMine; ++i) {
    const int at = tid + i * kLinearThreads;
    if (at < results) write(a, first + at / kPanel, panel * kPanel + at % kPanel, y[i]);
  }
}

// Prepared rows.
template <class Unit>
__global__ void __launch_bounds__(kLinearThreads, Unit::kBlocks)
    linear_kernel(const LinearInt8 a, const XWords x, const PerGroup<const float> scale) {
  if constexpr (!Unit::kRunsHere) return;
  const uint32_t tiles = static_cast<uint32_t>((a.rows + Unit::kRows - 1) / Unit::kRows);
  const uint32_t units = static_cast<uint32_t>((a.n + kPanel - 1) / kPanel) * tiles;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t first = static_cast<int64_t>(unit % tiles) * Unit::kRows;
    const int rows = static_cast<int>(Min()(static_cast<int64_t>(Unit::kRows), a.rows - first));
    multiply_panel<Unit>(a, x, scale, unit / tiles, first, rows, [] {});
  }
}

// One short row, prepared here.
template <class T>
__global__ void __launch_bounds__(kLinearThreads, 2) linear_row_kernel(const LinearInt8 a) {
  SK_SHARED(float, values, kRoom);
  SK_SHARED(uint32_t, range, kGroupsAtOnce);
  SK_SHARED(float, scales, kGroupsAtOnce);
  SK_SHARED(uint32_t, words, kRowWords);
  const Walk walk(a);
  const XWords x{words, 0, kRoundSteps};
  const PerGroup<float> made{scales, 0, 1};
  const PerGroup<const float> scale = a.x_scale.data != nullptr ? a.x_scale : PerGroup<const float>{scales, 0, 1};
  bool prepared = false;
  for (int64_t panel = blockIdx.x; panel < (a.n + kPanel - 1) / kPanel; panel += gridDim.x) {
    multiply_panel<DotUnit<1, false>>(a, x, scale, panel, 0, 1, [&] {
      if (!prepared) prepare<T>(a, walk, 0, 0, walk.groups, {values, range}, x, made);
      prepared = true;
    });
  }
}

}  // namespace sk::gpu
