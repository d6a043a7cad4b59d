// Verification of drafts and sampling on the CPU; specdec_kernels/reference/ says what they compute.
#pragma once
#include <cstdint>

#include "cpu/row.h"

namespace sk {

// One number for all requests, or one each.
template <class T>
struct PerRequest {
  const T* each = nullptr;
  T all = 0;
  T operator[](int64_t b) const { return each != nullptr ? each[b] : all; }
};

struct Rows {
  const void* data;
  Dtype dtype;
  int64_t columns, stride;  // in elements

  Source operator[](int64_t i) const {
    return {static_cast<const char*>(data) + i * stride * (dtype == Dtype::kF32 ? 4 : 2), dtype, columns};
  }
};

struct Sampling {
  PerRequest<float> temperature;
  PerRequest<int32_t> top_k;
  PerRequest<float> top_p, min_p;
  const int64_t* seed;  // may be null if every request is greedy
  const int64_t* position;

  Filters filters(int64_t b) const { return {temperature[b], top_k[b], top_p[b], min_p[b]}; }
};

// The longest request's number of drafts, or -1 unless the bounds ascend from 0 to `drafts` and every id before a
// request's first -1 is in [0, vocabulary).
int64_t longest_chain(const int32_t* cu_drafts, int64_t requests, const int64_t* draft_tokens, int64_t drafts,
                      int64_t vocabulary);

// Where drafts come from.
struct Drafts {
  Rows rows;  // data null: every draft is a point mass
  bool are_logits;
  const int32_t* ids;  // the columns' ids, or null
  const bool* kind;    // which drafts are point masses all the same, or null
};

enum class Rule { kToken, kBlock, kTypical, kThreshold };  // kBlock: traversal, in a tree

struct Judging {
  Rule rule;
  PerRequest<float> theta;
  float eps, delta;
};

// Trees of drafts. The root's row is that of the request's first token, node j's the j-th after it.
struct VerifyCall {
  int64_t requests, width;
  Rows target;
  const int64_t* node_tokens;  // -1: not there, nor what is below
  const int32_t* parents;      // inside the request, -1 the root; null: each node is the child of the one before
  const int32_t* cu_nodes;
  Drafts drafts;
  Sampling sampling;
  Judging judging;
  int32_t* path;          // [requests, width - 1] or null
  int64_t* tokens;        // [requests, width]
  int32_t* num_accepted;  // [requests]
  float* logprobs;        // [requests, width] or null
  int32_t* flags;         // [requests]
};
void verify(const VerifyCall& call, int threads);

struct SampleCall {
  int64_t requests;
  Rows logits;
  Sampling sampling;
  uint32_t stream;
  PerRequest<int32_t> index;
  int64_t* tokens;  // [requests]
  float* logprobs;  // [requests] or null
};
void sample(const SampleCall& call, int threads);

}  // namespace sk
