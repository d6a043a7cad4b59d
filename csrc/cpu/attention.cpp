// Attention of a few query rows over a paged cache (decoding and verification): every key is read once for all of them.
//
// softmax(q k^T * scale) v with grouped kv heads (Ainslie et al. 2023, GQA), keys and values in pages (Kwon et al.
// 2023, PagedAttention). The keys of a request are cut into blocks of kBlock at fixed positions. A block leaves, per
// query, its largest score, its sum of exponentials and its weighted values (attend.inl); afterwards a query's blocks
// are joined in ascending order by the rule of the online softmax (Milakov & Gimelshein 2018; over a split of the keys
// as in Flash-Decoding). Threads share out blocks and heads, so one request keeps all of them busy, and since neither
// the cut nor the order of joining depends on threads, batch or rows, a row's bits don't either.
#include "cpu/attention.h"

#include <cstring>
#include <vector>

#include "cpu/exp.h"
#include "cpu/float_mode.h"
#include "cpu/isa.h"
#include "cpu/quantize.h"
#include "cpu/scratch.h"
#include "cpu/threads.h"

namespace sk {
namespace {

constexpr int kLanes = 16;              // keys and values are taken in vectors of 16, keys in tiles of 16
constexpr int kSums = 4;                // partial sums of a score: a multiply-add waits 4 cycles for the last one
constexpr int64_t kBlock = 128;         // keys per block
constexpr int64_t kQueries = 32;        // queries (rows times heads of a group) that share one reading of a block
constexpr int64_t kAhead = 2;           // tiles of keys that are on their way while one is worked on
constexpr int64_t kHead = kLanes;       // floats before a partial result's values: largest score, sum
constexpr int64_t kPartials = 1 << 19;  // floats of partial results at a time, where there is a choice

inline int64_t padded(int64_t n) { return n == 0 ? kLanes : (n + kLanes - 1) / kLanes * kLanes; }

// Queries of one request that share a reading: number i is row i / group, head i % group of each group of query heads.
struct Queries {
  int64_t request, first, count;  // numbers first .. first + count
  int64_t blocks;                 // up to the last key that one of them sees
  int64_t partials;               // where their partial results begin, in floats
  int64_t unit;                   // number of their first unit; a unit is one block of one kv head
};

// What the kernels need to know beyond the call.
struct Shape {
  int64_t group;          // query heads per kv head
  int64_t width, values;  // of a query and of a result, padded
  int64_t partial;        // floats of a partial result
};

namespace scalar {
#define SK_F16C 0
#define SK_LANES 0
#define SK_TOGETHER 1
#include "cpu/convert.inc"
#include "cpu/lanes.inc"
#include "cpu/attend.inl"
#undef SK_LANES
#undef SK_TOGETHER
#undef SK_F16C
}  // namespace scalar
#if SK_X86
#define SK_F16C 1
namespace avx2 {
SK_TARGET_AVX2_BEGIN
#define SK_LANES 256
#define SK_TOGETHER 1
#include "cpu/convert.inc"
#include "cpu/lanes.inc"
#include "cpu/attend.inl"
#undef SK_LANES
#undef SK_TOGETHER
SK_TARGET_END
}  // namespace avx2
namespace avx512 {
SK_TARGET_AVX512_BEGIN
#define SK_LANES 512
#define SK_TOGETHER 4
#include "cpu/convert.inc"
#include "cpu/lanes.inc"
#include "cpu/attend.inl"
#undef SK_LANES
#undef SK_TOGETHER
SK_TARGET_END
}  // namespace avx512
#undef SK_F16C
#endif

struct Kernels {
  decltype(&scalar::attend_block) block;
  decltype(&scalar::join_blocks) join;
};

Kernels pick() {
#if SK_X86
  if (isa() == Isa::kAvx512) return {&avx512::attend_block, &avx512::join_blocks};
  if (isa() == Isa::kAvx2) return {&avx2::attend_block, &avx2::join_blocks};
#endif
  return {&scalar::attend_block, &scalar::join_blocks};
}

const char* find_fault(const Attend& c) {
  const int64_t page_size = c.cache.page_size;
  for (int64_t b = 0; b < c.batch; ++b) {
    if (c.lengths[b] < c.rows || c.lengths[b] > c.table_width * page_size)
      return "lengths: expected at least the number of query rows and at most the pages of the request";
    for (int64_t p = 0; p * page_size < c.lengths[b]; ++p)
      if (c.page_table[b * c.table_width + p] < 0 || c.page_table[b * c.table_width + p] >= c.cache.pages)
        return "page_table: expected page numbers inside the cache";
  }
  return nullptr;
}

// Pieces of at least ~1 us: a team that is together begins one in a third of that. `cost` is a unit's in
// nanoseconds.
int64_t grain(int64_t units, int64_t cost) {
  const int64_t pieces = units * cost / 1000;
  return pieces <= 1 ? units : (units + pieces - 1) / pieces;
}

// How many queries share a reading: fewer than would fit if there are too few blocks to divide between the threads.
int64_t queries_per_part(const Attend& c, int64_t group, int threads) {
  const int64_t queries = c.rows * group;
  int64_t readings = 0;
  for (int64_t b = 0; b < c.batch; ++b) readings += (c.lengths[b] + kBlock - 1) / kBlock * c.cache.heads;
  const int64_t split = (2 * threads + readings - 1) / readings;
  const int64_t share = threads == 1 ? queries : (queries + split - 1) / split;
  return share > kQueries ? kQueries : share < 4 ? 4 : share;
}

void run(const Attend& c, const Shape& shape, const std::vector<Queries>& parts, Scratch& memory, int threads) {
  const Kernels kernels = pick();
  const Queries& last = parts.back();
  const int64_t kv_heads = c.cache.heads, units = last.unit + last.blocks * kv_heads;
  const int64_t floats = last.partials + last.blocks * kv_heads * last.count * shape.partial;
  float* const partials = reinterpret_cast<float*>(memory.get(static_cast<size_t>(floats) * sizeof(float)));
  // A multiply-add takes about 1/16 ns; bringing a tile of keys into f32 about as long as one query.
  const int64_t cost = kBlock * (last.count + 1) * (shape.width + shape.values) / 16;
  parallel_for(threads, units, grain(units, cost), [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    const IeeeMode ieee;
    const size_t size = kQueries * (shape.width + kBlock) + kLanes * (2 * shape.width + shape.values);
    float* const own = reinterpret_cast<float*>(scratch.get(size * sizeof(float)));
    size_t p = 0;
    for (int64_t unit = begin; unit < end; ++unit) {
      while (p + 1 < parts.size() && parts[p + 1].unit <= unit) ++p;
      const int64_t number = unit - parts[p].unit;  // the blocks of a head come one after another
      const int64_t kv = number / parts[p].blocks, block = number % parts[p].blocks;
      kernels.block(c, shape, parts[p], kv, block,
                    partials + parts[p].partials + (block * kv_heads + kv) * parts[p].count * shape.partial, own);
    }
  });
  int64_t queries = 0;
  for (const Queries& part : parts) queries += part.count * kv_heads;
  const int64_t join_cost = last.blocks * (shape.values / 4 + 8);
  parallel_for(threads, queries, grain(queries, join_cost), [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    const IeeeMode ieee;
    float* const sum = reinterpret_cast<float*>(scratch.get(static_cast<size_t>(shape.values) * sizeof(float)));
    size_t p = 0;
    int64_t before = 0;
    for (int64_t i = begin; i < end; ++i) {
      while (i - before >= parts[p].count * kv_heads) before += parts[p++].count * kv_heads;
      const int64_t query = (i - before) % parts[p].count, kv = (i - before) / parts[p].count;
      kernels.join(c, shape, parts[p], kv, query, partials + parts[p].partials, sum);
    }
  });
}

}  // namespace

const char* attend(const Attend& c, int threads) {
  if (const char* fault = find_fault(c)) return fault;
  if (c.batch == 0 || c.rows == 0 || c.heads == 0 || c.cache.value_dim == 0) return nullptr;
  const int64_t group = c.heads / c.cache.heads, values = padded(c.cache.value_dim);
  const Shape shape{group, padded(c.cache.dim), values, kHead + values};
  thread_local Scratch memory;
  std::vector<Queries> parts;
  const int64_t share = queries_per_part(c, group, threads);
  int64_t units = 0, floats = 0;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t first = 0; first < c.rows * group; first += share) {
      const int64_t count = c.rows * group - first < share ? c.rows * group - first : share;
      const int64_t last_row = (first + count - 1) / group;
      const int64_t keys = c.mask == nullptr ? c.lengths[b] - c.rows + last_row + 1 : c.lengths[b];
      const int64_t blocks = (keys + kBlock - 1) / kBlock, size = blocks * c.cache.heads * count * shape.partial;
      if (floats + size > kPartials && !parts.empty()) {
        run(c, shape, parts, memory, threads);
        parts.clear();
        units = floats = 0;
      }
      parts.push_back({b, first, count, blocks, floats, units});
      units += blocks * c.cache.heads;
      floats += size;
    }
  run(c, shape, parts, memory, threads);
  return nullptr;
}

}  // namespace sk
