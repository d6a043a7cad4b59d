// The body of decode attention, included once per instruction set (attention.cpp) behind convert.inc and
// lanes.inc. SK_TOGETHER is the number of queries that share the registers.
//
// One unit is one block of keys of one kv head, for all queries that share the reading. Keys, later values, are brought
// into f32 in tiles of 16 that stay in the first-level cache: so no cache type costs more than its own bytes. Keys lie
// across in their tile, so that 16 scores are a vector of sums and nothing is added across lanes. Every sum runs over
// dimensions in kSums fixed strides, or over keys in ascending order, so a row's bits depend on its own query and keys
// alone: not on how many queries share the pass, nor on the instruction set (lanes.inc; multiply-adds are fused
// everywhere, other sums nowhere). Keys that a row may not see are left out, not weighted by zero:
// there may be a NaN in them.

// f<n>(...) for 1 <= n <= SK_TOGETHER.
#if SK_TOGETHER == 1
#define SK_FOR_SOME(n, f, ...) f<1>(__VA_ARGS__)
#else
#define SK_FOR_SOME(n, f, ...)          \
  switch (n) {                          \
    case 1: f<1>(__VA_ARGS__); break;   \
    case 2: f<2>(__VA_ARGS__); break;   \
    case 3: f<3>(__VA_ARGS__); break;   \
    default: f<4>(__VA_ARGS__); break;  \
  }
#endif

inline void widen(const int8_t* x, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) save_lanes(y + i, load_lanes(x + i));
  for (; i < n; ++i) y[i] = x[i];
}

// `count` rows (at most 16) of n values as f32 rows of `width`, the rest zeros.
template <class T>
SK_INLINE void load_tile(const char* const* rows, int64_t count, int64_t n, int64_t width, float* tile) {
  for (int64_t r = 0; r < count; ++r) {
    widen(reinterpret_cast<const T*>(rows[r]), n, tile + r * width);
    for (int64_t i = n; i < width; ++i) tile[r * width + i] = 0.0f;
  }
  if (count < kLanes) memset(tile + count * width, 0, static_cast<size_t>((kLanes - count) * width) * sizeof(float));
}

inline void load_tile(CacheType type, const char* const* rows, int64_t count, int64_t n, int64_t width, float* tile) {
  switch (type) {
    case CacheType::kF32: return load_tile<float>(rows, count, n, width, tile);
    case CacheType::kF16: return load_tile<F16>(rows, count, n, width, tile);
    case CacheType::kBF16: return load_tile<BF16>(rows, count, n, width, tile);
    case CacheType::kInt8: return load_tile<int8_t>(rows, count, n, width, tile);
  }
}

// The same 16 rows with the other order of their values: tile[i][r] is value i of row r. Rows of int8 change places as
// words of four values.
inline void load_across(CacheType type, const char* const* rows, int64_t count, int64_t n, int64_t width, float* tile,
                        float* rowwise) {
  Lanes t[kLanes];
  if (type == CacheType::kInt8 && n % (4 * kLanes) == 0) {
    for (int64_t i = 0; i < n; i += 4 * kLanes) {
      for (int64_t r = 0; r < kLanes; ++r) t[r] = r < count ? load_words(rows[r] + i) : lanes_of(0.0f);
      transpose16(t);
      for (int w = 0; w < kLanes; ++w, tile += 4 * kLanes) {
        save_lanes(tile, signed_byte<0>(t[w]));
        save_lanes(tile + kLanes, signed_byte<1>(t[w]));
        save_lanes(tile + 2 * kLanes, signed_byte<2>(t[w]));
        save_lanes(tile + 3 * kLanes, signed_byte<3>(t[w]));
      }
    }
    return;
  }
  load_tile(type, rows, count, n, width, rowwise);
  for (int64_t i = 0; i < width; i += kLanes, tile += kLanes * kLanes) {
    for (int r = 0; r < kLanes; ++r) t[r] = load_lanes(rowwise + r * width + i);
    transpose16(t);
    for (int w = 0; w < kLanes; ++w) save_lanes(tile + w * kLanes, t[w]);
  }
}

// Scores of kN queries with the 16 keys of a tile that lies across: a lane is a key, so no sum crosses lanes.
template <int kN>
SK_INLINE void score(const float* q, const float* tile, int64_t width, const float* factor, float* scores) {
  Lanes sum[kN][kSums];
  for (int s = 0; s < kSums; ++s) {
    const Lanes y = load_lanes(tile + s * kLanes);
    for (int i = 0; i < kN; ++i) sum[i][s] = multiply(lanes_of(q[i * width + s]), y);
  }
  for (int64_t d = kSums; d < width; d += kSums)
    for (int s = 0; s < kSums; ++s) {
      Lanes y = load_lanes(tile + (d + s) * kLanes);
      hold(y);
      for (int i = 0; i < kN; ++i) sum[i][s] = multiply_add(lanes_of(q[i * width + d + s]), y, sum[i][s]);
    }
  for (int i = 0; i < kN; ++i) {
    const Lanes all = add(add(sum[i][0], sum[i][1]), add(sum[i][2], sum[i][3]));
    save_lanes(scores + i * kBlock, multiply(all, load_lanes(factor)));
  }
}

// Adds the seen keys' weighted values to kN results of kVectors vectors.
template <int kN, int kVectors>
SK_INLINE void weigh(const float* weights, const float* tile, int64_t width, uint32_t seen, float* out,
                     int64_t distance) {
  Lanes sum[kN][kVectors], y[kVectors];
  for (int i = 0; i < kN; ++i)
    for (int v = 0; v < kVectors; ++v) sum[i][v] = load_lanes(out + i * distance + v * kLanes);
  for (int l = 0; l < kLanes; ++l) {
    if ((seen >> l & 1) == 0) continue;
    for (int v = 0; v < kVectors; ++v) y[v] = load_lanes(tile + l * width + v * kLanes), hold(y[v]);
    for (int i = 0; i < kN; ++i) {
      const Lanes weight = lanes_of(weights[i * kBlock + l]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = multiply_add(weight, y[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kN; ++i)
    for (int v = 0; v < kVectors; ++v) save_lanes(out + i * distance + v * kLanes, sum[i][v]);
}

template <int kN>
SK_INLINE void add_values(const float* weights, const float* tile, int64_t width, uint32_t seen, float* out,
                          int64_t distance) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes) weigh<kN, 4>(weights, tile + d, width, seen, out + d, distance);
  for (; d < width; d += kLanes) weigh<kN, 1>(weights, tile + d, width, seen, out + d, distance);
}

// Which of the 16 keys from `first` on the row sees: key j is bit j - first.
inline uint32_t seen_keys(const Attend& c, int64_t request, int64_t row, int64_t first) {
  const int64_t keys = c.lengths[request], older = keys - c.rows;
  const int64_t end = c.mask == nullptr ? older + row + 1 : keys;
  if (end <= first) return 0;
  uint32_t seen = end - first >= kLanes ? 0xffffu : (1u << (end - first)) - 1;
  if (c.mask != nullptr && first + kLanes > older) {
    const uint8_t* mask = c.mask + (request * c.rows + row) * c.rows;
    for (int64_t j = first > older ? first : older; j < keys && j < first + kLanes; ++j)
      if (mask[j - older] == 0) seen &= ~(1u << (j - first));
  }
  return seen;
}

// Turns a block's scores of one query into weights exp(score - largest) * v_scale; leaves the largest and the sum.
inline void soften(float* scores, int64_t tiles, const float* v_scale, float* partial) {
  Lanes most = load_lanes(scores);
  for (int64_t j = kLanes; j < tiles * kLanes; j += kLanes) most = larger(load_lanes(scores + j), most);
  float lane[kLanes];
  save_lanes(lane, most);
  float largest = lane[0];
  for (int l = 1; l < kLanes; ++l) largest = lane[l] > largest ? lane[l] : largest;
  const float base = largest == -__builtin_inff() ? 0.0f : largest;  // a row that sees nothing here: all weights 0
  Lanes sums = lanes_of(0.0f);
  for (int64_t j = 0; j < tiles * kLanes; j += kLanes) {
    const Lanes weights = exp_lanes(subtract(load_lanes(scores + j), lanes_of(base)));
    sums = add(sums, weights);
    save_lanes(scores + j, multiply(weights, load_lanes(v_scale + j)));
  }
  float sum[kLanes];
  save_lanes(sum, sums);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  partial[0] = largest;
  partial[1] = sum[0];
}

inline void load_query(const Attend& c, int64_t at, int64_t width, float* out) {
  const int64_t dim = c.cache.dim;
  switch (c.dtype) {
    case Dtype::kF32: widen(static_cast<const float*>(c.q) + at, dim, out); break;
    case Dtype::kF16: widen(static_cast<const F16*>(c.q) + at, dim, out); break;
    case Dtype::kBF16: widen(static_cast<const BF16*>(c.q) + at, dim, out); break;
  }
  for (int64_t i = dim; i < width; ++i) out[i] = 0.0f;
}

// Where a block's keys and values begin, and what their scores and weights are multiplied by.
struct Keys {
  const char *k[kBlock], *v[kBlock];
  float k_scale[kBlock], v_scale[kBlock];
};

inline void find_keys(const Attend& c, int64_t request, int64_t kv, int64_t first, int64_t count, Keys& at) {
  const Cache& cache = c.cache;
  const int64_t size = size_of(cache.type);
  const int32_t* table = c.page_table + request * c.table_width + first / cache.page_size;
  int64_t token = first % cache.page_size;
  for (int64_t j = 0; j < count; ++table, token = 0) {
    const int64_t page = *table, run = count - j < cache.page_size - token ? count - j : cache.page_size - token;
    const char* k = static_cast<const char*>(cache.k.data) +
                    (page * cache.k.page + token * cache.k.token + kv * cache.k.head) * size;
    const char* v = static_cast<const char*>(cache.v.data) +
                    (page * cache.v.page + token * cache.v.token + kv * cache.v.head) * size;
    for (int64_t i = 0; i < run; ++i) at.k[j + i] = k + i * cache.k.token * size;
    for (int64_t i = 0; i < run; ++i) at.v[j + i] = v + i * cache.v.token * size;
    if (cache.type == CacheType::kInt8) {
      const Paged<float>&ks = cache.k_scale, &vs = cache.v_scale;
      const float* k_scale = ks.data + page * ks.page + token * ks.token + kv * ks.head;
      const float* v_scale = vs.data + page * vs.page + token * vs.token + kv * vs.head;
      for (int64_t i = 0; i < run; ++i) at.k_scale[j + i] = c.scale * k_scale[i * ks.token];
      for (int64_t i = 0; i < run; ++i) at.v_scale[j + i] = v_scale[i * vs.token];
    } else {
      for (int64_t i = 0; i < run; ++i) at.k_scale[j + i] = c.scale;
      for (int64_t i = 0; i < run; ++i) at.v_scale[j + i] = 1.0f;
    }
    j += run;
  }
  for (int64_t j = count; j < (count + kLanes - 1) / kLanes * kLanes; ++j) at.k_scale[j] = at.v_scale[j] = 0.0f;
}

// Asks for the rows of a tile that is needed soon: the keys of a head lie apart, so the hardware sees no stream.
SK_INLINE void prefetch(const char* const* rows, int64_t count, int64_t bytes) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[r] + i);
}

// partial: per query the largest score, the sum, and from kHead on the weighted values.
void attend_block(const Attend& c, const Shape& s, const Queries& part, int64_t kv, int64_t block, float* partial,
                  float* scratch) {
  const int64_t unseen = c.mask == nullptr ? c.rows - 1 - (part.first + part.count - 1) / s.group : 0;
  const int64_t first = block * kBlock, left = c.lengths[part.request] - unseen - first;
  const int64_t count = left < kBlock ? left : kBlock;
  const int64_t tiles = (count + kLanes - 1) / kLanes;
  float* const queries = scratch;
  float* const scores = queries + kQueries * s.width;
  float* const tile = scores + kQueries * kBlock;
  uint32_t seen[kBlock / kLanes][kQueries];
  Keys at;
  find_keys(c, part.request, kv, first, count, at);
  const int64_t k_bytes = c.cache.dim * size_of(c.cache.type), v_bytes = c.cache.value_dim * size_of(c.cache.type);
  const int64_t ahead = kAhead * kLanes;
  prefetch(at.k, count < ahead ? count : ahead, k_bytes);
  for (int64_t i = 0; i < part.count; ++i) {
    const int64_t row = (part.first + i) / s.group, head = kv * s.group + (part.first + i) % s.group;
    load_query(c, part.request * c.q_batch + row * c.q_row + head * c.cache.dim, s.width, queries + i * s.width);
    for (int64_t t = 0; t < tiles; ++t)
      seen[t][i] =
          i > 0 && (part.first + i) % s.group ? seen[t][i - 1] : seen_keys(c, part.request, row, first + t * kLanes);
  }

  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t j = t * kLanes, here = count - j < kLanes ? count - j : kLanes;
    if (count > j + ahead) prefetch(at.k + j + ahead, count - j - ahead < kLanes ? count - j - ahead : kLanes, k_bytes);
    prefetch(at.v + j, here, v_bytes);
    load_across(c.cache.type, at.k + j, here, c.cache.dim, s.width, tile, tile + kLanes * s.width);
    for (int64_t i = 0, some; i < part.count; i += some) {
      const float* q = queries + i * s.width;
      float* to = scores + i * kBlock + j;
      some = part.count - i < SK_TOGETHER ? part.count - i : SK_TOGETHER;
      SK_FOR_SOME(some, score, q, tile, s.width, at.k_scale + j, to);
    }
    for (int64_t i = 0; i < part.count; ++i)
      if (seen[t][i] != 0xffffu)
        for (int l = 0; l < kLanes; ++l)
          if ((seen[t][i] >> l & 1) == 0) scores[i * kBlock + j + l] = -__builtin_inff();
  }

  for (int64_t i = 0; i < part.count; ++i) {
    soften(scores + i * kBlock, tiles, at.v_scale, partial + i * s.partial);
    memset(partial + i * s.partial + kHead, 0, static_cast<size_t>(s.values) * sizeof(float));
  }

  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t j = t * kLanes, here = count - j < kLanes ? count - j : kLanes;
    load_tile(c.cache.type, at.v + j, here, c.cache.value_dim, s.values, tile);
    for (int64_t i = 0, some; i < part.count; i += some) {
      const uint32_t* mine = seen[t] + i;
      for (some = 1; some < SK_TOGETHER && i + some < part.count && mine[some] == mine[0];) ++some;
      SK_FOR_SOME(some, add_values, scores + i * kBlock + j, tile, s.values, mine[0], partial + i * s.partial + kHead,
                  s.partial);
    }
  }
}

// Joins the blocks of one query in ascending order and writes its result. `partials` are those of all its queries:
// per block, kv head and query. A block in which the query sees nothing has sum 0 and is left out.
void join_blocks(const Attend& c, const Shape& s, const Queries& part, int64_t kv, int64_t query, const float* partials,
                 float* sum) {
  const int64_t row = (part.first + query) / s.group, head = kv * s.group + (part.first + query) % s.group;
  const float* p = partials + (kv * part.count + query) * s.partial;
  float largest = -__builtin_inff(), total = 0.0f;
  for (int64_t d = 0; d < s.values; ++d) sum[d] = 0.0f;
  for (int64_t block = 0; block < part.blocks; ++block, p += c.cache.heads * part.count * s.partial) {
    if (p[1] == 0.0f) continue;
    const float top = p[0] > largest ? p[0] : largest;
    const float before = exp_f32(largest - top), now = exp_f32(p[0] - top);
    for (int64_t d = 0; d < s.values; ++d) sum[d] = sum[d] * before + p[kHead + d] * now;
    total = total * before + p[1] * now;
    largest = top;
  }
  for (int64_t d = 0; d < s.values; ++d) sum[d] = sum[d] / total;
  const int64_t n = c.cache.value_dim, at = ((part.request * c.rows + row) * c.heads + head) * n;
  switch (c.dtype) {
    case Dtype::kF32: return narrow(sum, n, static_cast<float*>(c.out) + at);
    case Dtype::kF16: return narrow(sum, n, static_cast<F16*>(c.out) + at);
    case Dtype::kBF16: return narrow(sum, n, static_cast<BF16*>(c.out) + at);
  }
}

#undef SK_INLINE
#undef SK_FOR_SOME
