// Rotary embedding of new queries and keys, and the write of keys and values into a paged cache.
//
// Pairs (i, i + dim / 2), the "half split" layout of Hugging Face checkpoints (Su et al. 2021, RoFormer), in f32 and
// rounded to the rows' type; then, on request, times the Hadamard matrix. An int8 cache gets quantize_int8's codes of
// that, one scale per (token, head). Threads share out heads, never tokens: so of tokens with the same slot the last one
// stays.
#include "cpu/attention.h"
#include "cpu/float_mode.h"
#include "cpu/isa.h"
#include "cpu/quantize.h"
#include "cpu/rotate.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace sk {
namespace {

// What a head is after the rotary embedding: multiplied by the Hadamard matrix, where the call asks for that.
struct Hadamard {
  RotateGroup<float> rotate;  // null: not
  float of_q, of_k;           // powers of two, their product 1 / dim
};

#define SK_BODY "cpu/rope_write.inl"
#include "cpu/each_isa.inc"

template <class T>
auto pick_head() {
#if SK_X86
  if (isa() == Isa::kAvx512) return &avx512::write_head<T>;
  if (isa() == Isa::kAvx2) return &avx2::write_head<T>;
#endif
  return &scalar::write_head<T>;
}

Hadamard hadamard_of(const RopeWrite& c) {
  Hadamard result{c.hadamard ? rotate_group<float>(isa()) : nullptr, 1.0f, 1.0f};
  for (int64_t n = 1; n < c.cache.dim; n *= 2) (result.of_k < result.of_q ? result.of_q : result.of_k) *= 0.5f;
  return result;
}

}  // namespace

const char* rope_write_kv(const RopeWrite& c, int threads) {
  for (int64_t t = 0; t < c.tokens; ++t)
    if (c.slots[t] < -1 || c.slots[t] >= c.cache.pages * c.cache.page_size)
      return "slots: expected -1 or an index inside the cache";
  const auto write = c.dtype == Dtype::kF32   ? pick_head<float>()
                     : c.dtype == Dtype::kF16 ? pick_head<F16>()
                                              : pick_head<BF16>();
  const QuantizeGroup<float> quantize = quantize_group<float>(isa());
  const Hadamard hadamard = hadamard_of(c);
  const int64_t row = c.cache.dim > c.cache.value_dim ? c.cache.dim : c.cache.value_dim;
  const int64_t q_heads = c.q == nullptr ? 0 : c.q_heads;
  const int64_t heads = q_heads + c.cache.heads, values = heads * c.tokens * row;  // some 0.6 ns each
  parallel_for(threads, heads, values < 8192 ? heads : (heads + 3) / 4, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    const IeeeMode ieee;
    float* const rows = reinterpret_cast<float*>(scratch.get(static_cast<size_t>(2 * row + 1) * sizeof(float)));
    for (int64_t head = begin; head < end; ++head) write(c, head - q_heads, hadamard, quantize, rows, rows + row);
  });
  return nullptr;
}

}  // namespace sk
