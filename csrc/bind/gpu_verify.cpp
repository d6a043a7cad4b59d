// Bindings of verification and sampling.
#include <tuple>
#include <utility>

#include "bind/gpu.h"

namespace sk::gpu::bind {
namespace {

// (address, 0) of one number per request, or (0, the number for all).
template <class T>
PerRequest<T> per_request(const std::pair<uintptr_t, double>& value) {
  return {pointer<const T>(value.first), value.second};
}

using Parameter = std::pair<uintptr_t, double>;
using Matrix = std::tuple<uintptr_t, int, int64_t, int64_t>;  // address, dtype, columns, stride

Rows rows_of(const Matrix& matrix) {
  const auto [data, dtype, columns, stride] = matrix;
  require(columns >= 0, "columns: expected no negative number");
  return {pointer<const void>(data), static_cast<Dtype>(dtype), columns, stride};
}

Sampling sampling_of(const Parameter& temperature, const Parameter& top_k, const Parameter& top_p,
                              const Parameter& min_p, uintptr_t seed, uintptr_t position) {
  require((seed == 0) == (position == 0), "seed, position: expected both or none");
  return {per_request<float>(temperature), per_request<int32_t>(top_k),  per_request<float>(top_p),
          per_request<float>(min_p),       pointer<const int64_t>(seed), pointer<const int64_t>(position)};
}

}  // namespace

void bind_verify(py::module_& m) {
  m.def("plan_verify", [](int64_t requests, int64_t width, int64_t vocabulary, int64_t draft_columns, int chunks,
                          int device) {
    const Plan plan = plan_verify(requests, width, vocabulary, draft_columns, chunks, device);
    return std::make_tuple(plan.chunks, plan.blocks, plan.workspace);
  });
  m.def("plan_verify_tree", [](int64_t requests, int64_t nodes, int64_t vocabulary, int chunks, int device) {
    const Plan plan = plan_verify_tree(requests, nodes, vocabulary, chunks, device);
    return std::make_tuple(plan.chunks, plan.blocks, plan.workspace);
  });
  m.def(
      "verify",
      [](bool tree, int64_t requests, int64_t width, int64_t drafts, const Matrix& target, uintptr_t draft_tokens,
         uintptr_t cu_drafts, const Matrix& draft_rows, bool drafts_are_logits, uintptr_t draft_ids,
         uintptr_t draft_kind, const Parameter& temperature, const Parameter& top_k, const Parameter& top_p,
         const Parameter& min_p, uintptr_t seed, uintptr_t position, int rule, const Parameter& theta, float eps,
         float delta, uint32_t stream_of_plain, const Parameter& index, uintptr_t tokens, uintptr_t num_accepted,
         uintptr_t logprobs, uintptr_t flags, uintptr_t parents, uintptr_t path, int chunks, int blocks, uintptr_t workspace, int device,
         uintptr_t stream) {
        require(requests >= 0 && width >= 1 && drafts >= 0, "requests, width, drafts: expected no negative number");
        Verify args{};
        args.requests = requests, args.width = width, args.drafts = drafts;
        args.target = rows_of(target), args.draft_rows = rows_of(draft_rows);
        args.draft_tokens = pointer<const int64_t>(draft_tokens), args.cu_drafts = pointer<const int32_t>(cu_drafts);
        args.drafts_are_logits = drafts_are_logits;
        args.draft_ids = pointer<const int32_t>(draft_ids), args.draft_kind = pointer<const bool>(draft_kind);
        args.sampling = sampling_of(temperature, top_k, top_p, min_p, seed, position);
        args.rule = static_cast<Rule>(rule), args.theta = per_request<float>(theta);
        args.eps = eps, args.delta = delta;
        args.plain = static_cast<Stream>(stream_of_plain), args.plain_index = per_request<int32_t>(index);
        args.tokens = pointer<int64_t>(tokens), args.num_accepted = pointer<int32_t>(num_accepted);
        args.logprobs = pointer<float>(logprobs), args.flags = pointer<int32_t>(flags);
        args.parents = pointer<const int32_t>(parents), args.path = pointer<int32_t>(path);
        args.plan = {chunks, blocks, 0}, args.workspace = pointer<void>(workspace);
        require(requests == 0 || (args.target.data && tokens && workspace && blocks > 0 && chunks >= 0),
                "target, tokens, workspace: expected addresses");
        if (tree)
          check(verify_tree(args, device, pointer<void>(stream)), "verify_tree");
        else
          check(verify(args, device, pointer<void>(stream)), "verify");
      },
      release_gil());
}

}  // namespace sk::gpu::bind
