// The body of decode attention, included once per instruction set (attention.cpp).
//
// One task is one query head of one request with up to kRows query rows. Two passes over the keys in cache order:
// scores and their maximum, then exp, sum and the weighted values. Every reduction runs over 16 fixed lanes and is
// folded in a fixed tree, so a row's bits depend on its own query and keys alone: not on how many rows share the pass,
// on threads, or on the instruction set (vectors of 16 in GCC's portable spelling, compiled without contraction).

typedef float f32x16 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

#define SK_INLINE __attribute__((always_inline)) inline

SK_INLINE void load(const float* p, f32x16& v) { memcpy(&v, p, sizeof v); }
SK_INLINE void load(const int8_t* p, f32x16& v) {
  i8x16 codes;
  memcpy(&codes, p, sizeof codes);
  v = __builtin_convertvector(codes, f32x16);
}
template <class T>
SK_INLINE void load_tail(const T* p, int64_t n, f32x16& v) {
  v = f32x16{};
  for (int64_t i = 0; i < n; ++i) v[i] = static_cast<float>(p[i]);
}

#ifdef __clang__
#define SK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int i32x16 __attribute__((vector_size(64)));
#define SK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i32x16{__VA_ARGS__})
#endif

// a holds the partial sums of keys in its groups, b those of as many later keys: halves every group of both.
#define SK_FOLD8(a, b)                                                        \
  (SK_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
   SK_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define SK_FOLD4(a, b)                                                          \
  (SK_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) + \
   SK_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define SK_FOLD2(a, b)                                                          \
  (SK_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) + \
   SK_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define SK_FOLD1(a, b)                                                           \
  (SK_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) + \
   SK_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))

// The sums of 16 vectors, in order: a tree of 15 steps instead of 16 horizontal sums.
SK_INLINE void fold16(f32x16* t, f32x16& sums) {
  for (int i = 0; i < 8; ++i) t[i] = SK_FOLD8(t[2 * i], t[2 * i + 1]);
  for (int i = 0; i < 4; ++i) t[i] = SK_FOLD4(t[2 * i], t[2 * i + 1]);
  for (int i = 0; i < 2; ++i) t[i] = SK_FOLD2(t[2 * i], t[2 * i + 1]);
  sums = SK_FOLD1(t[0], t[1]);
}

// Dot products of one query with kLanes keys.
template <class T>
SK_INLINE void dots(const float* q, const T* const* keys, int64_t dim, f32x16& sums) {
  f32x16 partial[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    f32x16 sum{}, x, y;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      load(q + i, x);
      load(keys[l] + i, y);
      sum += x * y;
    }
    if (i < dim) {
      load_tail(q + i, dim - i, x);
      load_tail(keys[l] + i, dim - i, y);
      sum += x * y;
    }
    partial[l] = sum;
  }
  fold16(partial, sums);
}

// out[0 .. width) = sum over keys of p * value, kept in registers; width <= 4 * kLanes and whole vectors if kWhole.
template <class T, bool kWhole>
SK_INLINE void weigh(const float* p, const T* const* values, int64_t seen, int64_t width, float total, float* out) {
  f32x16 sum[4] = {}, y;
  for (int64_t j = 0; j < seen; ++j) {
    const T* v = values[j];
    for (int t = 0; t < 4; ++t) {
      if (kWhole) {
        load(v + t * kLanes, y);
      } else {
        if (t * kLanes >= width) break;
        load_tail(v + t * kLanes, width - t * kLanes < kLanes ? width - t * kLanes : kLanes, y);
      }
      sum[t] += p[j] * y;
    }
  }
  for (int64_t d = 0; d < width; ++d) out[d] = sum[d / kLanes][d % kLanes] / total;
}

// scratch: kRows rows of `stride` floats for scores, then 2 * stride pointers for the keys' and values' addresses.
template <class T>
void attend_task(const Attend& c, int64_t b, int64_t head, int64_t row0, int64_t rows, float* scratch, int64_t stride) {
  const int64_t kv = head / (c.heads / c.kv_heads), dim = c.dim, token = c.kv_heads * dim;
  const int64_t keys = c.lengths[b], own = keys - c.rows;  // own: keys older than the rows of this call
  const int64_t last = c.mask == nullptr ? own + row0 + rows : keys;
  const int32_t* table = c.page_table + b * c.table_width;
  const T** k_at = reinterpret_cast<const T**>(scratch + kRows * stride);
  const T** v_at = k_at + stride;
  float* k_scale = reinterpret_cast<float*>(v_at + stride);
  float* v_scale = k_scale + stride;

  int64_t page = 0, offset = 0;
  for (int64_t j = 0; j < last; ++j) {
    const int64_t slot = int64_t{table[page]} * c.page_size + offset;
    k_at[j] = static_cast<const T*>(c.k_cache) + slot * token + kv * dim;
    v_at[j] = static_cast<const T*>(c.v_cache) + slot * token + kv * dim;
    k_scale[j] = c.k_scale == nullptr ? c.scale : c.scale * c.k_scale[slot * c.kv_heads + kv];
    v_scale[j] = c.v_scale == nullptr ? 1.0f : c.v_scale[slot * c.kv_heads + kv];
    if (++offset == c.page_size) {
      offset = 0;
      ++page;
    }
  }
  // The last block of kLanes keys is filled up with copies of its first; their scores are overwritten by -inf.
  const int64_t padded = (last + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = last; j < padded; ++j) {
    k_at[j] = k_at[last - 1];
    k_scale[j] = 0.0f;
  }

  for (int64_t j = 0; j < padded; j += kLanes) {
    f32x16 factor, sums;
    load(k_scale + j, factor);
    for (int64_t r = 0; r < rows; ++r) {
      dots(c.q + b * c.q_batch + (row0 + r) * c.q_row + head * dim, k_at + j, dim, sums);
      sums *= factor;
      memcpy(scratch + r * stride + j, &sums, sizeof sums);
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r, seen = c.mask == nullptr ? own + row + 1 : keys;
    float* p = scratch + r * stride;
    if (c.mask != nullptr)
      for (int64_t i = 0; i < c.rows; ++i)
        if (!c.mask[(b * c.rows + row) * c.rows + i]) p[own + i] = -__builtin_inff();
    const int64_t end = (seen + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = seen; j < end; ++j) p[j] = -__builtin_inff();
    float lane[kLanes];
    memcpy(lane, p, sizeof lane);
    for (int64_t j = kLanes; j < end; j += kLanes)
      for (int l = 0; l < kLanes; ++l) lane[l] = p[j + l] > lane[l] ? p[j + l] : lane[l];
    float maximum = lane[0];
    for (int l = 1; l < kLanes; ++l) maximum = lane[l] > maximum ? lane[l] : maximum;

    f32x16 sum[kLanes] = {}, w, factor, total;
    for (int64_t j = 0; j < end; j += kLanes) {
      for (int l = 0; l < kLanes; ++l) lane[l] = exp_f32(p[j + l] - maximum);
      memcpy(&w, lane, sizeof w);
      sum[0] += w;
      load(v_scale + j, factor);
      w *= factor;
      memcpy(p + j, &w, sizeof w);
    }
    fold16(sum, total);
    float* out = c.out + ((b * c.rows + row) * c.heads + head) * dim;
    for (int64_t d = 0; d < dim; d += 4 * kLanes) {
      if (d != 0)
        for (int64_t j = 0; j < seen; ++j) v_at[j] += 4 * kLanes;
      const int64_t width = dim - d < 4 * kLanes ? dim - d : 4 * kLanes;
      if (width == 4 * kLanes)
        weigh<T, true>(p, v_at, seen, width, total[0], out + d);
      else
        weigh<T, false>(p, v_at, seen, width, total[0], out + d);
    }
    if (dim > 4 * kLanes)
      for (int64_t j = 0; j < seen; ++j) v_at[j] -= (dim - 1) / (4 * kLanes) * 4 * kLanes;
  }
}

#undef SK_INLINE
#undef SK_SHUFFLE
#undef SK_FOLD8
#undef SK_FOLD4
#undef SK_FOLD2
#undef SK_FOLD1
