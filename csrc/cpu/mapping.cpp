#include "cpu/mapping.h"

#include <cerrno>

#if defined(__unix__) || defined(__APPLE__)
#define SK_MAPPINGS 1
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#endif

namespace sk {

// What the handler reads. Never freed, because a handler may be looking at it, but used again: it belongs to a mapping
// while `live`, and begin and end change only while it does not.
struct Mapping::Range {
  std::atomic<uintptr_t> begin{0}, end{0};
  std::atomic<bool> live{false}, damaged{false};
  Range* next = nullptr;
};

#if SK_MAPPINGS

struct Guard {
  using Range = Mapping::Range;
  static std::mutex mutex;  // of everything but the handler
  static std::atomic<Range*> ranges;
  static std::atomic<const struct sigaction*> previous;
  static std::atomic<uintptr_t> passing;

  static Range* add(uintptr_t begin, uintptr_t end) {
    const std::lock_guard<std::mutex> lock(mutex);
    Range* range = ranges;
    while (range != nullptr && range->live) range = range->next;
    if (range == nullptr) {
      range = new Range;
      range->next = ranges;
      ranges = range;
    }
    range->begin = begin, range->end = end, range->damaged = false;
    range->live = true;
    return range;
  }

  static bool install() {
    const std::lock_guard<std::mutex> lock(mutex);
    struct sigaction now, ours = {};
    if (sigaction(SIGBUS, nullptr, &now) != 0) return false;
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_signal) return true;
    previous = new struct sigaction(now);  // the one before may be in use in a handler
    ours.sa_sigaction = &on_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // what a handler behind this one raises comes at once
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, nullptr) == 0;
  }

  // Only calls that are allowed in a handler, or are bare system calls (mmap).
  static void on_signal(int signal, siginfo_t* info, void* context) {
    const int saved = errno;
    if (!replace(reinterpret_cast<uintptr_t>(info->si_addr))) pass_on(signal, info, context);
    errno = saved;
  }

  static bool replace(uintptr_t address) {
    for (Range* range = ranges; range != nullptr; range = range->next) {
      if (!range->live || address < range->begin || address >= range->end) continue;
      range->damaged = true;
      const uintptr_t page = address & ~(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)) - 1);
      void* const start = reinterpret_cast<void*>(page);
      return mmap(start, range->end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == start;
    }
    return false;
  }

  // Handlers that were installed in turns can form a ring, each raising the signal for the one before it. A thread
  // that comes back to here in the middle of this ends it.
  static void pass_on(int signal, siginfo_t* info, void* context) {
    const struct sigaction* const old = previous;
    const uintptr_t self = (uintptr_t)pthread_self();
    const bool again = passing.exchange(self) == self;
    if (!again && (old->sa_flags & SA_SIGINFO) != 0) {
      old->sa_sigaction(signal, info, context);
    } else if (!again && old->sa_handler != SIG_DFL && old->sa_handler != SIG_IGN) {
      old->sa_handler(signal);
    } else if (again || old->sa_handler == SIG_DFL || info->si_code > 0) {  // a fault can't be ignored
      struct sigaction fatal = {};
      fatal.sa_handler = SIG_DFL;
      sigaction(SIGBUS, &fatal, nullptr);
      raise(signal);
    }
    passing = 0;
  }
};

std::mutex Guard::mutex;
std::atomic<Mapping::Range*> Guard::ranges{nullptr};
std::atomic<const struct sigaction*> Guard::previous{nullptr};
std::atomic<uintptr_t> Guard::passing{0};

bool guard_mappings() { return Guard::install(); }

Mapping* Mapping::of_file(int fd, int64_t size) {
  if (!guard_mappings()) return nullptr;
  void* const start = mmap(nullptr, static_cast<size_t>(size), PROT_READ, MAP_SHARED, fd, 0);
  if (start == MAP_FAILED) return nullptr;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(start);
  return new Mapping(Guard::add(begin, begin + static_cast<uintptr_t>(size)));
}

Mapping::~Mapping() {
  range_->live = false;
  munmap(reinterpret_cast<void*>(address()), static_cast<size_t>(size()));
}

void Mapping::load(int64_t offset, int64_t nbytes) const {
  constexpr int64_t kPiece = int64_t{1} << 20;  // a longer request than the read-ahead is cut short without a word
  const int64_t page = sysconf(_SC_PAGESIZE), end = std::min(offset + nbytes, size());
  for (int64_t at = offset / page * page; at < end; at += kPiece) {
    void* const start = reinterpret_cast<void*>(address() + static_cast<uintptr_t>(at));
    const size_t length = static_cast<size_t>(std::min(kPiece, end - at));
#ifdef MADV_POPULATE_READ
    if (madvise(start, length, MADV_POPULATE_READ) == 0) continue;
    if (errno != EINVAL) return;
#endif
    madvise(start, length, MADV_WILLNEED);
  }
}

#else

bool guard_mappings() { return errno = ENOSYS, false; }
Mapping* Mapping::of_file(int, int64_t) { return errno = ENOSYS, nullptr; }
Mapping::~Mapping() = default;
void Mapping::load(int64_t, int64_t) const {}

#endif

uintptr_t Mapping::address() const { return range_->begin; }
int64_t Mapping::size() const { return static_cast<int64_t>(range_->end - range_->begin); }
bool Mapping::damaged() const { return range_->damaged; }

}  // namespace sk
