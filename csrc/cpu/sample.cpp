// Plain sampling and drafting: one token per row of logits.
#include <cmath>

#include "cpu/draw.h"
#include "cpu/over_requests.h"
#include "cpu/residual.h"
#include "cpu/verify.h"

namespace sk {

void sample(const SampleCall& call, int threads) {
  over_requests(threads, call.requests, call.logits.columns, [&](int64_t b, int t) {
    thread_local Row row;
    thread_local Residual all;
    const Filters filters = call.sampling.filters(b);
    const bool greedy = filters.temperature == 0.0f;
    bool hard;
    int64_t id = -1;
    if (greedy && !call.logprobs) {
      id = row_argmax(call.logits[b], t, &hard);
    } else {
      row.read(call.logits[b], t);
      if (!row.empty() && greedy) id = row.argmax();
      if (!row.empty() && !greedy) {
        row.weigh(filters, t);
        all.start(row, t);
        id = draw(all, Noise{static_cast<uint64_t>(call.sampling.seed[b]),
                             static_cast<uint64_t>(call.sampling.position[b]), static_cast<Stream>(call.stream),
                             static_cast<uint32_t>(call.index[b])});
      }
    }
    call.tokens[b] = id;
    if (call.logprobs) call.logprobs[b] = id < 0 ? NAN : static_cast<float>(row.log_softmax(id));
  });
}

}  // namespace sk
