// Decode attention over a paged cache, and the rotary write of new keys and values into it.
#pragma once
#include <cstdint>

namespace sk {

struct RopeWrite {
  // All strides in elements. Rows of q, k, v: one token, heads contiguous inside the row.
  float* q;  // rotated in place; may be null
  const float *k, *v, *cos, *sin;
  int64_t q_row, k_row, v_row, table_row;
  int64_t tokens, q_heads, kv_heads, dim;
  // Exactly one pair of caches: float (scales null) or int8 with one scale per (token, head).
  void *k_cache, *v_cache;
  float *k_scale, *v_scale;
  const int64_t* slots;  // token index in the cache, page * page_size + offset; -1 = don't write
  int64_t cache_slots;   // pages * page_size
};

struct Attend {
  const float* q;
  float* out;  // [batch, rows, heads, dim] contiguous
  int64_t q_batch, q_row;
  int64_t batch, rows, heads, kv_heads, dim;
  const void *k_cache, *v_cache;
  const float *k_scale, *v_scale;  // null for float caches
  int64_t page_size, pages, table_width;
  const int32_t *page_table, *lengths;  // [batch, table_width], [batch]
  const uint8_t* mask;                  // [batch, rows, rows] over the last `rows` keys, or null = causal
  float scale;
};

// Return a message for values that may not be used (a slot, a length, a page), null if all is well.
const char* rope_write_kv(const RopeWrite& call);
const char* attend(const Attend& call, int threads);

}  // namespace sk
