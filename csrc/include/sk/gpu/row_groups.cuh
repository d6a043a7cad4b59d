// Quantising the groups of a row that a block holds in registers: after an operation that needed the whole row.
//
// The range of every group and the sum of its codes are gathered in shared memory, by integer maxima and additions, in
// which the order of threads can't show. A pack may hold the end of one group and the beginning of the next. Rows with
// more groups than fit there have groups of few values or are huge: then each thread makes whole groups by itself.
#pragma once
#include "sk/gpu/codes.cuh"

namespace sk::gpu {

constexpr int kSharedGroups = 1024;

// visit(g, from, to) for the groups that the pack from value i on touches: values from .. to - 1 of it are g's.
template <int kPack, class Visit>
__device__ void each_part(int64_t i, int64_t n, int64_t group, const Visit& visit) {
  int64_t g = divide(i, group), left = group - (i - g * group);
  for (int from = 0; from < kPack && i + from < n; ++g, left = group) {
    const int to = left < kPack - from ? from + static_cast<int>(left) : kPack;
    visit(g, from, to);
    from = to;
  }
}

// `again` as in HeldRow. All threads of the block come here.
template <class T, class Team, class Again>
__device__ void quantize_shared_groups(const HeldRow<T, Team>& row, const Again& again, int64_t r, int64_t group,
                                       const Codes& out) {
  constexpr int kPack = kPackOf<T>;
  SK_SHARED(uint32_t, magnitudes, kSharedGroups);
  SK_SHARED(uint32_t, sums, kSharedGroups);
  const int64_t n = row.size(), groups = divide(n, group);
  const bool summing = out.sums.data != nullptr;
  for (int64_t g = Team::rank(); g < groups; g += Team::size()) magnitudes[g] = sums[g] = 0;
  __syncthreads();
  row.each(again, [&](const PackOf<T>& pack, int64_t i) {
    each_part<kPack>(i, n, group, [&](int64_t g, int from, int to) {
      uint32_t most = 0;
#pragma unroll
      for (int k = 0; k < kPack; ++k)
        if (k >= from && k < to) most = Max()(most, magnitude_of(to_f32(pack.v[k])));
      raise_to(&magnitudes[g], most);
    });
  });
  __syncthreads();
  int8_t* const q = out.q + r * out.q_stride;
  const bool whole = aligned<Pack<int8_t, kPack>>(q);
  row.each(again, [&](const PackOf<T>& pack, int64_t i) {
    Pack<int8_t, kPack> codes{};
    each_part<kPack>(i, n, group, [&](int64_t g, int from, int to) {
      const Grid grid = symmetric_grid(float_of(magnitudes[g]));
      int32_t sum = 0;
#pragma unroll
      for (int k = 0; k < kPack; ++k) {
        if (k < from || k >= to) continue;
        codes.v[k] = grid.blank ? int8_t{0} : quantize_member(to_f32(pack.v[k]), grid);
        sum += codes.v[k];
      }
      if (summing) fetch_add(&sums[g], static_cast<uint32_t>(sum));
      if (i + from == g * group) out.scale.at(r, g) = grid.scale;
    });
    store_pack(codes, q, i, n, whole);
  });
  __syncthreads();
  for (int64_t g = Team::rank(); summing && g < groups; g += Team::size())
    out.sums.at(r, g) = static_cast<int32_t>(sums[g]);
}

// value(i) is value i of the row.
template <class Team, class Value>
__device__ void quantize_own_groups(const Value& value, int64_t n, int64_t r, int64_t group, const Codes& out) {
  const int64_t groups = divide(n, group);
  for (int64_t g = Team::rank(); g < groups; g += Team::size()) {
    uint32_t most = 0;
    for (int64_t i = g * group; i < (g + 1) * group; ++i) most = Max()(most, magnitude_of(value(i)));
    const Grid grid = symmetric_grid(float_of(most));
    int32_t sum = 0;
    for (int64_t i = g * group; i < (g + 1) * group; ++i) {
      const int8_t code = grid.blank ? int8_t{0} : quantize_member(value(i), grid);
      out.q[r * out.q_stride + i] = code;
      sum += code;
    }
    out.scale.at(r, g) = grid.scale;
    if (out.sums.data != nullptr) out.sums.at(r, g) = sum;
  }
}

}  // namespace sk::gpu
