// How the threads share out a call: by requests, or, if there are fewer requests than threads, by the ids of each row.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cpu/float_mode.h"
#include "cpu/threads.h"

namespace sk {

// Calls one(request, threads) for every request.
template <class F>
void over_requests(int threads, int64_t requests, int64_t vocabulary, F&& one) {
  constexpr int64_t kInlineIds = 32768;  // fewer ids than this are not worth a second thread
  if (vocabulary * requests < kInlineIds) threads = 1;
  if (requests < threads) {
    const IeeeMode mode;
    for (int64_t b = 0; b < requests; ++b) one(b, threads);
    return;
  }
  parallel_for(threads, requests, std::max<int64_t>(1, kInlineIds / vocabulary), [&](int64_t begin, int64_t end) {
    const IeeeMode mode;
    for (int64_t b = begin; b < end; ++b) one(b, 1);
  });
}

}  // namespace sk
