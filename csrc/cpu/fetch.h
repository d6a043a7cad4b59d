// Prefetching for kernels that stream weights. Figures of Zen 4: one thread, large pages.
//
// With little arithmetic per line, memory sets the pace, and the prefetchers of the hardware keep more lines in flight
// than software can: every prefetch holds one of the few miss buffers of L1 until its line has come. There it is enough
// to touch a line here and there of the page after next, so that their streams don't end at a page's end: 30 GB/s, 19
// with every line prefetched. With much arithmetic per line the core does not look far enough ahead, and lines are
// fetched in two stages: from memory to L2 some 500 ns early, and from there to L1 in time, because a load that misses
// L1 stalls more arithmetic than the core can look past: 22 GB/s, 12 without.
//
// Intel's cores want every line fetched by software, however little the arithmetic: a pass of SmolLM2 over 4 rows takes
// 4.6 ms so (Emerald Rapids, two threads), and 7.2 as Zen wants it; over one row 3.6 and 3.9.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

#if SK_X86

namespace sk {

enum class Pace {
  kMemory,      // few lines, from memory
  kBetween,     // few lines from memory, every line from L2
  kArithmetic,  // every line from both
};

class Fetch {
 public:
  // `share` calls walk over the same lines one after the other, this is number `turn`: the first two share the far
  // stage (even and odd lines), so that memory is busy all the time.
  explicit Fetch(Pace pace, int share = 1, int turn = 0)
      : pace_(fetch_every_line() ? Pace::kArithmetic : pace),
        alone_(share == 1),
        far_(kFar + (alone_ ? 0 : turn % 2 * kLine)) {}

  // To be called where four lines, or the last few, are about to be read. Prefetching beyond the end does no harm.
  __attribute__((always_inline)) void four_lines(const void* start) const {
    const char* at = static_cast<const char*>(start);
    _mm_prefetch(at + far_, _MM_HINT_T1);
    if (pace_ == Pace::kMemory) return;
    for (int i = 0; i < 4; ++i) _mm_prefetch(at + kNear + i * kLine, _MM_HINT_T0);
    if (pace_ == Pace::kBetween) return;
    _mm_prefetch(at + far_ + 2 * kLine, _MM_HINT_T1);
    if (!alone_) return;
    _mm_prefetch(at + kFar + kLine, _MM_HINT_T1);
    _mm_prefetch(at + kFar + 3 * kLine, _MM_HINT_T1);
  }
  __attribute__((always_inline)) void line(const void* start) const {
    if (pace_ == Pace::kMemory) return;
    _mm_prefetch(static_cast<const char*>(start) + far_, _MM_HINT_T1);
    _mm_prefetch(static_cast<const char*>(start) + kNear, _MM_HINT_T0);
  }

 private:
  static constexpr int kFar = 8192, kNear = 1024, kLine = 64;
  const Pace pace_;
  const bool alone_;
  const int64_t far_;
};

}  // namespace sk

#endif  // SK_X86
