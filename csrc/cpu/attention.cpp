// Attention of a few query rows over a cache (decoding and verification), one pass over the keys for all of them.
//
// softmax(q k^T * scale) v per head with grouped kv heads (Ainslie et al. 2023, GQA); keys and values live in pages
// (Kwon et al. 2023, PagedAttention). The two-pass softmax keeps a row of scores per query: a decode row has few
// thousand keys, so they stay in the second-level cache, and no running rescaling enters the result.
#include "cpu/attention.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>

#include "cpu/exp.h"
#include "cpu/isa.h"
#include "cpu/threads.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a call

namespace sk {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kRows = 8;

namespace scalar {
#include "cpu/attend.inl"
}
#if SK_X86
SK_TARGET_AVX2_BEGIN
namespace avx2 {
#include "cpu/attend.inl"
}
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
namespace avx512 {
#include "cpu/attend.inl"
}
SK_TARGET_END
#endif

template <class T>
auto pick_task() {
#if SK_X86
  if (isa() == Isa::kAvx512) return &avx512::attend_task<T>;
  if (isa() == Isa::kAvx2) return &avx2::attend_task<T>;
#endif
  return &scalar::attend_task<T>;
}

// Symmetric int8 with one scale per (token, head); the formula of quantize_int8.
void quantize_head(const float* x, int64_t dim, int8_t* q, float* scale) {
  float amax = 0.0f;
  bool nan = false;
  for (int64_t i = 0; i < dim; ++i) {
    const float a = std::fabs(x[i]);
    nan |= a != a;
    amax = a > amax ? a : amax;
  }
  const float s = nan ? NAN : (amax < 127.0f * 1.17549435e-38f ? 0.0f : amax / 127.0f);
  *scale = s;
  const bool zero = !(s > 0.0f) || std::isinf(s);
  for (int64_t i = 0; i < dim; ++i) {
    const float v = zero ? 0.0f : std::nearbyint(x[i] / s);
    q[i] = static_cast<int8_t>(v < -127.0f ? -127.0f : (v > 127.0f ? 127.0f : v));
  }
}

// Rotates pairs (i, i + dim / 2): the "half split" layout of Hugging Face checkpoints (Su et al. 2021, RoFormer).
void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float* y) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    y[i] = a * cos[i] - b * sin[i];
    y[i + half] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

const char* rope_write_kv(const RopeWrite& c) {
  for (int64_t t = 0; t < c.tokens; ++t)
    if (c.slots[t] < -1 || c.slots[t] >= c.cache_slots) return "slots: expected -1 or an index inside the cache";
  constexpr int64_t kMaxDim = 1024;
  if (c.dim > kMaxDim) return "k: expected a head dimension of at most 1024";
  float turned[kMaxDim];
  for (int64_t t = 0; t < c.tokens; ++t) {
    const float *cos = c.cos + t * c.table_row, *sin = c.sin + t * c.table_row;
    if (c.q != nullptr)
      for (int64_t h = 0; h < c.q_heads; ++h) {
        float* q = c.q + t * c.q_row + h * c.dim;
        rotate(q, cos, sin, c.dim, q);
      }
    if (c.slots[t] < 0) continue;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      const int64_t head = c.slots[t] * c.kv_heads + h;
      const float *k = c.k + t * c.k_row + h * c.dim, *v = c.v + t * c.v_row + h * c.dim;
      rotate(k, cos, sin, c.dim, turned);
      if (c.k_scale != nullptr) {
        quantize_head(turned, c.dim, static_cast<int8_t*>(c.k_cache) + head * c.dim, c.k_scale + head);
        quantize_head(v, c.dim, static_cast<int8_t*>(c.v_cache) + head * c.dim, c.v_scale + head);
      } else {
        memcpy(static_cast<float*>(c.k_cache) + head * c.dim, turned, c.dim * sizeof(float));
        memcpy(static_cast<float*>(c.v_cache) + head * c.dim, v, c.dim * sizeof(float));
      }
    }
  }
  return nullptr;
}

const char* attend(const Attend& c, int threads) {
  int64_t longest = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    if (c.lengths[b] < c.rows || c.lengths[b] > c.table_width * c.page_size)
      return "lengths: expected at least the number of query rows and at most the pages of the request";
    for (int64_t p = 0; p * c.page_size < c.lengths[b]; ++p)
      if (c.page_table[b * c.table_width + p] < 0 || c.page_table[b * c.table_width + p] >= c.pages)
        return "page_table: expected page numbers inside the cache";
    longest = c.lengths[b] > longest ? c.lengths[b] : longest;
  }
  if (c.batch == 0 || c.rows == 0 || c.heads == 0) return nullptr;
  const auto task = c.k_scale == nullptr ? pick_task<float>() : pick_task<int8_t>();
  const int64_t blocks = (c.rows + kRows - 1) / kRows, tasks = c.batch * c.heads * blocks;
  // About 2 multiply-adds per key, row and dimension: under ~40k of them a thread is not worth waking.
  const int64_t work = 2 * longest * (c.rows < kRows ? c.rows : kRows) * c.dim;
  const int64_t grain = work >= 40000 ? 1 : 40000 / (work + 1) + 1;
  const int64_t stride = (longest + kLanes) / kLanes * kLanes + kLanes;
  std::atomic<bool> short_of_memory{false};
  parallel_for(threads, tasks, grain, [&](int64_t begin, int64_t end) {
    // One scratch per thread, kept between calls: a decode pass makes one call per layer.
    thread_local std::unique_ptr<float[]> scratch;
    thread_local int64_t room = 0;
    const int64_t need = stride * (kRows + 2 * (sizeof(void*) / sizeof(float)) + 2);
    if (room < need) {
      scratch.reset(new (std::nothrow) float[need * 2]);  // room to grow: keys come one by one
      room = scratch ? need * 2 : 0;
      if (!scratch) {
        short_of_memory = true;
        return;
      }
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i % blocks, head = i / blocks % c.heads, b = i / blocks / c.heads, row0 = block * kRows;
      task(c, b, head, row0, c.rows - row0 < kRows ? c.rows - row0 : kRows, scratch.get(), stride);
    }
  });
  return short_of_memory ? "attend: out of memory for the scores" : nullptr;
}

}  // namespace sk
