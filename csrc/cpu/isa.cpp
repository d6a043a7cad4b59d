#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace sk {
namespace {

Isa detect() {
#if SK_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return Isa::kScalar;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512vnni");
  return wide ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kScalar;
#endif
}

Isa initial() {
  const Isa best = machine_isa();
  const char* wish = std::getenv("SPECDEC_CPU_ISA");
  if (wish == nullptr) return best;
  for (Isa i : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512})
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

Isa isa() { return current().load(std::memory_order_relaxed); }

const char* isa_name(Isa which) {
  switch (which) {
    case Isa::kAvx512: return "avx512";
    case Isa::kAvx2: return "avx2";
    default: return "scalar";
  }
}

bool set_isa(const char* name) {
  for (Isa i : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512})
    if (std::strcmp(name, isa_name(i)) == 0 && i <= machine_isa()) {
      current().store(i);
      return true;
    }
  return false;
}

}  // namespace sk
