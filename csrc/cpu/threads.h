// A small fork-join pool for kernels that last microseconds.
//
// Why not OpenMP: torch ships its own copy of libgomp, so a second OpenMP runtime in this module would put two pools
// of spinning workers on the same cores. Ours keeps at most `threads - 1` workers, which spin for a few tens of
// microseconds after a job (a decoder pass is hundreds of small jobs in a row) and then sleep.
//
// Results never depend on the split: a kernel may only divide work between outputs. If the pool is busy with a job of
// another Python thread, the caller runs its own job alone instead of waiting.
#pragma once
#include <cstdint>
#include <type_traits>

namespace sk {

// Runs job(context, begin, end) over pieces of [0, n), each a multiple of `grain` long except the last. Pieces are
// handed out in order to `threads` threads, the caller among them. Returns when all are done. Must not throw.
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

int pool_workers();  // how many workers exist now (diagnostics)

}  // namespace sk
