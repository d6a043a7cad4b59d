// How to cut a memory-bound job for parallel_for.
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

}  // namespace sk
