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
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "cpu/isa.h"

namespace sk {
namespace {

constexpr int kMaxWorkers = 255;
constexpr int64_t kPieces = 8;  // per thread, at least, if the grain allows it
constexpr int kSpins = 4000;  // pauses before sleeping: some 50 us, longer than the Python code between two calls

inline void relax() {
#if SK_X86
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// A job and how far it has got. Each thread has a lane of the pieces, the same in every job of the same size: so what a
// thread wrote it finds in its own caches when the next job reads it, and what it reads from memory is one stretch. Who
// is done with his own lane helps in the others. An exception must not leave the thread it was thrown on (past an
// OpenMP team it would end the process): the first one is kept for the caller, and the pieces that nobody has begun are
// dropped.
struct Job {
  Job(void (*run_)(void*, int64_t, int64_t), void* context_, int64_t n_, int64_t piece_, int threads)
      : run(run_), context(context_), n(n_), piece(piece_), helpers(threads - 1) {
    count = threads < kLanes ? threads : kLanes;
    const int64_t pieces = (n + piece - 1) / piece;
    for (int i = 0; i < count; ++i) {
      lanes[i].next.store(pieces * i / count * piece, std::memory_order_relaxed);
      lanes[i].end = i + 1 < count ? pieces * (i + 1) / count * piece : n;
    }
  }

  // `index`: 0 for the caller, from 1 on for helpers.
  void drain(int index) noexcept {
    for (int i = 0; i < count; ++i) drain_lane(lanes[(index + i) % count]);
  }

  void (*run)(void*, int64_t, int64_t);
  void* context;
  int64_t n, piece;
  int helpers;  // besides the caller, at most
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error;  // read by the caller once all have left

 private:
  static constexpr int kLanes = 16;
  struct alignas(64) Lane {
    std::atomic<int64_t> next;
    int64_t end;
  };

  void drain_lane(Lane& lane) noexcept {
    for (;;) {
      const int64_t begin = lane.next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= lane.end) return;
      try {
        run(context, begin, begin + piece < lane.end ? begin + piece : lane.end);
      } catch (...) {
        for (int i = 0; i < count; ++i) lanes[i].next.store(n, std::memory_order_relaxed);
        if (!failed.test_and_set()) error = std::current_exception();
      }
    }
  }

  int count;
  Lane lanes[kLanes];
};

// One job at a time, for whoever comes. `state_` holds (job number << 32 | closed bit | workers inside): a worker joins
// with one compare-and-swap, which fails once the job is closed, so the caller never waits for a worker that is still
// asleep and a late worker never sees a job that is being replaced.
class Desk {
 public:
  static constexpr uint64_t kOver = 0xffffffff;  // the number after the last job

  uint64_t number() const { return state_.load(std::memory_order_seq_cst) >> 32; }

  void open(Job& job) {
    job_ = &job;
    state_.store((number() + 1) << 32, std::memory_order_seq_cst);
  }

  // To be called once the job has no piece left: waits for those who are still at one.
  void close() {
    state_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int spin = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++spin) {
      relax();
      if (spin > kSpins) std::this_thread::yield();  // a helper has lost its core
    }
  }

  void end() { state_.store(kOver << 32 | kClosed, std::memory_order_release); }

  // Helper `index` works on that job, unless it is closed.
  void join(uint64_t number, int index) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state >> 32) == number && !(state & kClosed)) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      if (index < job_->helpers) job_->drain(index + 1);
      state_.fetch_sub(1, std::memory_order_acq_rel);
      return;
    }
  }

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 31, kInside = kClosed - 1;

  Job* job_ = nullptr;
  alignas(64) std::atomic<uint64_t> state_{0};
};

class Pool {
 public:
  // Returns false when another thread is using the pool.
  bool run(Job& job) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    grow(job.helpers);
    desk_.open(job);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    job.drain(0);
    desk_.close();
    busy_.clear(std::memory_order_release);
    return true;
  }

  int workers() const { return workers_; }

 private:
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

  void work(int index) {
    for (uint64_t done = 0;;) {
      done = wait_for_job(done);
      desk_.join(done, index);
    }
  }

  uint64_t wait_for_job(uint64_t done) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (desk_.number() != done) return desk_.number();
      relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return desk_.number() != done; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return desk_.number();
  }

  Desk desk_;
  int workers_ = 0;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
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
// Notes the loaded libraries that look like an OpenMP runtime. They are opened afterwards: the walk holds a lock of the
// loader, and dlopen takes another one first, so to open them here could lock up with a thread that loads a library.
int note_openmp(dl_phdr_info* info, size_t, void* paths) {
  const char* path = info->dlpi_name;
  for (const char* name : {"libgomp", "libomp", "libiomp"})
    if (std::strstr(path, name) != nullptr) {
      static_cast<std::vector<std::string>*>(paths)->emplace_back(path);
      break;
    }
  return 0;
}

GompParallel find_gomp_parallel() {
  std::vector<std::string> paths;
  dl_iterate_phdr(note_openmp, &paths);
  GompParallel found = nullptr;
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    void* entry = library == nullptr ? nullptr : dlsym(library, "GOMP_parallel");
    if (entry != nullptr) found = reinterpret_cast<GompParallel>(entry);
    if (entry != nullptr && path.find("torch") != std::string::npos) break;  // the one in torch's folder wins
  }
  return found;
}
#else
GompParallel find_gomp_parallel() { return nullptr; }
#endif

GompParallel gomp_parallel() {
  static const GompParallel entry = find_gomp_parallel();
  return own_pool.load(std::memory_order_relaxed) ? nullptr : entry;
}

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLongWait{1}, kRest{250};

std::atomic<Clock::rep> resting_until{0};  // no teams before this time

// A team begins and ends when all its members have arrived, also one that has just lost its core to another process.
// A caller that spins for it may be what keeps it from running, until the system's time slice ends: 4 ms instead of
// 20 us per call were measured on two busy cores. Our own pool waits for no one who has not begun. So after a wait that
// the work does not explain it takes over for a while, in which torch's workers go to sleep.
//
// `lead` is what the caller does, `help` what the others do.
template <class Lead, class Help>
bool run_team(int threads, Lead&& lead, Help&& help) {
  const GompParallel entry = gomp_parallel();
  const Clock::time_point start = Clock::now();
  if (entry == nullptr || start.time_since_epoch().count() < resting_until.load(std::memory_order_relaxed))
    return false;
  struct Team {
    Lead& lead;
    Help& help;
    std::thread::id caller = std::this_thread::get_id();
    Clock::duration work{};  // the caller's share
  } team{lead, help};
  entry(
      [](void* context) {
        Team& team = *static_cast<Team*>(context);
        if (std::this_thread::get_id() != team.caller) return team.help();
        const Clock::time_point start = Clock::now();
        team.lead();
        team.work = Clock::now() - start;
      },
      &team, static_cast<unsigned>(threads), 0);
  const Clock::time_point end = Clock::now();
  const Clock::duration wait = end - start - team.work;
  if (wait > kLongWait && wait > team.work)
    resting_until.store((end + kRest).time_since_epoch().count(), std::memory_order_relaxed);
  return true;
}

// The team that the calling thread leads at the moment, if its members are together and free.
thread_local Desk* together_now = nullptr;

void help_at(Desk& desk, int index) {
  uint64_t done = 0;
  for (int spin = 0;; ++spin) {
    const uint64_t number = desk.number();
    if (number == Desk::kOver) return;
    if (number != done) {
      done = number, spin = 0;
      desk.join(number, index);
    }
    relax();
    if (spin > kSpins) std::this_thread::yield();  // someone may need this core more
  }
}

}  // namespace

void parallel_for_raw(int threads, int64_t n, int64_t grain, void (*job)(void*, int64_t, int64_t), void* context) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  const int64_t grains = (n + grain - 1) / grain;
  if (threads > grains) threads = static_cast<int>(grains);
  // Several pieces per thread: a thread that begins late, or loses its core for a moment, holds up less of the work.
  const int64_t parts = grains < kPieces * threads ? grains : kPieces * threads;
  const int64_t piece = grains / parts * grain;
  if (threads > 1) {
    Job whole(job, context, n, piece, threads);
    bool done = true;
    if (Desk* const desk = together_now) {
      together_now = nullptr;  // a piece that hands out work itself finds nobody free
      desk->open(whole);
      whole.drain(0);
      desk->close();
      together_now = desk;
    } else {
      std::atomic<int> helpers{0};
      const auto lead = [&] { whole.drain(0); };
      const auto help = [&] { whole.drain(helpers.fetch_add(1, std::memory_order_relaxed) + 1); };
      done = run_team(threads, lead, help) || pool().run(whole);
    }
    if (done) {
      if (whole.error) std::rethrow_exception(whole.error);
      return;
    }
  }
  job(context, 0, n);
}

void together_raw(int threads, void (*body)(void*), void* context) {
  if (threads <= 1 || together_now != nullptr) return body(context);
  Desk desk;
  std::atomic<int> helpers{0};
  std::exception_ptr error;
  const auto lead = [&] {
    together_now = &desk;
    try {
      body(context);
    } catch (...) {
      error = std::current_exception();
    }
    together_now = nullptr;
    desk.end();
  };
  if (!run_team(threads, lead, [&] { help_at(desk, helpers.fetch_add(1)); })) return body(context);
  if (error) std::rethrow_exception(error);
}

bool torch_pool() { return gomp_parallel() != nullptr; }

void use_own_pool(bool own) { own_pool = own; }

int pool_workers() { return pool().workers(); }

}  // namespace sk
