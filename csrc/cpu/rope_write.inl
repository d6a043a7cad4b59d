// The body of rope_write_kv, included once per instruction set (rope_write.cpp) behind convert.inc.

inline void rotate(const float* __restrict x, const float* cos, const float* sin, int64_t half, float* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    y[i] = a * cos[i] - b * sin[i];
    y[i + half] = b * cos[i] + a * sin[i];
  }
}

// One row of keys or values to its place in the cache.
inline void store(const float* row, int64_t n, CacheType type, const Paged<void>& cache, const Paged<float>& scale,
                  int64_t page, int64_t token, int64_t head, QuantizeGroup<float> quantize) {
  const int64_t at = page * cache.page + token * cache.token + head * cache.head;
  switch (type) {
    case CacheType::kF32: return narrow(row, n, static_cast<float*>(cache.data) + at);
    case CacheType::kF16: return narrow(row, n, static_cast<F16*>(cache.data) + at);
    case CacheType::kBF16: return narrow(row, n, static_cast<BF16*>(cache.data) + at);
    case CacheType::kInt8:
      return quantize(row, n, QuantizeRule{}, 0, static_cast<int8_t*>(cache.data) + at,
                      scale.data + page * scale.page + token * scale.token + head * scale.head, nullptr);
  }
}

// All tokens of one kv head (head >= 0) or of query head q_heads + head, in order. x and y: a row each.
template <class T>
void write_head(const RopeWrite& c, int64_t head, const Hadamard& hadamard, QuantizeGroup<float> quantize, float* x,
                float* y) {
  const Cache& cache = c.cache;
  const int64_t dim = cache.dim;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const float *cos = c.cos + t * c.table_row, *sin = c.sin + t * c.table_row;
    if (head < 0) {
      T* q = static_cast<T*>(c.q) + t * c.q_row + (c.q_heads + head) * dim;
      widen(q, dim, x);
      rotate(x, cos, sin, dim / 2, y);
      if (hadamard.rotate != nullptr) {
        round_to(q, y, dim);
        hadamard.rotate(y, dim, hadamard.of_q, y);
      }
      narrow(y, dim, q);
      continue;
    }
    const int64_t slot = c.slots[t];
    if (slot < 0) continue;
    const int64_t page = slot / cache.page_size, token = slot % cache.page_size;
    widen(static_cast<const T*>(c.k) + t * c.k_row + head * dim, dim, x);
    rotate(x, cos, sin, dim / 2, y);
    round_to(static_cast<const T*>(c.k), y, dim);
    if (hadamard.rotate != nullptr) {
      hadamard.rotate(y, dim, hadamard.of_k, y);
      round_to(static_cast<const T*>(c.k), y, dim);
    }
    store(y, dim, cache.type, cache.k, cache.k_scale, page, token, head, quantize);
    widen(static_cast<const T*>(c.v) + t * c.v_row + head * cache.value_dim, cache.value_dim, x);
    store(x, cache.value_dim, cache.type, cache.v, cache.v_scale, page, token, head, quantize);
  }
}
