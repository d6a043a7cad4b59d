// Decode attention over a paged cache, and the rotary write of new keys and values into it. All strides in elements.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

enum class CacheType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3 };  // Dtype's codes, and one more
inline int64_t size_of(CacheType type) { return type == CacheType::kInt8 ? 1 : (type == CacheType::kF32 ? 4 : 2); }

// One row or number per (page, token in the page, head), at any distances.
template <class T>
struct Paged {
  T* data;
  int64_t page, token, head;
};

struct Cache {
  CacheType type;
  Paged<void> k, v;
  Paged<float> k_scale, v_scale;  // of int8 caches
  int64_t pages, page_size, heads, dim, value_dim;
};

struct RopeWrite {
  Dtype dtype;  // of q, k and v; a token's heads are contiguous
  void* q;      // rotated in place; may be null
  const void *k, *v;
  const float *cos, *sin;
  int64_t q_row, k_row, v_row, table_row;
  int64_t tokens, q_heads;
  const int64_t* slots;  // page * page_size + offset of each token; -1 = don't write; the last of equal ones stays
  bool hadamard;         // of q and k, after the rotary embedding; dim is a power of two
  Cache cache;
};

struct Attend {
  Dtype dtype;  // of q and out
  const void* q;
  void* out;  // [batch, rows, heads, value_dim] contiguous
  int64_t q_batch, q_row;
  int64_t batch, rows, heads, table_width;
  const int32_t *page_table, *lengths;  // [batch, table_width], [batch]
  const uint8_t* mask;                  // [batch, rows, rows] over the last `rows` keys, or null = causal
  float scale;
  Cache cache;
};

// Return a message for values that may not be used (a slot, a length, a page), null if all is well.
const char* rope_write_kv(const RopeWrite& call, int threads);
const char* attend(const Attend& call, int threads);

}  // namespace sk
