// Prefetching in two stages for kernels that stream weights: lines come from memory to L2 some 500 ns early, and from
// there to L1 in time. The compute-bound cases need both: the few buffers of L1 must not be held for as long as memory
// takes, and a load that misses L1 stalls more arithmetic than the core can look past.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

#if SK_X86

namespace sk {

class Fetch {
 public:
  // `share` calls walk over the same lines one after the other, this is number `turn`: the first two share the far
  // stage (even and odd lines), so that memory is busy all the time.
  Fetch(const void* start, int share, int turn)
      : at_(static_cast<const char*>(start)),
        far_(kFar + (share > 1 ? turn % 2 * kLine : 0)),
        mask_(share > 1 ? ~int64_t{kLine} : ~int64_t{0}) {}

  // To be called with each multiple of 64 bytes in turn. Prefetching beyond the end does no harm.
  void step(int64_t bytes) const {
    _mm_prefetch(at_ + far_ + (bytes & mask_), _MM_HINT_T1);
    _mm_prefetch(at_ + kNear + bytes, _MM_HINT_T0);
  }

 private:
  static constexpr int kFar = 8192, kNear = 1024, kLine = 64;
  const char* at_;
  int64_t far_, mask_;
};

}  // namespace sk

#endif  // SK_X86
