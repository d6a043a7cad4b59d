// From rows of x to the words and scales that the products want: quantised by the library's formula (sk/quantize.h),
// rotated before that if the weight is (specdec_kernels/rotation.py). Codes that are given are only put in order.
//
// Who does it? A block that multiplies needs all codes of its rows, in every block the same. Doing the work again in
// each costs M * K divisions and M * K values from the cache per block, a launch of its own about a microsecond
// (predicted). With K = 4096 a block of 16 channels has 64 KB of weights to read: for one row the 8 KB of x and 16
// divisions per thread vanish behind the first weights, which are on their way by then; for 8 rows x would be as many
// bytes as the weights. So one row of up to 4096 values is prepared where it is used (linear.cuh), and everything else
// by a launch.
#pragma once
#include "sk/gpu/quantize.cuh"

#include "sk/gpu/linear_layout.cuh"
#include "sk/gpu/rotate.cuh"

namespace sk::gpu {

// One block prepares the neighbouring groups of a row that it can hold as f32.
constexpr int kRoom = 4096;
static_assert(kRoom >= kLongestRotation && kRoom >= kRowWords * kStep);

struct Room {
  float* values;    // [kRoom]
  uint32_t* range;  // [kGroupsAtOnce]
};

// Groups first .. first + count - 1 of row `r`, by the whole block. The caller synchronises before the words are used.
template <class T>
__device__ void prepare(const LinearInt8& a, const Walk& walk, int64_t r, int first, int count, const Room& room,
                        const XWords& words, PerGroup<float> scale) {
  const T* const x = static_cast<const T*>(a.x) + r * a.x_stride + static_cast<int64_t>(first) * walk.group;
  const int tid = threadIdx.x, total = count * walk.group;
  const bool whole = aligned<Pack<T, kStep>>(x), held = total <= kRoom;  // else one long group, read twice
  if (held) {
    constexpr int kPacks = kRoom / (kLinearThreads * kStep);
    Pack<T, kStep> packs[kPacks];  // all on their way before the first is used
#pragma unroll
    for (int h = 0; h < kPacks; ++h) packs[h] = load_pack<kStep>(x, (h * kLinearThreads + tid) * kStep, total, whole);
#pragma unroll
    for (int h = 0; h < kPacks; ++h) {
      const int i = (h * kLinearThreads + tid) * kStep;
#pragma unroll
      for (int b = 0; b < kStep; ++b)
        if (i + b < total) room.values[i + b] = to_f32(packs[h].v[b]);
    }
  }
  for (int g = tid; g < count; g += kLinearThreads) room.range[g] = 0;
  __syncthreads();
  if (a.rotated) rotate<kLinearThreads>(room.values, total, walk.group);
  const float part = a.rotated ? 1.0f / static_cast<float>(walk.group) : 1.0f;  // a power of two: exact

  const auto values = [&](int g, int step) {  // of one step; 0 beyond the group's end
    Pack<float, kStep> out;
    const int at = step * kStep;
    if (held) {
      for (int b = 0; b < kStep; ++b)
        out.v[b] = at + b < walk.group ? room.values[g * walk.group + at + b] * part : 0.0f;
    } else {
      const auto pack = load_pack<kStep>(x, at, walk.group, whole);
      for (int b = 0; b < kStep; ++b) out.v[b] = to_f32(pack.v[b]);
    }
    return out;
  };
  const auto magnitude = [&](int g, int step) {
    uint32_t most = 0;
    const auto v = values(g, step);
    for (int b = 0; b < kStep; ++b) most = Max()(most, bits_of(v.v[b]) & 0x7fffffffu);
    return most;
  };
  if (count == 1) {
    uint32_t most = 0;
    for (int step = tid; step < walk.steps; step += kLinearThreads) most = Max()(most, magnitude(0, step));
    most = reduce_wave(most, Max());
    if (tid % wave() == 0) raise_to(&room.range[0], most);
  } else {
    for (int i = tid; i < count * walk.steps; i += kLinearThreads)
      raise_to(&room.range[i / walk.steps], magnitude(i / walk.steps, i % walk.steps));
  }
  __syncthreads();

  const int padded = walk.rounds * kRoundSteps;  // steps of a group, with those that only x has
  for (int i = tid; i < count * padded; i += kLinearThreads) {
    const int g = i / padded, step = i % padded;
    const Grid grid = symmetric_grid(float_of(room.range[g]));
    uint32_t word = 0;
    if (step < walk.steps && !grid.blank) {
      const auto v = values(g, step);
      for (int b = 0; b < kStep; ++b)
        word |= static_cast<uint32_t>(static_cast<uint8_t>(quantize_member(v.v[b], grid))) << 8 * b;
    }
    const int64_t round = static_cast<int64_t>(first + g) * walk.rounds + step / kRoundSteps;
    words.row(r, round)[word_of(step % kRoundSteps)] = word;
    if (step == 0) scale.at(r, first + g) = grid.scale;
  }
}

// Codes that are given.
template <>
__device__ inline void prepare<int8_t>(const LinearInt8& a, const Walk& walk, int64_t r, int first, int count,
                                       const Room&, const XWords& words, PerGroup<float>) {
  const int8_t* const x = static_cast<const int8_t*>(a.x) + r * a.x_stride + static_cast<int64_t>(first) * walk.group;
  const int padded = walk.rounds * kRoundSteps;
  for (int i = threadIdx.x; i < count * padded; i += kLinearThreads) {
    const int g = i / padded, step = i % padded;
    uint32_t word = 0;
    for (int b = 0; b < kStep && step * kStep + b < walk.group; ++b)
      word |= static_cast<uint32_t>(static_cast<uint8_t>(x[static_cast<int64_t>(g) * walk.group + step * kStep + b]))
              << 8 * b;
    const int64_t round = static_cast<int64_t>(first + g) * walk.rounds + step / kRoundSteps;
    words.row(r, round)[word_of(step % kRoundSteps)] = word;
  }
}

// `at_once` groups per block. Rows that only fill the last tile of words stay as they are: nobody reads them.
template <class T>
__global__ void __launch_bounds__(kLinearThreads, 2)
    linear_prepare_kernel(const LinearInt8 a, const XWords words, const PerGroup<float> scale, const int at_once) {
  SK_SHARED(float, values, kRoom);
  SK_SHARED(uint32_t, range, kGroupsAtOnce);
  const Walk walk(a);
  const uint32_t parts = (walk.groups + at_once - 1) / at_once, units = static_cast<uint32_t>(a.rows) * parts;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int first = static_cast<int>(unit % parts) * at_once;
    const int count = Min()(at_once, walk.groups - first);
    prepare<T>(a, walk, unit / parts, first, count, {values, range}, words, scale);
    __syncthreads();  // the next unit writes to the same memory
  }
}

}  // namespace sk::gpu
