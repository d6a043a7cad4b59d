#include "cpu/source.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/even_grain.h"
#include "cpu/float_mode.h"
#include "cpu/threads.h"

namespace sk {

float Source::operator[](int64_t i) const {
  switch (dtype) {
    case Dtype::kF16: return to_f32(static_cast<const F16*>(data)[i]);
    case Dtype::kBF16: return to_f32(static_cast<const BF16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

void Source::load(int64_t g, float* l) const {
  if ((g + 1) * kGroup <= size) {
    row_kernels(dtype).load64(at(g * kGroup), l);
    return;
  }
  const int64_t n = size - g * kGroup;
  for (int64_t i = 0; i < kGroup; ++i) {
    const float v = i < n ? (*this)[g * kGroup + i] : -INFINITY;
    l[i] = v == v ? v : -INFINITY;
  }
}

int64_t Source::find(int64_t begin, int64_t end, float value) const {
  return begin + row_kernels(dtype).find(at(begin), end - begin, value);
}

bool Source::block_tops(int64_t block, float* out, int threads) const {
  const RowKernels& kernels = row_kernels(dtype);
  const int64_t full = size / block;
  std::atomic<bool> nan{false};
  parallel_for(threads, full, even_grain(full, bytes(), threads), [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    if (kernels.max_blocks(at(begin * block), end - begin, block, out + begin)) nan = true;
  });
  if (full * block == size) return nan;
  float top = -INFINITY;
  int64_t i = full * block;
  const int64_t groups = (size - i) / kGroup;
  for (int64_t g = 0; g < groups; ++g, i += kGroup) {
    float one;
    if (kernels.max_blocks(at(i), 1, kGroup, &one)) nan = true;
    top = std::max(top, one);
  }
  for (; i < size; ++i) {
    const float v = (*this)[i];
    if (v != v) nan = true;
    top = v > top ? v : top;
  }
  out[full] = top;
  return nan;
}

bool Source::all_probabilities(int threads) const {
  std::atomic<bool> all{true};
  parallel_for(threads, size, even_grain(size, bytes(), threads), [&](int64_t begin, int64_t end) {
    if (!row_kernels(dtype).all_probabilities(at(begin), end - begin)) all = false;
  });
  return all;
}

int64_t first_group(const std::vector<float>& tops, float value) {
  return row_kernels(Dtype::kF32).find(tops.data(), static_cast<int64_t>(tops.size()), value);
}

float largest(const std::vector<float>& x) {
  float top;
  const int64_t n = static_cast<int64_t>(x.size());
  Source{x.data(), Dtype::kF32, n}.block_tops(std::max<int64_t>(kGroup, n + (-n & (kGroup - 1))), &top, 1);
  return top;
}

int64_t row_argmax(const Source& source, int threads, bool* hard) {
  thread_local std::vector<float> tops;
  tops.resize(source.groups());
  const bool nan = source.block_tops(kGroup, tops.data(), threads);
  const float best = largest(tops);
  *hard = nan || best == INFINITY;
  return best == -INFINITY ? -1 : source.find(first_group(tops, best) * kGroup, source.size, best);
}

}  // namespace sk
