#include "cpu/threads.h"

#include <dlfcn.h>
#ifdef __linux__
#include <link.h>
#endif
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "cpu/isa.h"

namespace sk {
namespace {

constexpr int kMaxWorkers = 255;
constexpr int kSpins = 4000;  // pauses before sleeping: some 50 us, longer than the Python code between two calls

inline void relax() {
#if SK_X86
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

struct Job {
  void (*run)(void*, int64_t, int64_t) = nullptr;
  void* context = nullptr;
  int64_t n = 0, piece = 1;
};

// One job at a time. `state_` holds (job number << 32 | closed bit | workers inside): a worker joins with one
// compare-and-swap, which fails once the job is closed, so the caller never waits for a worker that is still asleep and
// a late worker never sees a job that is being replaced.
class Pool {
 public:
  // Returns false when another thread is using the pool.
  bool run(int threads, const Job& job) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    grow(threads - 1);
    job_ = job;
    helpers_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(number << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    drain();
    state_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int spin = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++spin) {
      relax();
      if (spin > kSpins) std::this_thread::yield();  // a helper has lost its core
    }
    busy_.clear(std::memory_order_release);
    return true;
  }

  int workers() const { return workers_; }

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 31, kInside = kClosed - 1;

  void grow(int count) {
    if (count > kMaxWorkers) count = kMaxWorkers;
    while (workers_ < count) {
      try {
        std::thread(&Pool::work, this, workers_).detach();
      } catch (...) {
        return;  // no more threads to be had: fewer helpers, same result
      }
      ++workers_;
    }
  }

  void drain() {
    for (;;) {
      const int64_t begin = next_.fetch_add(job_.piece, std::memory_order_relaxed);
      if (begin >= job_.n) return;
      job_.run(job_.context, begin, begin + job_.piece < job_.n ? begin + job_.piece : job_.n);
    }
  }

  void work(int index) {
    uint64_t done = 0;  // the last job number that this worker has dealt with
    for (;;) {
      uint64_t state = wait_for_job(done);
      done = state >> 32;
      while ((state >> 32) == done && !(state & kClosed)) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        if (index < helpers_) drain();
        state_.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
    }
  }

  uint64_t wait_for_job(uint64_t done) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const uint64_t state = state_.load(std::memory_order_acquire);
      if ((state >> 32) != done) return state;
      relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return (state_.load(std::memory_order_seq_cst) >> 32) != done; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return state_.load(std::memory_order_acquire);
  }

  Job job_;
  int helpers_ = 0, workers_ = 0;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

std::atomic<bool> own_pool{false};

// The pool is never destroyed: detached workers may outlive static destructors. A forked child has no workers, neither
// ours nor torch's, so it starts with a fresh pool of our own.
alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool* make_pool() { return new (storage) Pool; }

Pool& pool() {
  static Pool* const instance = make_pool();
  return *instance;
}

const bool fork_handler = [] {
  pthread_atfork(nullptr, nullptr, [] {
    make_pool();
    own_pool = true;
  });
  return true;
}();

// ---- torch's workers ----------------------------------------------------------------------------

using GompParallel = void (*)(void (*run)(void*), void* context, unsigned threads, unsigned flags);

#ifdef __linux__
// Looks at a loaded library: an OpenMP runtime? The one in torch's folder wins over others.
int look_at(dl_phdr_info* info, size_t, void* found) {
  const char* path = info->dlpi_name;
  if (std::strstr(path, "libgomp") == nullptr && std::strstr(path, "libomp") == nullptr &&
      std::strstr(path, "libiomp") == nullptr)
    return 0;
  void* library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  void* entry = library == nullptr ? nullptr : dlsym(library, "GOMP_parallel");
  if (entry != nullptr) *static_cast<GompParallel*>(found) = reinterpret_cast<GompParallel>(entry);
  return entry != nullptr && std::strstr(path, "torch") != nullptr;
}
#endif

GompParallel gomp_parallel() {
  static const GompParallel entry = [] {
    GompParallel found = nullptr;
#ifdef __linux__
    dl_iterate_phdr(look_at, &found);
#endif
    return found;
  }();
  return own_pool.load(std::memory_order_relaxed) ? nullptr : entry;
}

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLongWait{1}, kRest{250};

struct Team {
  Job job;
  std::thread::id caller = std::this_thread::get_id();
  Clock::duration work{};  // the caller's share
  std::atomic<int64_t> next{0};
};

void drain_team(void* context) {
  Team& team = *static_cast<Team*>(context);
  const Clock::time_point start = Clock::now();
  for (;;) {
    const int64_t begin = team.next.fetch_add(team.job.piece, std::memory_order_relaxed);
    if (begin >= team.job.n) break;
    team.job.run(team.job.context, begin, begin + team.job.piece < team.job.n ? begin + team.job.piece : team.job.n);
  }
  if (std::this_thread::get_id() == team.caller) team.work = Clock::now() - start;
}

std::atomic<Clock::rep> resting_until{0};  // no teams before this time

// A team begins and ends when all its members have arrived, also one that has just lost its core to another process.
// A caller that spins for it may be what keeps it from running, until the system's time slice ends: 4 ms instead of
// 20 us per call were measured on two busy cores. Our own pool waits for no one who has not begun. So after a wait that
// the work does not explain it takes over for a while, in which torch's workers go to sleep.
bool run_team(GompParallel entry, int threads, const Job& job) {
  const Clock::time_point start = Clock::now();
  if (start.time_since_epoch().count() < resting_until.load(std::memory_order_relaxed)) return false;
  Team team;
  team.job = job;
  entry(drain_team, &team, static_cast<unsigned>(threads), 0);
  const Clock::time_point end = Clock::now();
  const Clock::duration wait = end - start - team.work;
  if (wait > kLongWait && wait > team.work)
    resting_until.store((end + kRest).time_since_epoch().count(), std::memory_order_relaxed);
  return true;
}

}  // namespace

void parallel_for_raw(int threads, int64_t n, int64_t grain, void (*job)(void*, int64_t, int64_t), void* context) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t grains = (n + grain - 1) / grain;
  if (threads > grains) threads = static_cast<int>(grains);
  // Two pieces per thread: a thread that loses its core for a moment holds up half as much work.
  const int64_t parts = grains < 2 * static_cast<int64_t>(threads) ? grains : 2 * static_cast<int64_t>(threads);
  const int64_t piece = (grains + parts - 1) / parts * grain;
  if (threads > 1) {
    const Job whole{job, context, n, piece};
    const GompParallel entry = gomp_parallel();
    if (entry != nullptr && run_team(entry, threads, whole)) return;
    if (pool().run(threads, whole)) return;
  }
  job(context, 0, n);
}

bool torch_pool() { return gomp_parallel() != nullptr; }

void use_own_pool(bool own) { own_pool = own; }

int pool_workers() { return pool().workers(); }

}  // namespace sk
