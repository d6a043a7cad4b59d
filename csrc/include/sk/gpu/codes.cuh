// From the values of a group to its codes, scale and sum, for every operation that quantises. The formula is
// sk/quantize.h's, shared with the CPU, so codes are equal.
//
// The range of a group is a maximum and the sum of its codes an integer: both are exact in any order, so that codes do
// not depend on how a group is spread over threads.
#pragma once
#include "sk/gpu/pack.cuh"
#include "sk/gpu/reduce.cuh"

#include "gpu/launch.h"
#include "sk/quantize.h"

namespace sk::gpu {

__device__ inline uint32_t magnitude_of(float x) { return bits_of(x) & 0x7fffffffu; }

// The range of a group. The magnitude is a bit pattern without sign: as integers NaN > Inf > numbers.
struct Range {
  uint32_t magnitude = 0;
  float low = 0.0f, high = 0.0f;

  __device__ void add(float x) {
    magnitude = Max()(magnitude, magnitude_of(x));
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

template <class T, class Team, class Again>
__device__ Grid grid_of(const HeldRow<T, Team>& row, const Again& again, bool symmetric) {
  Range range;
  row.each(again, [&](const PackOf<T>& pack, int64_t) {
    for (const T& v : pack.v) range.add(to_f32(v));
  });
  return grid_of<Team>(range, symmetric);
}

// quantize_one for a value of the group that the grid was made from: int32 is wide enough, and fast.
__device__ inline int8_t quantize_member(float x, const Grid& grid) {
  const int32_t q = static_cast<int32_t>(rintf(x / grid.scale)) + grid.zero_point;
  return static_cast<int8_t>(q < grid.lowest ? grid.lowest : (q > 127 ? 127 : q));
}

// Writes the codes code(value) of a group and returns this thread's part of their sum. `again` as in HeldRow.
template <class T, class Team, class Again, class Code>
__device__ int32_t write_codes(const HeldRow<T, Team>& row, const Again& again, int8_t* q, const Code& code) {
  constexpr int kPack = kPackOf<T>;
  const bool whole = aligned<Pack<int8_t, kPack>>(q);
  const int64_t n = row.size();
  int32_t sum = 0;
  row.each(again, [&](const PackOf<T>& pack, int64_t i) {
    Pack<int8_t, kPack> codes;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      codes.v[k] = code(to_f32(pack.v[k]));
      sum += i + k < n ? codes.v[k] : 0;
    }
    store_pack(codes, q, i, n, whole);
  });
  return sum;
}

// A group and its place: `live` is false for the lanes of a wave that find no group left, but have to take part in
// the reductions of the others; their n is 0.
struct Group {
  int64_t row, index, n;
  bool live;
  __device__ int64_t start(int64_t row_stride, int64_t width) const { return row * row_stride + index * width; }
};

// visit(group) for every group of a team.
template <class Team, class Visit>
__device__ void each_group(const Shape& shape, const Visit& visit) {
  const int64_t units = shape.rows * shape.groups;
  for (int64_t unit = Team::first(); Team::any(unit < units); unit += Team::step()) {
    const bool live = unit < units;
    const int64_t at = live ? unit : 0, row = shape.groups == 1 ? at : divide(at, shape.groups);
    visit(Group{row, at - row * shape.groups, live ? shape.width : 0, live});
  }
}

// Quantises a group by its own range, symmetrically: what every fused operation ends with.
template <class T, class Team, class Again>
__device__ void quantize_group(const HeldRow<T, Team>& row, const Again& again, const Group& group, int64_t width,
                               const Codes& out) {
  const Grid grid = grid_of(row, again, true);
  int8_t* const q = out.q + group.start(out.q_stride, width);
  int32_t sum = write_codes(row, again, q, [&](float v) { return grid.blank ? int8_t{0} : quantize_member(v, grid); });
  if (out.sums.data != nullptr) sum = Team::reduce(sum, Sum());
  if (Team::rank() != 0 || !group.live) return;
  out.scale.at(group.row, group.index) = grid.scale;
  if (out.sums.data != nullptr) out.sums.at(group.row, group.index) = sum;
}

}  // namespace sk::gpu
