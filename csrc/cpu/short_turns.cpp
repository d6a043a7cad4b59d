#include "cpu/short_turns.h"

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdint>

namespace sk {

#if defined(__linux__) && defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
namespace {

struct Attributes {  // the first version of struct sched_attr, see sched_setattr(2); headers disagree about who has it
  uint32_t size = sizeof(Attributes), policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};
static_assert(sizeof(Attributes) == 48);

constexpr uint64_t kTurn = 100'000;  // nanoseconds, the least that is taken

}  // namespace

bool short_turns() {
  Attributes now;
  if (syscall(SYS_sched_getattr, 0, &now, sizeof now, 0) != 0 || now.policy != SCHED_OTHER) return false;
  now.runtime = kTurn;
  return syscall(SYS_sched_setattr, 0, &now, 0) == 0;
}
#else
bool short_turns() { return false; }
#endif

}  // namespace sk
