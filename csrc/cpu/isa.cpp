#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if SK_DOTPROD && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace sk {
namespace {

// What this architecture may have, every one after those that it contains.
#if SK_NEON
constexpr std::initializer_list<Isa> kRanks = {Isa::kScalar, Isa::kNeon, Isa::kDotprod};
#else
constexpr std::initializer_list<Isa> kRanks = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};
#endif

Isa detect() {
#if SK_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return Isa::kScalar;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni");
  return wide ? Isa::kAvx512 : Isa::kAvx2;
#elif SK_NEON
#if defined(__ARM_FEATURE_DOTPROD)
  return Isa::kDotprod;
#elif SK_DOTPROD && defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 ? Isa::kDotprod : Isa::kNeon;
#else
  return Isa::kNeon;
#endif
#else
  return Isa::kScalar;
#endif
}

Isa initial() {
  const Isa best = machine_isa();
  const char* wish = std::getenv("SPECDEC_CPU_ISA");
  if (wish == nullptr) return best;
  for (Isa i : kRanks)
    if (std::strcmp(wish, isa_name(i)) == 0 && i <= best) return i;
  return best;  // native.py has already refused names that don't exist or can't run here
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> value{initial()};
  return value;
}

}  // namespace

Isa machine_isa() {
  static const Isa best = detect();
  return best;
}

bool fetch_every_line() {
#if SK_X86
  static const bool intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return intel;
#else
  return false;
#endif
}

Isa isa() { return current().load(std::memory_order_relaxed); }

const char* isa_name(Isa which) {
  switch (which) {
    case Isa::kDotprod: return "dotprod";
    case Isa::kNeon: return "neon";
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "scalar";
  }
}

bool set_isa(const char* name) {
  for (Isa i : kRanks)
    if (std::strcmp(name, isa_name(i)) == 0 && i <= machine_isa()) {
      current().store(i);
      return true;
    }
  return false;
}

}  // namespace sk
