#include "cpu/read_bytes.h"

#include <atomic>
#include <cstring>

#include "cpu/fetch.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int64_t kBlock = 512;

uint64_t read_scalar(const char* p, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, p + i, 8);
    sum ^= word;
  }
  return sum;
}

#if SK_X86
SK_TARGET_AVX2_BEGIN
uint64_t read_avx2(const char* p, int64_t n) {
  __m256i a[4];
  for (int j = 0; j < 4; ++j) a[j] = _mm256_setzero_si256();
  const Fetch fetch(Pace::kMemory);
  for (int64_t i = 0; i < n; i += kBlock) {
    fetch.four_lines(p + i), fetch.four_lines(p + i + 256);
    for (int64_t b = 0; b < kBlock; b += 128)
      for (int j = 0; j < 4; ++j)
        a[j] = _mm256_xor_si256(a[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + b + 32 * j)));
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a[0], a[1]), _mm256_xor_si256(a[2], a[3]));
  return static_cast<uint64_t>(_mm256_extract_epi64(all, 0) ^ _mm256_extract_epi64(all, 1) ^
                               _mm256_extract_epi64(all, 2) ^ _mm256_extract_epi64(all, 3));
}
SK_TARGET_END
#endif

}  // namespace

uint64_t read_bytes(const void* data, int64_t n, int threads) {
  const char* p = static_cast<const char*>(data);
  const int64_t blocks = n / kBlock, parts = 2 * (threads < 1 ? 1 : threads);
  std::atomic<uint64_t> sum{read_scalar(p + blocks * kBlock, n - blocks * kBlock)};
  parallel_for(threads, blocks, (blocks + parts - 1) / parts, [&](int64_t begin, int64_t end) {
    const char* from = p + begin * kBlock;
    const int64_t count = (end - begin) * kBlock;
#if SK_X86
    sum ^= isa() == Isa::kScalar ? read_scalar(from, count) : read_avx2(from, count);
#else
    sum ^= read_scalar(from, count);
#endif
  });
  return sum;
}

}  // namespace sk
