// IEEE arithmetic for as long as this object lives: round half to even, no flush to zero. Programs such as
// torch.set_flush_denormal(True) change the mode of the calling thread only, so without this a row's result could
// depend on the thread that it lands on.
#pragma once
#include "cpu/isa.h"

namespace sk {

class IeeeMode {
 public:
#if SK_X86
  IeeeMode() : saved_(_mm_getcsr()) {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~IeeeMode() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80, kFlags = 0x3f;  // all exceptions masked; the sticky flags don't matter
  unsigned saved_;
#else
  IeeeMode() {}
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

}  // namespace sk
