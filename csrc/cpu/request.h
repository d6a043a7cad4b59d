// One request of a call: its tree of drafts, its rows and its outputs. What the rules of verify.cpp are written in.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/draft_row.h"
#include "cpu/residual.h"
#include "cpu/verify.h"
#include "sk/accept.h"

namespace sk {

constexpr int64_t kRoot = -1, kNone = -1;  // the node that is nobody's child, and no node

struct Node {
  int64_t child, next;  // the first child that is there, the next sibling; or kNone
  bool there;

  // What `typical` keeps of a node: whether it was reached, how deep and with which sum of log p.
  bool reached;
  int64_t depth;
  double score, logprob;

  // What `traversal` keeps: r and whether it is exact, its row, what is left of it.
  double ratio;
  bool settled, weighed;
  Row row;
  DraftRow draft;
  Residual left;
};

// The working memory is the thread's, so that a call allocates nothing once it has grown.
class Request {
 public:
  Request(const VerifyCall& call, int64_t b, int threads);

  const Filters filters;
  const bool greedy;
  const Judging& judging;
  float theta() const { return judging.theta[b_]; }
  double coin(int64_t j) const { return sk::coin(seed_, position_, static_cast<uint32_t>(j)); }

  // The tree.
  int64_t nodes() const { return count_; }
  bool is_chain() const { return call_.parents == nullptr; }
  int64_t token(int64_t j) const { return call_.node_tokens[start_ + j]; }
  int64_t parent(int64_t j) const { return is_chain() ? j - 1 : call_.parents[start_ + j]; }
  Node& at(int64_t j) { return memory_.nodes[j + 1]; }
  void link();  // finds the children of those that are there, in node order
  const std::vector<int64_t>& path_to(int64_t node);

  // Rows. Node j's is the distribution after it.
  Row& row() { return memory_.row; }  // a place for one row and what is left of it
  Residual& left() { return memory_.left; }
  Source source(int64_t node) const { return call_.target[start_ + b_ + node + 1]; }
  void read(Row* row, int64_t node);
  void weigh(Row* row, const Filters& by, Residual* left) const;  // unless it is empty; nothing is refused yet
  Residual& weigh();             // row() by the request's own filters; returns left()
  int64_t argmax(int64_t node);  // by row(), if log-probabilities are wanted
  bool read_draft(DraftRow* q, int64_t j, const Filters& by);  // false if it is unusable
  double logit(const Row& row, int64_t node, int64_t id) const;
  double logprob(const Row& row, int64_t id) const { return call_.logprobs ? row.log_softmax(id) : 0.0; }

  // Outputs.
  void accept(int64_t j, double logprob);
  void emit(int64_t id, double logprob);      // the last token
  void last(const Row& row, Residual* left);  // a greedy request's argmax, else one drawn from what is left
  void no_candidate() { flags_ |= kNoCandidate; }
  void finish();

 private:
  struct Memory {
    std::vector<Node> nodes;
    std::vector<int64_t> path;
    Row row;
    Residual left;
  };
  static Memory& memory();

  const VerifyCall& call_;
  const int64_t b_;
  const int threads_;
  const int64_t start_, count_;
  uint64_t seed_ = 0, position_ = 0;
  bool plain_ = false;  // nothing was proposed
  int64_t emitted_ = 0, accepted_ = 0;
  int32_t flags_ = 0;
  Memory& memory_ = memory();
};

}  // namespace sk
