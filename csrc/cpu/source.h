// One row of numbers in memory, and reading it 64 at a time.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/row_kernels.h"
#include "sk/accept.h"

namespace sk {

struct Source {
  const void* data;
  Dtype dtype;
  int64_t size;

  const void* at(int64_t i) const { return static_cast<const char*>(data) + i * (dtype == Dtype::kF32 ? 4 : 2); }
  float operator[](int64_t i) const;
  int64_t bytes() const { return size * (dtype == Dtype::kF32 ? 4 : 2); }
  int64_t groups() const { return (size + kGroup - 1) / kGroup; }
  void load(int64_t g, float* l) const;  // ids 64 g .. 64 g + 63, with -inf for NaN and beyond the end
  int64_t find(int64_t begin, int64_t end, float value) const;  // the first id in [begin, end) of that value, or end

  // out[b] = largest entry of block b, the last block may be short; returns whether a NaN was met.
  bool block_tops(int64_t block, float* out, int threads) const;
  bool all_probabilities(int threads) const;  // all finite and >= 0
};

float largest(const std::vector<float>& x);
int64_t first_group(const std::vector<float>& tops, float value);  // the first whose largest entry is the value

// The lowest id among the largest entries, NaN and -inf never, -1 without a candidate; *hard = NaN or +inf was met.
int64_t row_argmax(const Source& source, int threads, bool* hard);

}  // namespace sk
