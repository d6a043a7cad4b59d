#include "cpu/request.h"

#include <algorithm>

#include "cpu/draw.h"

namespace sk {

Request::Memory& Request::memory() {
  thread_local Memory m;
  return m;
}

Request::Request(const VerifyCall& call, int64_t b, int threads)
    : filters(call.sampling.filters(b)),
      greedy(filters.temperature == 0.0f),
      judging(call.judging),
      call_(call),
      b_(b),
      threads_(threads),
      start_(call.cu_nodes[b]),
      count_(call.cu_nodes[b + 1] - start_) {
  if (!greedy) {
    seed_ = static_cast<uint64_t>(call.sampling.seed[b]);
    position_ = static_cast<uint64_t>(call.sampling.position[b]);
  }
  std::vector<Node>& nodes = memory_.nodes;
  if (static_cast<int64_t>(nodes.size()) < count_ + 1) nodes.resize(count_ + 1);
  for (int64_t j = kRoot; j < count_; ++j) at(j).there = j == kRoot || (token(j) >= 0 && at(parent(j)).there);
  link();
  plain_ = at(kRoot).child == kNone;
}

void Request::link() {
  for (int64_t j = kRoot; j < count_; ++j) at(j).child = kNone;
  for (int64_t j = count_ - 1; j >= 0; --j) {
    if (!at(j).there) continue;
    at(j).next = at(parent(j)).child;
    at(parent(j)).child = j;
  }
}

const std::vector<int64_t>& Request::path_to(int64_t node) {
  std::vector<int64_t>& path = memory_.path;
  path.clear();
  for (; node != kRoot; node = parent(node)) path.push_back(node);
  std::reverse(path.begin(), path.end());
  return path;
}

void Request::read(Row* row, int64_t node) {
  row->read(source(node), threads_);
  if (row->nan() || row->infinite()) flags_ |= kHardTarget;
}

void Request::weigh(Row* row, const Filters& by, Residual* left) const {
  if (!row->empty()) row->weigh(by, threads_);
  left->start(*row, threads_);
}

Residual& Request::weigh() {
  if (!greedy) weigh(&row(), filters, &left());
  return left();
}

int64_t Request::argmax(int64_t node) {
  if (call_.logprobs) {
    read(&row(), node);
    return row().empty() ? -1 : row().argmax();
  }
  bool hard;
  const int64_t best = row_argmax(source(node), threads_, &hard);
  if (hard) flags_ |= kHardTarget;
  return best;
}

bool Request::read_draft(DraftRow* q, int64_t j, const Filters& by) {
  if (q->read(call_.drafts, start_ + j, token(j), by, threads_)) return true;
  flags_ |= kBadDraft;
  return false;
}

// By the rules for hard inputs: a NaN is no candidate, nor is anything beside the first +inf.
double Request::logit(const Row& row, int64_t node, int64_t id) const {
  const float l = source(node)[id];
  const bool candidate = row.infinite() ? id == row.argmax() : l == l;
  return candidate ? l : -INFINITY;
}

void Request::emit(int64_t id, double logprob) {
  call_.tokens[b_ * call_.width + emitted_] = id;
  if (call_.logprobs) call_.logprobs[b_ * call_.width + emitted_] = static_cast<float>(logprob);
  ++emitted_;
}

void Request::accept(int64_t j, double logprob) {
  if (call_.path) call_.path[b_ * (call_.width - 1) + accepted_] = static_cast<int32_t>(j);
  ++accepted_;
  emit(token(j), logprob);
}

void Request::last(const Row& row, Residual* left) {
  if (row.empty()) return no_candidate();
  int64_t id;
  if (greedy) {
    id = row.argmax();
  } else {
    const Noise noise{seed_, position_, plain_ ? Stream::kPlain : Stream::kLast, static_cast<uint32_t>(accepted_)};
    id = draw(*left, noise);
    if (id < 0) {  // the last refusal has left nothing
      left->total();
      id = draw(*left, noise);
    }
  }
  emit(id, logprob(row, id));
}

void Request::finish() {
  call_.num_accepted[b_] = static_cast<int32_t>(accepted_);
  call_.flags[b_] = flags_;
  for (int64_t i = emitted_; i < call_.width; ++i) {
    call_.tokens[b_ * call_.width + i] = -1;
    if (call_.logprobs) call_.logprobs[b_ * call_.width + i] = NAN;
  }
  for (int64_t i = accepted_; call_.path && i < call_.width - 1; ++i) call_.path[b_ * (call_.width - 1) + i] = -1;
}

}  // namespace sk
