// How to cut a job for parallel_for.
#pragma once
#include <cstdint>

namespace sk {

// The grain for n outputs that cost `bytes` of reading: two pieces per thread if each is worth it (64 KB are some 7
// us), one otherwise, always of equal size, so that no thread waits for another's remainder.
inline int64_t even_grain(int64_t n, int64_t bytes, int threads) {
  int64_t parts = bytes / (64 << 10);
  if (parts > 2 * threads) parts = 2 * threads;
  if (parts > threads) parts -= parts % threads;
  if (parts < 1) parts = 1;
  return (n + parts - 1) / parts;
}

// The grain for rows of `values` values that take `ns` nanoseconds each: all of them if that is below 2 us, since a team
// that is together begins a job in a few tenths; else rows worth at least half a microsecond.
inline int64_t row_grain(int64_t rows, int64_t values, double ns) {
  const double row = static_cast<double>(values + 1) * ns;
  if (static_cast<double>(rows) * row < 2000) return rows;
  return row < 500 ? static_cast<int64_t>(500 / row) + 1 : 1;
}

}  // namespace sk
