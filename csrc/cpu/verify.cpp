// The rules of verification. A list of drafts is a tree with one branch, so there is one function per rule, and it
// reads no more than it needs: top-down rules see the rows along the accepted path and none after the last refusal.
//
//   token      recursive rejection sampling: the children of a node in order, each against what its siblings have left
//              of p (Leviathan et al. 2211.17192, Chen et al. 2302.01318; trees: Sequoia 2402.12374)
//   block      bottom-up: leaves in depth-first order (traversal verification, 2505.12398); on one branch it is block
//              verification (Sun et al. 2403.10444)
//   typical    p(x) against a bound that falls with the entropy (Medusa 2401.10774; lossy)
//   threshold  P_target/P_draft against a number (lossy)
//
// Per row: one pass for its maxima, one for the masses of groups of 64 ids (and a selection if there are filters). Only
// rows whose drafts were refused and the row that gives the last token are touched again.
#include "cpu/verify.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/draft_row.h"
#include "cpu/draw.h"
#include "cpu/entropy.h"
#include "cpu/over_requests.h"
#include "cpu/residual.h"
#include "sk/accept.h"

namespace sk {
namespace {

constexpr int64_t kRoot = -1, kNone = -1;
constexpr double kSlack = 1e-5;  // what numbers from a row's own sums may be off by

struct Node {
  int64_t child, next;  // the first child that is there, the next sibling; or kNone
  bool there;

  // What is kept of a node by `typical`: whether it was reached, how deep and with which sum of log p.
  bool reached;
  int64_t depth;
  double score, logprob;

  // By `traversal`: r, whether it is exact, and its row.
  double ratio;
  bool settled, weighed;
  Row row;
  DraftRow draft;
  Residual left;
};

// One request. The working memory is the thread's, so that a call allocates nothing once it has grown.
class Judge {
 public:
  Judge(const VerifyCall& call, int64_t b, int threads)
      : call_(call),
        b_(b),
        threads_(threads),
        start_(call.cu_nodes[b]),
        count_(call.cu_nodes[b + 1] - start_),
        filters_(call.sampling.filters(b)),
        greedy_(filters_.temperature == 0.0f) {
    if (!greedy_) {
      seed_ = static_cast<uint64_t>(call.sampling.seed[b]);
      position_ = static_cast<uint64_t>(call.sampling.position[b]);
    }
    if (static_cast<int64_t>(nodes_.size()) < count_ + 1) nodes_.resize(count_ + 1);
    for (int64_t j = kRoot; j < count_; ++j) at(j).there = j == kRoot || (token(j) >= 0 && at(parent(j)).there);
    link();
    plain_ = child(kRoot) == kNone;
  }

  void run() {
    const Rule rule = call_.judging.rule;
    if (rule == Rule::kTypical)
      typical();
    else if (rule == Rule::kThreshold)
      threshold();
    else if (greedy_)
      follow_argmax();
    else if (rule == Rule::kToken)
      recursive_rejection();
    else
      traversal();
    finish();
  }

 private:
  void follow_argmax() {
    for (int64_t node = kRoot;;) {
      int64_t best;
      if (call_.logprobs) {
        read(&row_, node);
        best = row_.empty() ? -1 : row_.argmax();
      } else {
        bool hard;
        best = row_argmax(source(node), threads_, &hard);
        if (hard) flags_ |= kHardTarget;
      }
      if (best < 0) return no_candidate();
      int64_t below = child(node);
      while (below != kNone && token(below) != best) below = at(below).next;
      if (below == kNone) return emit(best, logprob(row_, best));
      accept(below, logprob(row_, best));
      node = below;
    }
  }

  void recursive_rejection() {
    for (int64_t node = kRoot, below;; node = below) {
      read_and_weigh(&row_, node);
      left_.start(row_, threads_);
      below = kNone;
      int64_t tried = 0;
      for (int64_t j = child(node); j != kNone && below == kNone; j = at(j).next) {
        DraftRow& q = nodes_[tried].draft;
        if (!read_draft(&q, j, filters_)) continue;
        if (row_.empty()) break;
        if (left_.accepts(coin(j), q)) {
          below = j;
        } else {
          left_.refuse(q, 1.0);
          ++tried;
        }
      }
      if (below == kNone) return last(row_, &left_);
      accept(below, logprob(row_, token(below)));
    }
  }

  // r(root) = 1, r(child) = min(r(parent) p(x)/q(x), 1). The first leaf is accepted with chance r. Else it goes, and its
  // parent, with S = sum max(r p - q, 0), has p = (r p - q)+ / S and r = S/(S + 1 - r) from then on.
  void traversal() {
    for (int64_t j = kRoot; j < count_; ++j) {
      Node& n = at(j);
      if (j != kRoot) {
        const bool proposed = n.there && at(parent(j)).there;
        n.there = proposed && read_draft(&n.draft, j, filters_) && !at(parent(j)).row.empty();
        if (!n.there) continue;
      }
      read(&n.row, j);
      n.weighed = false;
    }
    link();
    at(kRoot).ratio = 1.0;
    at(kRoot).settled = true;
    int64_t node = kRoot;
    while (true) {
      for (; child(node) != kNone; node = child(node)) enter(child(node));
      if (node == kRoot || coin(node) < at(node).ratio) break;
      int64_t leaf;
      do {
        leaf = node;
        node = parent(leaf);
        at(node).child = at(leaf).next;
        // With no other child left a node is a leaf, and may be refused without S: its new r is never above the old.
      } while (node != kRoot && child(node) == kNone && coin(node) >= at(node).ratio * (1.0 + kSlack));
      refuse(leaf);
    }
    path_to(node);
    for (const int64_t j : path_) accept(j, logprob(at(parent(j)).row, token(j)));
    last(at(node).row, &left(node));
  }

  double coin(int64_t j) const { return sk::coin(seed_, position_, static_cast<uint32_t>(j)); }

  Residual& left(int64_t j) {
    Node& n = at(j);
    if (!n.weighed) {
      weigh(&n.row, filters_);
      n.left.start(n.row, threads_);
      n.weighed = true;
    }
    return n.left;
  }

  void enter(int64_t j) {
    Node& n = at(j);
    Residual& up = left(parent(j));
    const double r = at(parent(j)).ratio * up.probability(token(j)) / up.proposal(n.draft, false);
    n.ratio = std::min(r, 1.0);
    n.settled = r > 1.0 + kSlack;
  }

  // The ratio in double.
  void settle(int64_t j) {
    Node& n = at(j);
    if (n.settled) return;
    settle(parent(j));
    Residual& up = left(parent(j));
    up.total();
    n.ratio = std::min(at(parent(j)).ratio * up.probability(token(j)) / up.proposal(n.draft, true), 1.0);
    n.settled = true;
  }

  void refuse(int64_t leaf) {
    settle(parent(leaf));
    Node& n = at(parent(leaf));
    n.ratio = block_chance(left(parent(leaf)).take(at(leaf).draft, n.ratio), n.ratio);
  }

  // Nodes with p(x) > min(eps, delta e^-H) below accepted ones: the longest path, ties by sum log p, then lowest node.
  void typical() {
    const double eps = call_.judging.eps, delta = call_.judging.delta;
    at(kRoot).reached = true;
    at(kRoot).depth = 0;
    at(kRoot).score = 0.0;
    int64_t best = kRoot, node = kRoot, in_hand = kRoot;
    for (; node < count_; ++node) {
      Node& n = at(node);
      if (!n.reached) continue;
      if (n.depth > at(best).depth || (n.depth == at(best).depth && n.score > at(best).score)) best = node;
      in_hand = node;
      read_and_weigh(&row_, node);
      if (row_.empty()) continue;
      double bound = greedy_ ? delta * (1.0 + 1e-5) : NAN;
      const auto exceeds = [&](int64_t id, double share) {
        return greedy_ ? (id == row_.argmax()) > share : row_.exceeds(id, share);
      };
      for (int64_t j = n.child; j != kNone; j = at(j).next) {
        if (!exceeds(token(j), eps)) {
          if (std::isnan(bound)) bound = delta * std::exp(negative_entropy(row_));
          if (!exceeds(token(j), bound)) continue;
        }
        const bool matters = !greedy_ && call_.parents != nullptr;  // a chain's nodes have no rivals
        at(j).reached = true;
        at(j).depth = n.depth + 1;
        at(j).score = n.score + (matters ? std::log(row_.weight(token(j)) / row_.total()) : 0.0);
        at(j).logprob = logprob(row_, token(j));
      }
    }
    path_to(best);
    for (const int64_t j : path_) accept(j, at(j).logprob);
    if (in_hand != best) read_and_weigh(&row_, best);
    left_.start(row_, threads_);
    last(row_, &left_);
  }

  // Down to the child of largest target logit while it passes the filters and P_target(c)/P_draft(c_best) > theta.
  void threshold() {
    const Filters unfiltered{greedy_ ? 1.0f : filters_.temperature, 0, 1.0f, 0.0f};
    const Filters support{unfiltered.temperature, filters_.top_k, filters_.top_p, filters_.min_p};
    for (int64_t node = kRoot, below;; node = below) {
      read(&row_, node);
      below = kNone;
      double best = 0.0, top = 0.0;
      for (int64_t j = child(node); j != kNone; j = at(j).next) {
        DraftRow& q = nodes_[0].draft;
        if (!read_draft(&q, j, unfiltered)) continue;
        best = std::max(best, q.probability());
        const double l = logit(row_, node, token(j));
        if (below == kNone || l > top || (l == top && token(j) < token(below))) {
          below = j;
          top = l;
        }
      }
      if (row_.empty()) return no_candidate();
      if (below != kNone) {
        weigh(&row_, unfiltered);
        const bool enough = row_.exceeds(token(below), call_.judging.theta[b_] * best);
        weigh(&row_, support);
        if (!enough || row_.weight(token(below)) == 0.0) below = kNone;
      } else if (!greedy_) {
        weigh(&row_, support);
      }
      if (below == kNone) {
        left_.start(row_, threads_);
        return last(row_, &left_);
      }
      accept(below, logprob(row_, token(below)));
    }
  }

  // -- the tree

  Node& at(int64_t j) { return nodes_[j + 1]; }
  int64_t child(int64_t j) { return at(j).child; }
  int64_t token(int64_t j) const { return call_.node_tokens[start_ + j]; }
  int64_t parent(int64_t j) const { return call_.parents ? call_.parents[start_ + j] : j - 1; }

  void link() {  // children in node order
    for (int64_t j = kRoot; j < count_; ++j) {
      at(j).child = kNone;
      at(j).reached = false;
    }
    for (int64_t j = count_ - 1; j >= 0; --j) {
      if (!at(j).there) continue;
      at(j).next = child(parent(j));
      at(parent(j)).child = j;
    }
  }

  void path_to(int64_t node) {
    path_.clear();
    for (; node != kRoot; node = parent(node)) path_.push_back(node);
    std::reverse(path_.begin(), path_.end());
  }

  // -- rows

  Source source(int64_t node) const { return call_.target[start_ + b_ + node + 1]; }

  void read(Row* row, int64_t node) {
    row->read(source(node), threads_);
    if (row->nan() || row->infinite()) flags_ |= kHardTarget;
  }

  void weigh(Row* row, const Filters& filters) {
    if (!row->empty()) row->weigh(filters, threads_);
  }

  void read_and_weigh(Row* row, int64_t node) {
    read(row, node);
    if (!greedy_) weigh(row, filters_);
  }

  bool read_draft(DraftRow* q, int64_t j, const Filters& filters) {
    if (q->read(call_.drafts, start_ + j, token(j), filters, threads_)) return true;
    flags_ |= kBadDraft;
    return false;
  }

  double logit(const Row& row, int64_t node, int64_t id) const {  // by the rules for hard inputs
    const float l = source(node)[id];
    const bool candidate = row.infinite() ? id == row.argmax() : l == l;
    return candidate ? l : -INFINITY;
  }

  double logprob(const Row& row, int64_t id) const { return call_.logprobs ? row.log_softmax(id) : 0.0; }

  // -- outputs

  void emit(int64_t id, double logprob) {
    call_.tokens[b_ * call_.width + emitted_] = id;
    if (call_.logprobs) call_.logprobs[b_ * call_.width + emitted_] = static_cast<float>(logprob);
    ++emitted_;
  }

  void accept(int64_t j, double logprob) {
    if (call_.path) call_.path[b_ * (call_.width - 1) + accepted_] = static_cast<int32_t>(j);
    ++accepted_;
    emit(token(j), logprob);
  }

  void no_candidate() { flags_ |= kNoCandidate; }

  // The last token: a greedy request's argmax, else one drawn from what is left of the row.
  void last(const Row& row, Residual* left) {
    if (row.empty()) return no_candidate();
    int64_t id;
    if (greedy_) {
      id = row.argmax();
    } else {
      const Noise noise{seed_, position_, plain_ ? Stream::kPlain : Stream::kLast, static_cast<uint32_t>(accepted_)};
      id = draw(*left, noise);
      if (id < 0) {
        left->total();
        id = draw(*left, noise);
      }
    }
    emit(id, logprob(row, id));
  }

  void finish() {
    call_.num_accepted[b_] = static_cast<int32_t>(accepted_);
    call_.flags[b_] = flags_;
    for (int64_t i = emitted_; i < call_.width; ++i) {
      call_.tokens[b_ * call_.width + i] = -1;
      if (call_.logprobs) call_.logprobs[b_ * call_.width + i] = NAN;
    }
    for (int64_t i = accepted_; call_.path && i < call_.width - 1; ++i) call_.path[b_ * (call_.width - 1) + i] = -1;
  }

  const VerifyCall& call_;
  const int64_t b_;
  const int threads_;
  const int64_t start_, count_;
  const Filters filters_;
  const bool greedy_;
  uint64_t seed_ = 0, position_ = 0;
  bool plain_ = false;
  int64_t emitted_ = 0, accepted_ = 0;
  int32_t flags_ = 0;

  struct Memory {
    std::vector<Node> nodes;
    std::vector<int64_t> path;
    Row row;
    Residual left;
  };
  static Memory& memory() {
    thread_local Memory m;
    return m;
  }
  std::vector<Node>& nodes_ = memory().nodes;
  std::vector<int64_t>& path_ = memory().path;
  Row& row_ = memory().row;
  Residual& left_ = memory().left;
};

}  // namespace

int64_t longest_chain(const int32_t* cu_drafts, int64_t requests, const int64_t* draft_tokens, int64_t drafts,
                      int64_t vocabulary) {
  if (cu_drafts[0] != 0 || cu_drafts[requests] != drafts) return -1;
  int64_t longest = 0;
  for (int64_t b = 0; b < requests; ++b) {
    const int64_t start = cu_drafts[b], stop = cu_drafts[b + 1];
    if (stop < start || stop > drafts) return -1;
    longest = std::max(longest, stop - start);
    for (int64_t i = start; i < stop && draft_tokens[i] != -1; ++i)
      if (draft_tokens[i] < 0 || draft_tokens[i] >= vocabulary) return -1;
  }
  return longest;
}

void verify(const VerifyCall& call, int threads) {
  over_requests(threads, call.requests, call.target.columns, [&](int64_t b, int t) { Judge(call, b, t).run(); });
}

}  // namespace sk
