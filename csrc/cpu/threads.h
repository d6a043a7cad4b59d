// Fork-join for kernels that last microseconds, on torch's own workers where it has some.
//
// torch's OpenMP workers spin for milliseconds after each parallel operation, so a second pool beside them would share
// its cores with them: mixed with torch operations, our kernels lost a third of their speed that way. This module links
// no OpenMP runtime. It looks for the one that torch has brought into the process and asks it to run a team
// (GOMP_parallel, the entry point of GCC's runtime that LLVM's and Intel's offer as well). Where there is none, in a
// forked child, whose parent's workers are gone, and for a while after a team had to wait for a worker that had lost
// its core, a small pool of our own does the work.
//
// Results never depend on the split: a kernel may only divide work between outputs. Calls from several Python threads
// do not wait for each other: each gets a team of its own from OpenMP, and our own pool lets the second caller work
// alone.
#pragma once
#include <cstdint>
#include <type_traits>

namespace sk {

// Runs job(context, begin, end) over pieces of [0, n), each a multiple of `grain` long except the last. Pieces are
// dealt out to `threads` threads, the caller among them: to each a stretch of its own, and then what others have left.
// Returns when all are done. If pieces throw, what the first one threw is thrown to the caller, and the outputs are as
// far as they got.
void parallel_for_raw(int threads, int64_t n, int64_t grain, void (*job)(void*, int64_t, int64_t), void* context);

template <class F>
void parallel_for(int threads, int64_t n, int64_t grain, F&& body) {
  if (n <= 0) return;
  if (threads <= 1 || n <= grain) {
    body(int64_t{0}, n);
    return;
  }
  using Body = std::remove_reference_t<F>;
  parallel_for_raw(
      threads, n, grain, [](void* context, int64_t begin, int64_t end) { (*static_cast<Body*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Runs body() in the calling thread, with a team that stays together: what body hands out by parallel_for costs a
// fraction of a microsecond, since nobody has to be called. Worth it for many short jobs, one right after another.
void together_raw(int threads, void (*body)(void*), void* context);

template <class F>
void together(int threads, F&& body) {
  using Body = std::remove_reference_t<F>;
  together_raw(
      threads, [](void* context) { (*static_cast<Body*>(context))(); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

bool torch_pool();            // whether torch's OpenMP workers do the work
void use_own_pool(bool own);  // for tests and benchmarks
int pool_workers();           // how many workers our own pool has now

}  // namespace sk
