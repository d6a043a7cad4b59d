// The rules of verification. A list of drafts is a tree with one branch, so there is one function per rule, and it
// reads no more than it needs: top-down rules see the rows along the accepted path and none after the last refusal.
//
// Rows answer by bounds, and are evaluated as far as a decision takes (row.h); what refusals leave of them is
// residual.h's business.
#include "cpu/verify.h"

#include <algorithm>
#include <cmath>

#include "cpu/entropy.h"
#include "cpu/over_requests.h"
#include "cpu/request.h"

namespace sk {
namespace {

void follow_argmax(Request& r) {
  for (int64_t node = kRoot;;) {
    const int64_t best = r.argmax(node);
    if (best < 0) return r.no_candidate();
    int64_t below = r.at(node).child;
    while (below != kNone && r.token(below) != best) below = r.at(below).next;
    if (below == kNone) return r.emit(best, r.logprob(r.row(), best));
    r.accept(below, r.logprob(r.row(), best));
    node = below;
  }
}

// Recursive rejection sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318; trees: Sequoia 2402.12374): the
// children of a node in order, each against what its siblings have left of p.
void token(Request& r) {
  if (r.greedy) return follow_argmax(r);
  for (int64_t node = kRoot, below;; node = below) {
    r.read(&r.row(), node);
    Residual& left = r.weigh();
    below = kNone;
    int64_t refused = 0;
    for (int64_t j = r.at(node).child; j != kNone && below == kNone; j = r.at(j).next) {
      DraftRow& q = r.at(refused).draft;  // a place for it
      if (!r.read_draft(&q, j, r.filters)) continue;
      if (r.row().empty()) break;
      if (left.accepts(r.coin(j), q)) {
        below = j;
      } else {
        left.refuse(q, 1.0);
        ++refused;
      }
    }
    if (below == kNone) return r.last(r.row(), &left);
    r.accept(below, r.logprob(r.row(), r.token(below)));
  }
}

// Traversal verification (2505.12398), bottom-up; on one branch it is block verification (Sun et al. 2403.10444).
//
// r(root) = 1, r(child) = min(r(parent) p(x)/q(x), 1). Leaves are tried in depth-first order. One is accepted with
// chance r, and its path with it; else it goes, and its parent, with S = sum max(r p - q, 0), has p = (r p - q)+ / S
// and r = S/(S + 1 - r) from then on. The root is always accepted.
class Traversal {
 public:
  explicit Traversal(Request& request) : r_(request) {}

  void run() {
    read();
    r_.at(kRoot).ratio = 1.0;
    r_.at(kRoot).settled = true;
    int64_t node = kRoot;
    while (true) {
      for (int64_t below; (below = r_.at(node).child) != kNone; node = below) enter(below);
      if (node == kRoot || r_.coin(node) < r_.at(node).ratio) break;
      int64_t leaf;
      do {
        leaf = node;
        node = r_.parent(leaf);
        r_.at(node).child = r_.at(leaf).next;
        // Now without children, a node whose coin is above its r needs no S: its next r is no larger.
      } while (node != kRoot && r_.at(node).child == kNone && r_.coin(node) >= r_.at(node).ratio * (1.0 + kSlack));
      refuse(leaf);
    }
    for (const int64_t j : r_.path_to(node)) r_.accept(j, r_.logprob(r_.at(r_.parent(j)).row, r_.token(j)));
    r_.last(r_.at(node).row, &left(node));
  }

 private:
  static constexpr double kSlack = 1e-5;  // more than what an r from a row's own sums is off by
  static constexpr double kClear = 0.9;   // up to here its 1 - r is good enough, too

  // Reads every row that is not below an unusable draft or a row without candidates.
  void read() {
    for (int64_t j = kRoot; j < r_.nodes(); ++j) {
      Node& n = r_.at(j);
      if (j != kRoot) {
        const Node& up = r_.at(r_.parent(j));
        n.there = n.there && up.there && r_.read_draft(&n.draft, j, r_.filters) && !up.row.empty();
        if (!n.there) continue;
      }
      r_.read(&n.row, j);
      n.weighed = false;
    }
    r_.link();
  }

  Residual& left(int64_t j) {
    Node& n = r_.at(j);
    if (!n.weighed) r_.weigh(&n.row, r_.filters, &n.left);
    n.weighed = true;
    return n.left;
  }

  void enter(int64_t j) {
    Node& n = r_.at(j);
    Residual& up = left(r_.parent(j));
    const double ratio = r_.at(r_.parent(j)).ratio * up.probability(r_.token(j)) / up.proposal(n.draft, false);
    n.ratio = std::min(ratio, 1.0);
    n.settled = ratio > 1.0 + kSlack || ratio < kClear;
  }

  // The same in double, where 1 - r is small.
  void settle(int64_t j) {
    Node& n = r_.at(j);
    if (n.settled) return;
    settle(r_.parent(j));
    Residual& up = left(r_.parent(j));
    up.total();
    const double ratio = r_.at(r_.parent(j)).ratio * up.probability(r_.token(j)) / up.proposal(n.draft, true);
    n.ratio = std::min(ratio, 1.0);
    n.settled = true;
  }

  void refuse(int64_t leaf) {
    const int64_t up = r_.parent(leaf);
    settle(up);
    Node& n = r_.at(up);
    n.ratio = block_chance(left(up).take(r_.at(leaf).draft, n.ratio), n.ratio);
  }

  Request& r_;
};

void traversal(Request& r) { r.greedy ? follow_argmax(r) : Traversal(r).run(); }

// Nodes with p(x) > min(eps, delta e^-H) below accepted ones (Medusa 2401.10774; lossy): the longest path, ties by
// sum log p, then the lowest node.
void typical(Request& r) {
  const double eps = r.judging.eps, delta = r.judging.delta;
  Row& row = r.row();
  for (int64_t j = 0; j < r.nodes(); ++j) r.at(j).reached = false;
  r.at(kRoot).reached = true;
  r.at(kRoot).depth = 0;
  r.at(kRoot).score = 0.0;
  int64_t best = kRoot, in_hand = kRoot;
  for (int64_t node = kRoot; node < r.nodes(); ++node) {
    const Node& n = r.at(node);
    if (!n.reached) continue;
    if (n.depth > r.at(best).depth || (n.depth == r.at(best).depth && n.score > r.at(best).score)) best = node;
    r.read(&row, in_hand = node);
    r.weigh();
    if (row.empty()) continue;
    double bound = r.greedy ? delta * (1.0 + 1e-5) : NAN;  // of one certain token H = -log(1 + 1e-5)
    const auto exceeds = [&](int64_t id, double share) {
      return r.greedy ? (id == row.argmax()) > share : row.exceeds(id, share);
    };
    for (int64_t j = n.child; j != kNone; j = r.at(j).next) {
      const int64_t id = r.token(j);
      if (!exceeds(id, eps)) {
        if (std::isnan(bound)) bound = delta * std::exp(negative_entropy(row));
        if (!exceeds(id, bound)) continue;
      }
      Node& below = r.at(j);
      below.reached = true;
      below.depth = n.depth + 1;
      below.score = n.score;
      if (!r.greedy && !r.is_chain()) below.score += std::log(row.weight(id) / row.total());  // a chain has no ties
      below.logprob = r.logprob(row, id);
    }
  }
  for (const int64_t j : r.path_to(best)) r.accept(j, r.at(j).logprob);
  if (in_hand != best) {
    r.read(&row, best);
    r.weigh();
  }
  r.last(row, &r.left());
}

// Down to the child c of largest target logit while it passes the filters and P_target(c)/P_draft(c_best) > theta,
// c_best the child of largest P_draft (lossy). P is before filters; a greedy request's and its filters are at T = 1.
void threshold(Request& r) {
  const Filters& f = r.filters;
  const Filters before{r.greedy ? 1.0f : f.temperature, 0, 1.0f, 0.0f};
  const Filters support{before.temperature, f.top_k, f.top_p, f.min_p};
  Row& row = r.row();
  for (int64_t node = kRoot, below;; node = below) {
    r.read(&row, node);
    below = kNone;
    double best = 0.0, top = 0.0;
    for (int64_t j = r.at(node).child; j != kNone; j = r.at(j).next) {
      DraftRow& q = r.at(kRoot).draft;  // a place for it
      if (!r.read_draft(&q, j, before)) continue;
      best = std::max(best, q.probability());
      const double l = r.logit(row, node, r.token(j));
      if (below == kNone || l > top || (l == top && r.token(j) < r.token(below))) {
        below = j;
        top = l;
      }
    }
    if (row.empty()) return r.no_candidate();
    if (below != kNone) {
      const int64_t id = r.token(below);
      r.weigh(&row, before, &r.left());
      const bool enough = row.exceeds(id, r.theta() * best);
      r.weigh(&row, support, &r.left());
      if (!enough || row.weight(id) == 0.0) below = kNone;
    } else {
      r.weigh();
    }
    if (below == kNone) return r.last(row, &r.left());
    r.accept(below, r.logprob(row, r.token(below)));
  }
}

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
  constexpr void (*kRules[])(Request&) = {token, traversal, typical, threshold};
  over_requests(threads, call.requests, call.target.columns, [&](int64_t b, int t) {
    Request request(call, b, t);
    kRules[static_cast<int>(call.judging.rule)](request);
    request.finish();
  });
}

}  // namespace sk
