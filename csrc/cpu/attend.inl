// The body of decode attention, included once per instruction set (attention.cpp).
//
// One task is one query head of one request with up to kRows query rows. Two passes over the keys in cache order:
// scores and their maximum, then exp, sum and the weighted values. Every reduction runs over kLanes fixed lanes and is
// folded in a fixed tree, so a row's bits depend on its own query and keys alone, not on how many rows share the pass,
// on threads, or on the instruction set (compiled without contraction).

inline float fold(const float* lane) {
  float t[kLanes / 2];
  for (int i = 0; i < kLanes / 2; ++i) t[i] = lane[i] + lane[i + kLanes / 2];
  for (int width = kLanes / 4; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) t[i] = t[i] + t[i + width];
  return t[0];
}

template <class T>
inline float dot(const float* q, const T* k, int64_t dim) {
  float lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lane[l] += q[i + l] * static_cast<float>(k[i + l]);
  for (int l = 0; i < dim; ++i, ++l) lane[l] += q[i] * static_cast<float>(k[i]);
  return fold(lane);
}

template <class T>
void attend_task(const Attend& c, int64_t b, int64_t head, int64_t row0, int64_t rows, float* scratch) {
  const int64_t kv = head / (c.heads / c.kv_heads), dim = c.dim, token = c.kv_heads * dim;
  const int64_t keys = c.lengths[b], own = keys - c.rows;  // keys before the rows of this call
  const int64_t last = c.mask == nullptr ? own + row0 + rows : keys;
  const int32_t* table = c.page_table + b * c.table_width;
  const T* k_cache = static_cast<const T*>(c.k_cache) + kv * dim;
  const T* v_cache = static_cast<const T*>(c.v_cache) + kv * dim;
  float maximum[kRows];
  for (int64_t r = 0; r < rows; ++r) maximum[r] = -__builtin_inff();

  for (int64_t j = 0; j < last; ++j) {
    const int64_t slot = int64_t{table[j / c.page_size]} * c.page_size + j % c.page_size;
    const T* k = k_cache + slot * token;
    const float k_scale = c.k_scale == nullptr ? c.scale : c.scale * c.k_scale[slot * c.kv_heads + kv];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = row0 + r;
      float* score = scratch + r * keys + j;
      const bool visible = j < own || (c.mask == nullptr ? j <= own + row : c.mask[(b * c.rows + row) * c.rows + j - own]);
      if (!visible) {
        *score = -__builtin_inff();
        continue;
      }
      const float s = dot(c.q + b * c.q_batch + row * c.q_row + head * dim, k, dim) * k_scale;
      *score = s;
      maximum[r] = s > maximum[r] ? s : maximum[r];
    }
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row0 + r, seen = c.mask == nullptr ? own + row + 1 : keys;
    float* p = scratch + r * keys;
    float* out = c.out + ((b * c.rows + row) * c.heads + head) * dim;
    float lane[kLanes] = {};
    int64_t j = 0;
    for (; j + kLanes <= seen; j += kLanes)
      for (int l = 0; l < kLanes; ++l) {
        const float w = exp_f32(p[j + l] - maximum[r]);
        p[j + l] = w;
        lane[l] += w;
      }
    for (int l = 0; j < seen; ++j, ++l) {
      p[j] = exp_f32(p[j] - maximum[r]);
      lane[l] += p[j];
    }
    const float total = fold(lane);
    for (int64_t d = 0; d < dim; ++d) out[d] = 0.0f;
    for (j = 0; j < seen; ++j) {
      const int64_t slot = int64_t{table[j / c.page_size]} * c.page_size + j % c.page_size;
      const T* v = v_cache + slot * token;
      const float w = c.v_scale == nullptr ? p[j] : p[j] * c.v_scale[slot * c.kv_heads + kv];
      for (int64_t d = 0; d < dim; ++d) out[d] += w * static_cast<float>(v[d]);
    }
    for (int64_t d = 0; d < dim; ++d) out[d] = out[d] / total;
  }
}
