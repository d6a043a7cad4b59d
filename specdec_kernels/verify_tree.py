"""Verification of trees of drafted tokens: raw logits in, a path and its tokens out."""

import itertools
from typing import NamedTuple

import torch

from . import library, parameters, registry, validate
from .tree import tree_depth

RULES = ("token", "traversal", "typical", "threshold")
_INTS = (torch.int32, torch.int64)


class TreeVerdict(NamedTuple):
    """What one round emits for each of B requests."""

    path: torch.Tensor  # [B, max_depth] int32: the accepted nodes, numbered inside the request, then -1
    tokens: torch.Tensor  # [B, max_depth + 1] int64: their tokens and one more, then -1
    num_accepted: torch.Tensor  # [B] int32
    logprobs: torch.Tensor | None  # [B, max_depth + 1] f32: log-softmax of the raw row at the emitted id, NaN beyond
    flags: torch.Tensor  # [B] int32: as those of a Verdict


def verify_tree(
    target_logits,
    tree_tokens,
    parents,
    cu_nodes,
    *,
    draft_probs=None,
    max_depth=None,
    rule="token",
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=None,
    position=None,
    theta=None,
    typical=(0.09, 0.3),
    return_logprobs=False,
):
    """Judges the draft trees of B requests against the target model and draws each request's next token.

    A greedy request (temperature 0) under "token" and "traversal" follows the argmax. Otherwise, by ``rule``:

    "token" (recursive rejection sampling; SpecInfer 2305.09781, RSD 2402.14160, Sequoia 2402.12374): from the root
    down, the children of a node are tried in order. Child x is accepted iff u*q(x) < P(x), at first P = p of the node's
    row; after a refusal P = norm(max(P - q, 0)), and q loses x and is renormalised (drawn without replacement). Without
    ``draft_probs`` a child is deterministic: accepted iff u < P(x), else P(x) = 0. If no child is accepted the next
    token is drawn from P. The law of what is emitted is p.

    "traversal" (2505.12398): from the leaves up, depth-first; the same law, more accepted nodes, on a chain equal to
    block verification. r(root) = 1, r(child) = min(r(parent) p(x)/q(x), 1); the first leaf's path is accepted iff the
    leaf's coin is below r(leaf), else the leaf is taken away and its parent has S = sum max(r p - q, 0), r = S/(S + 1 -
    r), p = norm(max(r p - q, 0)), and q without x. The root is always accepted; the next token is drawn from the
    accepted node's p.

    "typical" (Medusa 2401.10774; lossy): nodes with p(x) > min(eps, delta*exp(-H)) below accepted ones; the longest
    path, ties by sum log p, then the lowest node. The next token is drawn from p.

    "threshold" (lossy): down to the child c of largest target logit (lowest id on ties) as long as c passes the filters
    and P_target(c)/P_draft(c_best) > theta, c_best the child of largest P_draft; P_target = softmax(l/T) before filters
    (T = 1 and filters at T = 1 for greedy requests), P_draft = 1 without ``draft_probs``.

    On a chain "token", "typical" and "threshold" equal those of :func:`specdec_kernels.verify`.

    Args (D = nodes of all requests; request i owns nodes ``cu_nodes[i]`` to ``cu_nodes[i + 1] - 1``, numbered from 0):
        target_logits: [D + B, V] f32, f16 or bf16, raw; any distance between rows. Request i's root row is
            ``cu_nodes[i] + i``, node j's own row (the distribution after it) is root row + 1 + j. Never modified.
        tree_tokens: [D] int32 or int64; siblings distinct, tried in node order. -1: the node is absent with all below.
        parents: [D] int32 or int64, ``parents[j] < j``; -1 = child of the root.
        cu_nodes: [B + 1] int32, ascending from 0 to D. A request may have no nodes: plain sampling.
        draft_probs: [D, V] f32, f16 or bf16: the distribution from which node j's parent drew its children, before any
            removal (equal for siblings); used as they are. None: nodes are deterministic.
        max_depth: width of ``path``; None = the deepest node (CPU only, and not under torch.compile).
        temperature, top_k, top_p, min_p, seed, position, theta, typical, return_logprobs: as for ``verify``.

    Returns a :class:`TreeVerdict`. Hard inputs and flags are those of ``verify``; an unusable sibling is skipped with
    all below it.

    Raises ValueError or TypeError that names the argument; on a GPU bad values set flag 4 instead.
    """
    if torch.compiler.is_compiling():
        path, tokens, num_accepted, logprobs, flags = library.call(
            "verify_tree", target_logits, tree_tokens, parents, cu_nodes, draft_probs=draft_probs,
            max_depth=max_depth, rule=rule, theta=theta, typical=typical,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position,
            return_logprobs=return_logprobs,
        )  # fmt: skip
        return TreeVerdict(path, tokens, num_accepted, logprobs if return_logprobs else None, flags)
    validate.tensor("target_logits", target_logits, validate.FLOATS, 2)
    validate.rows("target_logits", target_logits)
    device = target_logits.device
    rows, vocabulary = target_logits.shape
    validate.tensor("tree_tokens", tree_tokens, _INTS, 1, device)
    validate.tensor("cu_nodes", cu_nodes, (torch.int32,), 1, device)
    nodes, requests = tree_tokens.shape[0], cu_nodes.shape[0] - 1
    if requests < 0:
        raise ValueError("cu_nodes: expected shape [B + 1], got [0]")
    validate.vector("parents", parents, _INTS, nodes, device)
    if rows != nodes + requests:
        raise ValueError(
            f"target_logits: expected D + B = {nodes} + {requests} rows, got shape {list(target_logits.shape)}"
        )
    if vocabulary == 0:
        raise ValueError(f"target_logits: expected at least one id, got shape {list(target_logits.shape)}")
    if draft_probs is not None:
        validate.tensor("draft_probs", draft_probs, validate.FLOATS, 2, device)
        validate.rows("draft_probs", draft_probs)
        validate.shape("draft_probs", draft_probs, (nodes, vocabulary))
    theta, typical = parameters.rule(rule, RULES, theta, typical, requests, device)
    temperature, top_k, top_p, min_p, seed, position = parameters.sampling(
        temperature, top_k, top_p, min_p, seed, position, requests, device
    )
    deepest = None
    if target_logits.is_cpu:
        deepest = _check_trees(tree_tokens.tolist(), parents.tolist(), cu_nodes.tolist(), vocabulary)
    max_depth = _max_depth(max_depth, deepest)

    tree_tokens, cu_nodes = tree_tokens.long().contiguous(), cu_nodes.contiguous()
    if parents.dtype is not torch.int32:
        parents = parents.clamp(-2, 2**31 - 1).int()  # what a GPU has to refuse stays out of range
    path, tokens = cu_nodes.new_empty(requests, max_depth), tree_tokens.new_empty(requests, max_depth + 1)
    num_accepted, flags = cu_nodes.new_empty(requests), cu_nodes.new_empty(requests)
    logprobs = target_logits.new_empty(requests, max_depth + 1, dtype=torch.float32) if return_logprobs else None
    registry.call(
        "verify_tree",
        validate.device_type(target_logits),
        target_logits,
        tree_tokens,
        parents.contiguous(),
        cu_nodes,
        draft_probs,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        position,
        rule,
        theta,
        typical,
        path,
        tokens,
        num_accepted,
        logprobs,
        flags,
    )
    return TreeVerdict(path, tokens, num_accepted, logprobs, flags)


def _check_trees(tokens, parents, bounds, vocabulary):
    """Refuses what is not a tree; returns the depth of the deepest node."""
    if bounds[0] != 0 or bounds[-1] != len(tokens) or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_nodes: expected values ascending from 0 to D = {len(tokens)}, got {bounds}")
    return max(
        (tree_depth(tokens[start:stop], parents[start:stop], vocabulary) for start, stop in itertools.pairwise(bounds)),
        default=0,
    )


def _max_depth(value, deepest):
    if value is None:
        if deepest is None:
            raise ValueError("max_depth: expected an integer when the tensors are not on the CPU, got None")
        return deepest
    value = validate.integer("max_depth", value)
    if value < (deepest or 0):
        raise ValueError(f"max_depth: expected at least the depth of the deepest node, {deepest or 0}, got {value}")
    return value
