// The GPU launchers as seen from C++: plain structs and error codes, no vendor header. Addresses are device addresses,
// strides count elements, offsets are 64 bits. A launcher returns 0 or a code that error_name() and error_text()
// explain.
#pragma once
#include <cstdint>

#include "sk/numerics.h"
#include "sk/philox.h"

namespace sk::gpu {

// One number per group of a row: row r, group g keeps it at data[r * row_stride + g * group_stride].
template <class T>
struct PerGroup {
  T* data;
  int64_t row_stride, group_stride;
  SK_HD T& at(int64_t r, int64_t g) const { return data[r * row_stride + g * group_stride]; }
};

// rows x groups groups of `width` values each.
struct Shape {
  int64_t rows, groups, width;
};

// ---- quantisation ----

// Where codes go. `sums` of the codes of each group: data null if nobody asks for them.
struct Codes {
  int8_t* q;
  int64_t q_stride;
  PerGroup<float> scale;
  PerGroup<int32_t> sums;
};

struct QuantizeInt8 {
  Shape shape;
  const void* x;
  int64_t x_stride;
  Codes out;                     // the scale is read if `fixed`
  PerGroup<int32_t> zero_point;  // null: symmetric
  bool fixed, stochastic;
  uint64_t seed, offset;  // of stochastic rounding: the key, and the index of the first value
};

struct DequantizeInt8 {
  Shape shape;
  const int8_t* q;
  int64_t q_stride;
  PerGroup<const float> scale;
  PerGroup<const int32_t> zero_point;  // null: 0
  void* out;
  int64_t out_stride;
};

// RMS norm, or layer norm if `centred`, of rows x (+ residual) with `width` values. The result goes to `out`, or, if
// `quantize`, in groups of `group` to `codes`.
struct Norm {
  int64_t rows, width;
  const void* x;
  int64_t x_stride;
  const void* residual;  // or null
  int64_t residual_stride;
  void* residual_out;  // with a residual; may be x or residual itself
  int64_t residual_out_stride;
  const void* weight;
  const void* bias;  // or null
  double eps;
  bool centred, quantize;
  void* out;
  int64_t out_stride;
  int64_t group;
  Codes codes;
};

enum class Gate : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

// gate(first half) * second half of rows; shape counts the result's values. To `out` or `codes` as above.
struct GateMul {
  Shape shape;
  Gate gate;
  const void* gate_up;
  int64_t stride;
  bool quantize;
  void* out;
  int64_t out_stride;
  Codes codes;
};

// A paged cache [pages, page_size, heads, D] of floats, or of int8 codes with scales [pages, page_size, heads]; the last
// dimension of `data` is contiguous.
struct KvCache {
  void* data;
  int64_t strides[3];
  float* scale;  // null: floats of `dtype`
  int64_t scale_strides[3];
  Dtype dtype;
};

struct RopeWrite {
  int64_t tokens, q_heads, kv_heads, dim, v_dim, pages, page_size;
  void* q;  // [tokens, q_heads, dim], heads contiguous, rotated in place
  int64_t q_stride;
  const void* k;  // [tokens, kv_heads, dim]
  int64_t k_stride;
  const void* v;  // [tokens, kv_heads, v_dim]
  int64_t v_stride;
  const float *cos, *sin;  // [tokens, dim / 2]
  int64_t cos_stride, sin_stride;
  const int64_t* slots;  // [tokens]
  KvCache k_cache, v_cache;
};

// Rows `ids` of a packed matrix (cpu/pack_int8.h) as floats.
struct RowsInt8 {
  int64_t count, n, k, group;
  const int64_t* ids;
  const uint8_t* codes;
  const float* scale;
  bool rotated;
  float* out;
  int64_t out_stride;
};

// All rows of a packed matrix as floats. A rotated group is at most kLongestRotation values long.
struct ExpandInt8 {
  int64_t n, k, group;
  bool rotated;
  const uint8_t* codes;
  const float* scale;
  void* out;
  int64_t out_stride;
};

// `dtype` is that of the floats; `stream` a native stream handle of `device`.
int quantize_int8(const QuantizeInt8& args, Dtype dtype, int device, void* stream);
int dequantize_int8(const DequantizeInt8& args, Dtype dtype, int device, void* stream);
int norm(const Norm& args, Dtype dtype, int device, void* stream);
int gate_mul(const GateMul& args, Dtype dtype, int device, void* stream);
int rope_write_kv_int8(const RopeWrite& args, Dtype dtype, int device, void* stream);
int rows_int8(const RowsInt8& args, int device, void* stream);
int expand(const ExpandInt8& args, Dtype dtype, int device, void* stream);

// ---- verification ----

// One number for all requests, or one each. The number is a double, whatever T is: a choice between two floats would
// become one between two addresses, and make clang put the first one into local memory.
template <class T>
struct PerRequest {
  const T* each;
  double all;
  SK_HD T operator[](int64_t b) const { return each != nullptr ? each[b] : static_cast<T>(all); }
};

struct Rows {
  const void* data;
  Dtype dtype;
  int64_t columns, stride;
};

struct Sampling {
  PerRequest<float> temperature;
  PerRequest<int32_t> top_k;
  PerRequest<float> top_p, min_p;
  const int64_t* seed;  // both null if every request is greedy
  const int64_t* position;
};

enum class Rule : int32_t { kToken = 0, kBlock = 1, kTypical = 2, kThreshold = 3 };  // of trees, kBlock: traversal

// How a call is spread over the device, and the memory that it needs. With chunks > 0 a first launch surveys all rows,
// each split into that many chunks, and the second one has a block per request. With chunks = 0 there is one launch,
// whose blocks take one request after the other and survey rows as they need them.
struct Plan {
  int32_t chunks;
  int32_t blocks;     // of the launch that judges
  int64_t workspace;  // bytes
};

struct Verify {
  int64_t requests, width, drafts;
  Rows target;
  const int64_t* draft_tokens;
  const int32_t* cu_drafts;  // null: no request has drafts (plain sampling)
  Rows draft_rows;           // data null: every draft is a point mass
  bool drafts_are_logits;
  const int32_t* draft_ids;  // or null
  const bool* draft_kind;    // or null
  Sampling sampling;
  Rule rule;
  PerRequest<float> theta;
  float eps, delta;
  Stream plain;  // what a request without a proposal draws from
  PerRequest<int32_t> plain_index;
  int64_t* tokens;        // [requests, width]
  int32_t* num_accepted;  // [requests] or null
  float* logprobs;        // [requests, width] or null
  int32_t* flags;         // [requests] or null
  const int32_t* parents;  // of a call for trees, with nodes for drafts: [drafts], inside the request, -1 = the root
  int32_t* path;           // of trees: [requests, width - 1]
  Plan plan;
  void* workspace;
};

// `chunks` < 0: as many as suit the device.
Plan plan_verify(int64_t requests, int64_t width, int64_t vocabulary, int64_t draft_columns, int chunks, int device);
Plan plan_verify_tree(int64_t requests, int64_t nodes, int64_t vocabulary, int chunks, int device);
int verify(const Verify& args, int device, void* stream);
int verify_tree(const Verify& args, int device, void* stream);

// ---- linear ----

// y = x w^T (+ bias) with w in the packed layout of specdec_kernels/int8_weight.py. x: floats, or codes with scales.
struct LinearInt8 {
  int64_t rows;
  const void* x;
  int64_t x_stride;
  PerGroup<const float> x_scale;  // of codes
  int64_t n, k, group;
  bool rotated;
  const uint8_t* codes;  // [panels][groups * steps][16][4]
  const float* scale;    // [panels][groups][16]
  const void* bias;      // or null
  Dtype bias_type;
  void* out;
  Dtype out_type;
  int64_t out_stride;
  void* workspace;
};
enum class LinearX : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kCodes = 3 };
// What multiplies: as suits the call, or that one if the device has it.
enum class LinearUnit : int32_t { kBest = -1, kDot = 0, kMatrix = 1 };

constexpr int64_t kLongestRotation = 4096;                    // a rotated group is at most this long
int64_t plan_linear(int64_t rows, int64_t k, int64_t group);  // bytes of the workspace
int linear_int8(const LinearInt8& args, LinearX type, LinearUnit unit, int device, void* stream);

int probe();  // 0 if this build can run on the current device, else why not
const char* error_name(int code);
const char* error_text(int code);

}  // namespace sk::gpu
