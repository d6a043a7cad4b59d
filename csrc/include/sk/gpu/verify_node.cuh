// The nodes of a draft tree in the workspace, and what their refused children leave of p.
//
// Nothing of the size of the vocabulary is kept: a node's current P is its target row's p put through one step per
// refused child, P <- max(r*P - scale*q, 0)/norm, evaluated for the ids that somebody asks for.
#pragma once
#include "sk/gpu/verify_request.cuh"

namespace sk::gpu {

constexpr int32_t kRoot = -1, kNone = -2;

enum class Mark : int32_t { kAbsent, kPresent, kTaken };  // taken: traversal has it in its tree

struct Node {
  Row row;         // its target row, once that was looked at
  double log_sum;  // of that row, if log-probabilities are wanted
  double ratio;    // traversal: r, negative as long as it is unknown
  double score;    // typical: sum log p down to it; NaN: not accepted
  // As a child that was refused: its step, the next one's, and how q was brought back to a sum of 1.
  double r, scale, norm;
  int32_t next;
  // As a parent: its refused children in their order.
  int32_t first, last;
  int32_t depth;
  Mark mark;
};

// One request's nodes, -1 = the root.
struct Nodes {
  const Verify& call;
  Node* root;
  int64_t start, count;

  __device__ Node& operator[](int64_t j) const { return root[1 + j]; }
  __device__ int64_t token(int64_t j) const { return call.draft_tokens[start + j]; }
  __device__ int32_t parent(int64_t j) const { return call.parents[start + j]; }
  __device__ Source draft_row(int64_t j) const { return row_of(call.draft_rows, start + j); }
  __device__ bool points() const { return call.draft_rows.data == nullptr; }

  // The first node behind `j` for which `wanted` holds; count if there is none. With all threads of the block.
  template <class F>
  __device__ int64_t next(int64_t j, const F& wanted) const {
    int64_t found = count;
    for (int64_t i = j + 1 + static_cast<int64_t>(threadIdx.x); i < count; i += kWideBlock)
      if (wanted(i)) {
        found = i;
        break;
      }
    return WideBlock::reduce(found, Min());
  }
  __device__ int64_t next_child(int64_t parent_node, int64_t j, Mark mark) const {
    return next(j, [&](int64_t i) { return parent(i) == parent_node && (*this)[i].mark == mark; });
  }

  // P(id) of a node whose target row is `row`.
  __device__ double left(const Row& row, int64_t node, int64_t id) const {
    double p = row.probability(id);
    bool removed = false;
    for (int32_t k = (*this)[node].first; k != kNone; k = (*this)[k].next) {
      const Node& refused = (*this)[k];
      const bool same = token(k) == id;
      if (refused.norm > 0.0) {  // else it would have left nothing, and P stayed
        const double q = removed ? 0.0 : points() ? static_cast<double>(same) : refused.scale * draft_row(k)[id];
        p = fmax(refused.r * p - q, 0.0) / refused.norm;
      }
      removed |= same;
    }
    return p;
  }
  // P(id) <= most(...) * row.weight(id).
  __device__ double most(const Row& row, int64_t node) const {
    double factor = 1.0 / row.total;
    for (int32_t k = (*this)[node].first; k != kNone; k = (*this)[k].next)
      if ((*this)[k].norm > 0.0) factor *= (*this)[k].r / (*this)[k].norm;
    return factor;
  }

  // The sum of node j's draft row without what its refused siblings have taken; negative if the row is unusable.
  __device__ double weigh_draft(int64_t j) const {
    if (points()) return 1.0;
    const Source row = draft_row(j);
    const int32_t refused = (*this)[parent(j)].first;
    double sum = 0.0;
    int bad = 0;
    const int64_t step = kWideBlock * kQuad;
    for (int64_t base = threadIdx.x * kQuad; base < row.size; base += kAhead * step) {
      Quad quads[kAhead];
      row.quads(base, step, 0.0f, quads);
#pragma unroll
      for (int k = 0; k < kAhead; ++k)
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          const float q = quads[k].v[i];
          bad |= !(q >= 0.0f && q < INFINITY);
          bool removed = false;
          for (int32_t s = refused; s != kNone; s = (*this)[s].next) removed |= token(s) == base + k * step + i;
          sum += removed ? 0.0f : q;
        }
    }
    sum = WideBlock::reduce(sum, Sum());
    return WideBlock::reduce(bad, Max()) != 0 || !(row[token(j)] > 0.0f) ? -1.0 : sum;
  }
};

// Whether the nodes are no tree: parents not before their children, ids out of range, equal siblings, too deep. Sets
// mark and depth of all nodes. No index is formed from a parent before it was checked.
__device__ inline bool is_no_tree(const Nodes& nodes, int64_t most_depth) {
  int bad = 0;
  for (int64_t j = static_cast<int64_t>(threadIdx.x) - 1; j < nodes.count; j += kWideBlock) {
    int32_t depth = 0;
    bool sound = true, hidden = false;  // below an absent node
    for (int64_t i = j; i != kRoot && sound; ++depth) {
      const int32_t parent = nodes.parent(i);
      sound = parent >= kRoot && parent < i;
      if (i != j) hidden |= nodes.token(i) == -1;
      i = parent;
    }
    bad |= !sound || depth > most_depth;
    const bool present = j == kRoot || (!hidden && nodes.token(j) != -1);
    if (sound && present && j != kRoot) {
      bad |= nodes.token(j) < 0 || nodes.token(j) >= nodes.call.target.columns;
      for (int64_t i = nodes.parent(j) + 1; i < j; ++i)
        bad |= nodes.parent(i) == nodes.parent(j) && nodes.token(i) == nodes.token(j);
    }
    Node& node = nodes[j];
    node.mark = present ? Mark::kPresent : Mark::kAbsent;
    node.depth = depth;
    node.first = node.last = node.next = kNone;
    node.ratio = j == kRoot ? 1.0 : -1.0;
    node.score = j == kRoot ? 0.0 : NAN;
  }
  return WideBlock::reduce(bad, Max()) != 0;
}

}  // namespace sk::gpu
