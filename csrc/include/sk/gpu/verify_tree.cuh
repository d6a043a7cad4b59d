// verify_tree on the GPU: one block walks the tree of one request. The rules are those of
// specdec_kernels/reference/verify_tree.py.
//
// A walk looks at one target row at a time; `step` says which one is next. Traversal first looks at the rows of all its
// nodes, and then goes from leaf to leaf on the numbers that it kept of them.
#pragma once
#include "sk/gpu/verify_draw.cuh"
#include "sk/gpu/verify_node.cuh"

namespace sk::gpu {

// What the block keeps in shared memory.
struct TreeDesk {
  Request request;
  Row target;
  Histogram histogram;
  Finishes finishes;
};

// Request b of a call for trees. With all threads of the block.
__device__ inline Request tree_request_of(const Verify& call, int64_t b) {
  Request r = parameters_of(call, b);
  const int64_t start = call.cu_drafts[b], stop = call.cu_drafts[b + 1];
  int64_t before = 0;  // a workspace of its own: no node belongs to an earlier request, too
  for (int64_t i = threadIdx.x; i <= b; i += kWideBlock) before = Max()(before, static_cast<int64_t>(call.cu_drafts[i]));
  before = WideBlock::reduce(before, Max());
  r.bad |= !bounds_are_sound(call, b, start, stop) || before > start;
  if (r.bad) return r;
  r.start = start;
  r.proposed = stop - start;
  return r;
}

struct TreeSlots {
  Group* surveys;
  int64_t groups;
  Node* nodes;

  __device__ explicit TreeSlots(const Verify& call)
      : surveys(static_cast<Group*>(call.workspace)), groups((call.target.columns + kGroup - 1) / kGroup) {
    const int64_t slots = call.plan.chunks > 0 ? call.drafts + call.requests : call.plan.blocks;
    nodes = reinterpret_cast<Node*>(surveys + slots * groups);
  }
};

class Tree {
 public:
  __device__ Tree(const Verify& call, int64_t b, TreeDesk& desk)
      : call_(call),
        desk_(desk),
        r_(desk.request),
        target_(desk.target),
        nodes_{call, nullptr, 0, 0} {
    const Request request = tree_request_of(call, b);
    __syncthreads();  // the block may still be at the request before
    if (threadIdx.x == 0) desk.request = request;
    __syncthreads();
    nodes_.start = r_.start;
    nodes_.count = r_.bad ? 0 : r_.proposed;
    nodes_.root = TreeSlots(call).nodes + (r_.start + b);
  }

  __device__ void run() {
    int64_t accepted = 0, emitted = 0;
    if (r_.bad || is_no_tree(nodes_, call_.width - 1)) {
      flags_ = kBadValue;
    } else {
      __syncthreads();  // is_no_tree wrote the nodes
      do look();
      while (step());
      accepted = nodes_[node_].depth;
      emitted = accepted + finish();
    }
    if (threadIdx.x != 0) return;
    int64_t* const tokens = call_.tokens + r_.b * call_.width;
    float* const logprobs = call_.logprobs == nullptr ? nullptr : call_.logprobs + r_.b * call_.width;
    int32_t* const path = call_.path + r_.b * (call_.width - 1);
    for (int64_t i = emitted; i < call_.width; ++i) {
      tokens[i] = -1;
      if (logprobs != nullptr) logprobs[i] = NAN;
    }
    for (int64_t i = accepted; i < call_.width - 1; ++i) path[i] = -1;
    int64_t j = node_;
    for (int64_t i = accepted; i-- > 0; j = nodes_.parent(j)) {
      path[i] = static_cast<int32_t>(j);
      tokens[i] = nodes_.token(j);
      if (logprobs != nullptr) {
        const Node& parent = nodes_[nodes_.parent(j)];
        logprobs[i] = parent.row.log_softmax(nodes_.token(j), parent.log_sum);
      }
    }
    call_.num_accepted[r_.b] = static_cast<int32_t>(accepted);
    call_.flags[r_.b] = flags_;
  }

 private:
  // Puts node_'s target row on the desk.
  __device__ void look() {
    const TreeSlots slots(call_);
    const int64_t row = r_.start + r_.b + 1 + node_;
    const Source source = row_of(call_.target, row);
    Group* const groups = slots.surveys + (call_.plan.chunks > 0 ? row : blockIdx.x) * slots.groups;
    if (call_.plan.chunks == 0) {
      survey(source, target_look(call_, r_), 0, source.groups(), groups);
      __syncthreads();
    }
    desk_.target.read(source, groups, true, r_.greedy());
    const float temperature = temperature_of(call_, r_);
    const Filters& f = r_.filters;
    if (!target_.empty() && temperature > 0.0f)
      desk_.target.weigh({temperature, f.top_k, f.top_p, f.min_p}, desk_.histogram);
    if (target_.hard()) flags_ |= kHardTarget;
    const double log_sum = call_.logprobs != nullptr && !target_.empty() ? target_.log_sum() : 0.0;
    if (threadIdx.x == 0) {
      nodes_[node_].row = target_;
      nodes_[node_].log_sum = log_sum;
    }
    __syncthreads();
  }

  // Decides what the row on the desk is there for. True: node_ has moved, its row is the next to look at; false: the
  // last token comes from this one.
  __device__ bool step() {
    if (call_.rule == Rule::kTypical) return step_of_typical();
    if (call_.rule == Rule::kThreshold) return step_of_threshold();
    if (r_.greedy()) return step_of_argmax();
    return call_.rule == Rule::kToken ? step_of_token() : step_of_traversal();
  }

  __device__ bool go(int64_t node) {
    node_ = node;
    return true;
  }

  __device__ bool step_of_argmax() {
    if (target_.empty()) return false;
    const int64_t best = target_.best, node = node_;
    const int64_t j = nodes_.next(node, [&](int64_t i) {
      return nodes_.parent(i) == node && nodes_[i].mark == Mark::kPresent && nodes_.token(i) == best;
    });
    return j < nodes_.count && go(j);
  }

  // Recursive rejection sampling: the children are tried in order, each against what its siblings left of p.
  __device__ bool step_of_token() {
    for (int64_t j = node_; (j = nodes_.next_child(node_, j, Mark::kPresent)) < nodes_.count;) {
      const double sum = nodes_.weigh_draft(j);
      if (sum < 0.0) {
        flags_ |= kBadDraft;
        continue;
      }
      if (target_.empty()) return false;
      const double scale = scale_of(j, sum), p = nodes_.left(target_, node_, nodes_.token(j));
      if (accept_token(r_.seed, r_.position, static_cast<uint32_t>(j), chance_of(j, scale), p)) return go(j);
      refuse(target_, j, scale, 1.0);
    }
    return false;
  }

  // What brings node j's q back to a sum of 1: as given until a sibling was taken out of it.
  __device__ double scale_of(int64_t j, double sum) const {
    return nodes_.points() || nodes_[nodes_.parent(j)].first == kNone ? 1.0 : 1.0 / sum;
  }
  __device__ double chance_of(int64_t j, double scale) const {
    return nodes_.points() ? 1.0 : scale * nodes_.draft_row(j)[nodes_.token(j)];
  }

  // Takes the refused child j out of its parent's P; returns S = sum max(r P - q, 0), by which that is divided.
  __device__ double refuse(const Row& row, int64_t j, double scale, double r) {
    const int64_t parent = nodes_.parent(j), x = nodes_.token(j);
    double s = 0.0;
    if (nodes_.points()) {
      s = fmax(r * (1.0 - nodes_.left(row, parent, x)), 0.0);
    } else {
      const Source q = nodes_.draft_row(j);
      for (int64_t v = threadIdx.x; v < row.source.size; v += kWideBlock) {
        const double p = nodes_.left(row, parent, v);
        if (p > 0.0) s += fmax(r * p - (is_removed(parent, v) ? 0.0 : scale * q[v]), 0.0);
      }
      s = WideBlock::reduce(s, Sum());
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Node &node = nodes_[j], &above = nodes_[parent];
      node.r = r;
      node.scale = scale;
      node.norm = s;
      if (above.first == kNone)
        above.first = static_cast<int32_t>(j);
      else
        nodes_[above.last].next = static_cast<int32_t>(j);
      above.last = static_cast<int32_t>(j);
    }
    __syncthreads();
    return s;
  }

  __device__ bool is_removed(int64_t parent, int64_t id) const {
    for (int32_t k = nodes_[parent].first; k != kNone; k = nodes_[k].next)
      if (nodes_.token(k) == id) return true;
    return false;
  }

  // Bottom-up: first the rows of all nodes that take part, then from leaf to leaf.
  __device__ bool step_of_traversal() {
    if (last_) return false;
    for (int64_t j = node_;;) {
      j = nodes_.next(j, [&](int64_t i) {
        const int32_t parent = nodes_.parent(i);
        return nodes_[i].mark == Mark::kPresent && (parent == kRoot || nodes_[parent].mark == Mark::kTaken);
      });
      if (j == nodes_.count) break;
      if (nodes_.weigh_draft(j) < 0.0) {
        flags_ |= kBadDraft;
      } else if (!nodes_[nodes_.parent(j)].row.empty()) {
        if (threadIdx.x == 0) nodes_[j].mark = Mark::kTaken;
        __syncthreads();
        return go(j);
      }
    }
    last_ = true;
    const int64_t on_desk = node_;
    node_ = traverse();
    return node_ != on_desk;
  }

  __device__ int64_t traverse() {
    for (;;) {
      int64_t leaf = kRoot;
      for (;;) {
        // A child that was refused is the last one of its parent's list; the first one behind it is the next.
        const int32_t refused = nodes_[leaf].last;
        const int64_t j = nodes_.next_child(leaf, refused == kNone ? leaf : refused, Mark::kTaken);
        if (j == nodes_.count) break;
        if (nodes_[j].ratio < 0.0) {
          const double scale = scale_of(j, nodes_.weigh_draft(j));
          const double p = nodes_.left(nodes_[leaf].row, leaf, nodes_.token(j));
          const double ratio = fmin(nodes_[leaf].ratio * p / chance_of(j, scale), 1.0);
          __syncthreads();
          if (threadIdx.x == 0) {
            nodes_[j].ratio = ratio;
            nodes_[j].scale = scale;
          }
          __syncthreads();
        }
        leaf = j;
      }
      if (leaf == kRoot) return leaf;
      if (coin(r_.seed, r_.position, static_cast<uint32_t>(leaf)) < nodes_[leaf].ratio) return leaf;
      const int64_t parent = nodes_.parent(leaf);
      const double r = nodes_[parent].ratio, s = refuse(nodes_[parent].row, leaf, nodes_[leaf].scale, r);
      if (threadIdx.x == 0) nodes_[parent].ratio = block_chance(s, r);
      __syncthreads();
    }
  }

  // Top-down through all accepted nodes, in their order; then back to the end of the longest path.
  __device__ bool step_of_typical() {
    if (last_) return false;
    if (!target_.empty()) {
      for (int64_t j = node_; (j = nodes_.next_child(node_, j, Mark::kPresent)) < nodes_.count;) {
        if (!is_typical(call_, r_, target_, nodes_.token(j))) continue;
        const double score = nodes_[node_].score + log(probability_of(r_, target_, nodes_.token(j)));
        if (threadIdx.x == 0) nodes_[j].score = score;
      }
      __syncthreads();
    }
    const int64_t j = nodes_.next(node_, [&](int64_t i) { return nodes_[i].score == nodes_[i].score; });
    if (j < nodes_.count) return go(j);
    last_ = true;
    const int64_t on_desk = node_;
    int64_t best = kRoot;
    for (int64_t i = 0; i < nodes_.count; ++i) {
      const Node &node = nodes_[i], &champion = nodes_[best];
      if (node.score != node.score || node.depth < champion.depth) continue;
      if (node.depth > champion.depth || node.score > champion.score) best = i;
    }
    node_ = best;
    return node_ != on_desk;
  }

  // Down to the child of the largest target logit.
  __device__ bool step_of_threshold() {
    int64_t c = kRoot;
    double most = 0.0;
    for (int64_t j = node_; (j = nodes_.next_child(node_, j, Mark::kPresent)) < nodes_.count;) {
      if (nodes_.weigh_draft(j) < 0.0) {
        flags_ |= kBadDraft;
        continue;
      }
      most = fmax(most, chance_of(j, 1.0));
      if (c == kRoot || is_before(j, c)) c = j;
    }
    if (c == kRoot || target_.empty()) return false;
    return is_above(r_, target_, nodes_.token(c), most) && go(c);
  }

  __device__ bool is_before(int64_t a, int64_t b) const {
    const int64_t x = nodes_.token(a), y = nodes_.token(b);
    const float l = target_.logit(x), m = target_.logit(y);
    return l > m || (l == m && x < y);
  }

  // Emits the last token; returns how many that were.
  __device__ int64_t finish() {
    if (target_.empty()) {
      flags_ |= kNoCandidate;
      return 0;
    }
    const int64_t depth = nodes_[node_].depth;
    const bool plain = nodes_.next_child(kRoot, kRoot, Mark::kPresent) == nodes_.count &&
                       nodes_.next_child(kRoot, kRoot, Mark::kTaken) == nodes_.count;
    const Noise noise{r_.seed, r_.position, plain ? Stream::kPlain : Stream::kLast, static_cast<uint32_t>(depth)};
    const int64_t id = r_.greedy() ? target_.best
                                   : draw(desk_.finishes, target_, nodes_.most(target_, node_), noise,
                                          [&](int64_t v) { return nodes_.left(target_, node_, v); });
    if (id < 0) {  // can't be: P has a candidate
      flags_ |= kNoCandidate;
      return 0;
    }
    if (threadIdx.x == 0) {
      const int64_t at = r_.b * call_.width + depth;
      call_.tokens[at] = id;
      if (call_.logprobs != nullptr) call_.logprobs[at] = target_.log_softmax(id, nodes_[node_].log_sum);
    }
    return 1;
  }

  const Verify& call_;
  TreeDesk& desk_;
  const Request& r_;
  const Row& target_;
  Nodes nodes_;
  int64_t node_ = kRoot;  // whose row is on the desk
  bool last_ = false;
  int32_t flags_ = 0;
};

// First launch where a call has chunks: one block per chunk of a target row.
__global__ void __launch_bounds__(kWideBlock) verify_tree_survey_kernel(const Verify call) {
  const int64_t row = blockIdx.x / call.plan.chunks, chunk = blockIdx.x % call.plan.chunks;
  int64_t b = call.requests;  // the first request whose row it is; a later one, with bad bounds, is not served
  for (int64_t i = threadIdx.x; i < b; i += kWideBlock)
    if (call.cu_drafts[i] + i <= row && row <= call.cu_drafts[i + 1] + i) b = i;
  b = WideBlock::reduce(b, Min());
  if (b == call.requests) return;
  const Request r = tree_request_of(call, b);
  if (r.bad) return;
  const int64_t node = row - (r.start + b) - 1;
  if (node >= 0 && call.draft_tokens[r.start + node] == -1) return;  // absent
  const TreeSlots slots(call);
  const int64_t each = (slots.groups + call.plan.chunks - 1) / call.plan.chunks;
  const int64_t begin = chunk * each, end = Min()(begin + each, slots.groups);
  survey(row_of(call.target, row), target_look(call, r), begin, end, slots.surveys + row * slots.groups);
}

__global__ void __launch_bounds__(kWideBlock, 1) verify_tree_kernel(const Verify call) {
  SK_SHARED(TreeDesk, desk, 1);
  for (int64_t b = blockIdx.x; b < call.requests; b += gridDim.x) Tree(call, b, *desk).run();
}

}  // namespace sk::gpu
