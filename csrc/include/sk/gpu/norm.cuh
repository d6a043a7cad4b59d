// RMS norm and layer norm of x (+ residual), plain or followed by int8 quantisation in the same pass.
//
// A block per row. The row (the rounded sum of x and residual) stays in registers from the sum of squares to the last
// store, as far as it fits (HeldRow); a longer one is read again. Mean and variance are sums in f64, in an order that
// depends on the row's length alone: every thread adds up its own values, then the threads are added up. Whatever the
// formula rounds to T is rounded to T, in one function for the plain and the quantising case, so that their values are
// the same.
// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Ba, Kiros and Hinton, "Layer Normalization", 2016.
#pragma once
#include "sk/gpu/row_groups.cuh"

#include "gpu/launch.h"

namespace sk::gpu {

// Row r before the norm: x, or the rounded sum of x and residual once add() has written it, maybe over one of them.
template <class T>
struct NormInput {
  RowIn<T> x, residual;
  T* sum;  // null without a residual
  bool whole_sum;
  __device__ NormInput(const Norm& a, int64_t r)
      : x(a.x, r * a.x_stride, a.width),
        residual(a.residual, r * a.residual_stride, a.width),
        sum(a.residual == nullptr ? nullptr : static_cast<T*>(a.residual_out) + r * a.residual_out_stride),
        whole_sum(aligned<PackOf<T>>(sum)) {}

  __device__ PackOf<T> add(PackOf<T> h, int64_t i) const {
    const PackOf<T> more = residual(i);
#pragma unroll
    for (int k = 0; k < kPackOf<T>; ++k) h.v[k] = from_f32<T>(to_f32(h.v[k]) + to_f32(more.v[k]));
    store_pack(h, sum, i, x.n, whole_sum);
    return h;
  }
  __device__ PackOf<T> operator()(int64_t i) const {
    return sum == nullptr ? x(i) : load_pack<kPackOf<T>>(sum, i, x.n, whole_sum);
  }
  __device__ float value(int64_t i) const { return to_f32(sum == nullptr ? x.data[i] : sum[i]); }
};

// What happens to each value once the sums over the row are known.
template <class T>
struct Scaling {
  RowIn<T> weight, bias;
  bool biased;
  float centre, inverse;
  __device__ Scaling(const Norm& a, float mean, float factor)
      : weight(a.weight, 0, a.width),
        bias(a.bias, 0, a.width),
        biased(a.bias != nullptr),
        centre(mean),
        inverse(factor) {}

  __device__ T operator()(float h, T w, T b) const {
    T y = from_f32<T>((h - centre) * inverse);
    y = from_f32<T>(to_f32(y) * to_f32(w));
    return biased ? from_f32<T>(to_f32(y) + to_f32(b)) : y;
  }
  __device__ PackOf<T> operator()(PackOf<T> h, int64_t i) const {
    const PackOf<T> w = weight(i), b = biased ? bias(i) : PackOf<T>{};
#pragma unroll
    for (int k = 0; k < kPackOf<T>; ++k)  // behind the row's end 0 stays 0, where 0 * inverse might be NaN
      h.v[k] = i + k < weight.n ? (*this)(to_f32(h.v[k]), w.v[k], b.v[k]) : T{};
    return h;
  }
};

// sum(value) over a row, in f64; the values behind its end do not count.
template <class T, class Team, class Again, class Value>
__device__ double sum_over(const HeldRow<T, Team>& row, const Again& again, const Value& value) {
  double sum = 0;
  row.each(again, [&](const PackOf<T>& pack, int64_t i) {
#pragma unroll
    for (int k = 0; k < kPackOf<T>; ++k)
      if (i + k < row.size()) sum += value(static_cast<double>(to_f32(pack.v[k])));
  });
  return Team::reduce(sum, Sum());
}

template <class T, class Team>
__global__ void __launch_bounds__(Team::kThreads, 1) norm_kernel(const Norm a) {
  const int64_t n = a.width;
  const double count = static_cast<double>(n);
  for (int64_t r = Team::first(); r < a.rows; r += Team::step()) {
    const NormInput<T> input(a, r);
    HeldRow<T, Team> row(n, input.x);
    if (input.sum != nullptr)
      row.change([&](const PackOf<T>& x, int64_t i) { return input.add(x, i); },
                 [&](int64_t i) { input.add(input.x(i), i); });

    const double mean = a.centred ? sum_over(row, input, [](double h) { return h; }) / count : 0.0;
    const double squares = sum_over(row, input, [&](double h) { return (h - mean) * (h - mean); });
    const float inverse = static_cast<float>(1.0 / sqrt(squares / count + a.eps));
    const Scaling<T> scaled(a, static_cast<float>(mean), inverse);

    row.change(scaled, [](int64_t) {});
    const auto again = [&](int64_t i) { return scaled(input(i), i); };
    if (!a.quantize) {
      T* const out = static_cast<T*>(a.out) + r * a.out_stride;
      const bool whole = aligned<PackOf<T>>(out);
      row.each(again, [&](const PackOf<T>& y, int64_t i) { store_pack(y, out, i, n, whole); });
    } else if (a.group == n) {
      quantize_group(row, again, Group{r, 0, n, true}, n, a.codes);
    } else if (n <= a.group * kSharedGroups) {
      quantize_shared_groups(row, again, r, a.group, a.codes);
    } else {
      quantize_own_groups<Team>(
          [&](int64_t i) {
            return to_f32(scaled(input.value(i), scaled.weight.data[i], scaled.biased ? scaled.bias.data[i] : T{}));
          },
          n, r, a.group, a.codes);
    }
  }
}

}  // namespace sk::gpu
