#include "cpu/threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
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
  int64_t n = 0, piece = 0;
};

class Pool {
 public:
  // Returns false when another thread is using the pool.
  bool run(int threads, const Job& job) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    grow(threads - 1);
    const int helpers = threads - 1 < workers_ ? threads - 1 : workers_;
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    pending_.store(helpers, std::memory_order_relaxed);
    wanted_.store(helpers, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    drain();
    for (int spin = 0; pending_.load(std::memory_order_acquire) != 0; ++spin) {
      relax();
      if (spin > kSpins) std::this_thread::yield();  // a helper has lost its core
    }
    busy_.clear(std::memory_order_release);
    return true;
  }

  int workers() const { return workers_; }

 private:
  void grow(int count) {
    if (count > kMaxWorkers) count = kMaxWorkers;
    while (workers_ < count) {
      try {
        std::thread(&Pool::work, this, workers_, epoch_.load()).detach();
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

  void work(int index, uint64_t seen) {
    for (;;) {
      seen = wait_for_job(seen);
      if (index >= wanted_.load(std::memory_order_relaxed)) continue;
      drain();
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint64_t wait_for_job(uint64_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const uint64_t now = epoch_.load(std::memory_order_acquire);
      if (now != seen) return now;
      relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return epoch_.load(std::memory_order_acquire);
  }

  Job job_;
  int workers_ = 0;
  std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> pending_{0};
  alignas(64) std::atomic<uint64_t> epoch_{0};
  std::atomic<int> wanted_{0}, sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// The pool is never destroyed: detached workers may outlive static destructors. A forked child has no workers, so it
// starts with a fresh pool.
alignas(Pool) unsigned char storage[sizeof(Pool)];
Pool* make_pool() { return new (storage) Pool; }

Pool& pool() {
  static Pool* const instance = [] {
    pthread_atfork(nullptr, nullptr, [] { make_pool(); });
    return make_pool();
  }();
  return *instance;
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
  if (threads > 1 && pool().run(threads, Job{job, context, n, piece})) return;
  job(context, 0, n);
}

int pool_workers() { return pool().workers(); }

}  // namespace sk
