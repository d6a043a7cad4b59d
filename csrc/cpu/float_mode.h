// IEEE arithmetic for as long as this object lives: round half to even, no flush to zero. Programs such as
// torch.set_flush_denormal(True) change the mode of the calling thread only, so without this a row's result could
// depend on the thread that it lands on.
#pragma once
#include <cstdint>

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
#elif SK_NEON
  IeeeMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~IeeeMode() {
    if (saved_ != 0) asm volatile("msr fpcr, %0" : : "r"(saved_));
  }

 private:
  uint64_t saved_;
#else
  IeeeMode() {}
#endif
  IeeeMode(const IeeeMode&) = delete;
  IeeeMode& operator=(const IeeeMode&) = delete;
};

}  // namespace sk
