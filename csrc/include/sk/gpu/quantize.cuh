// quantize_int8 and dequantize_int8 on the GPU.
//
// One team per group: a few lanes or a wave for short groups, a block for long ones (quantize_teams.h). A thread takes
// packs of 16 bytes, size() packs apart. Pass 1 finds the group's range, pass 2 makes the codes; between them the group
// stays in registers as far as it fits (HeldRow), and its end is read again from the cache.
#pragma once
#include "sk/gpu/codes.cuh"

#include "gpu/launch.h"
#include "sk/philox.h"

namespace sk::gpu {

// u in [0, 1) of 24 bits for stochastic rounding of element i.
__device__ inline float dither(uint64_t seed, uint64_t i) {
  const Philox4 r = philox4x32(seed, static_cast<uint32_t>(i >> 2), static_cast<uint32_t>(i >> 34),
                               static_cast<uint32_t>(Stream::kRound) << 24, 0);
  const uint32_t word = i & 2 ? (i & 1 ? r.w[3] : r.w[2]) : (i & 1 ? r.w[1] : r.w[0]);
  return static_cast<float>(word >> 8) * 5.9604644775390625e-08f;  // 2^-24
}

// Stochastic rounding is rare, and bound by the random numbers: one value at a time keeps it small. `index` is that of
// the group's first value.
template <class T, class Team>
__device__ int32_t write_dithered(const RowIn<T>& x, int8_t* q, const Grid& grid, uint64_t seed, uint64_t index) {
  int32_t sum = 0;
  for (int64_t i = Team::rank(); i < x.n; i += Team::size()) {
    const float v = to_f32(x.data[i]);
    q[i] = grid.blank ? 0 : quantize_one(v, grid, dither(seed, index + static_cast<uint64_t>(i)));
    sum += q[i];
  }
  return sum;
}

template <class T, class Team>
__global__ void __launch_bounds__(Team::kThreads, 512 / Team::kThreads) quantize_kernel(const QuantizeInt8 a) {
  const int64_t width = a.shape.width;
  const bool symmetric = a.zero_point.data == nullptr;
  each_group<Team>(a.shape, [&](const Group& group) {
    const int64_t r = group.row, g = group.index;
    const RowIn<T> x(a.x, group.start(a.x_stride, width), group.n);
    const HeldRow<T, Team> row(x.n, x);
    int8_t* const q = a.out.q + group.start(a.out.q_stride, width);

    Grid grid{};
    if (a.fixed) {
      const float scale = a.out.scale.at(r, g);  // one that is no positive number can't be refused here: codes 0
      const bool usable = scale > 0.0f && bits_of(scale) < 0x7f800000u;
      grid = {scale, symmetric ? 0 : a.zero_point.at(r, g), symmetric ? -127 : -128, !usable};
    } else {
      grid = grid_of(row, x, symmetric);
    }

    int32_t sum = 0;
    if (a.stochastic) {
      const uint64_t unit = static_cast<uint64_t>(r * a.shape.groups + g);
      sum = write_dithered<T, Team>(x, q, grid, a.seed, a.offset + unit * static_cast<uint64_t>(width));
    } else {
      sum = write_codes(row, x, q, [&](float v) {
        return grid.blank ? int8_t{0} : a.fixed ? quantize_one(v, grid) : quantize_member(v, grid);
      });
    }
    if (a.out.sums.data != nullptr) sum = Team::reduce(sum, Sum());
    if (Team::rank() != 0 || !group.live) return;
    if (!a.fixed) a.out.scale.at(r, g) = grid.scale;
    if (!a.fixed && !symmetric) a.zero_point.at(r, g) = grid.zero_point;
    if (a.out.sums.data != nullptr) a.out.sums.at(r, g) = sum;
  });
}

template <class T, class Team>
__global__ void __launch_bounds__(Team::kThreads, 512 / Team::kThreads) dequantize_kernel(const DequantizeInt8 a) {
  constexpr int kPack = kPackOf<T>;
  const int64_t width = a.shape.width, stride = static_cast<int64_t>(Team::size()) * kPack;
  each_group<Team>(a.shape, [&](const Group& group) {
    const int8_t* q = a.q + group.start(a.q_stride, width);
    T* out = static_cast<T*>(a.out) + group.start(a.out_stride, width);
    const bool whole_q = aligned<Pack<int8_t, kPack>>(q), whole_out = aligned<PackOf<T>>(out);
    const float scale = a.scale.at(group.row, group.index);
    const int32_t zero_point = a.zero_point.data == nullptr ? 0 : a.zero_point.at(group.row, group.index);
    for (int64_t i = static_cast<int64_t>(Team::rank()) * kPack; i < group.n; i += stride) {
      const Pack<int8_t, kPack> codes = load_pack<kPack>(q, i, group.n, whole_q);
      PackOf<T> values;
#pragma unroll
      for (int k = 0; k < kPack; ++k) values.v[k] = from_f32<T>(dequantize_one(codes.v[k], scale, zero_point));
      store_pack(values, out, i, group.n, whole_out);
    }
  });
}

}  // namespace sk::gpu
