"""Reference of ``verify_tree``: one request after the other, in float64.

Arguments, as the public function hands them to every backend:

    target_logits  [D + B, V] f32/f16/bf16, last dimension contiguous: request i's root row is cu_nodes[i] + i, then its
                   nodes' own rows
    tree_tokens    [D] int64, contiguous, -1 = absent;  parents [D] int32, contiguous, inside the request, -1 = root
    cu_nodes       [B + 1] int32, contiguous
    draft_rows     [D, V] f32/f16/bf16 probabilities, last dimension contiguous, or None
    temperature ... typical     as in ``reference/verify.py``; rule "token", "traversal", "typical" or "threshold"
    path [B, W - 1] int32, tokens [B, W] int64, num_accepted [B] int32, logprobs [B, W] f32 or None, flags [B] int32:
                   outputs, contiguous

A rule returns (path of accepted nodes, weights of the last token, flags). Node -1 is the root.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from ..tree import ROOT, tree_depth
from . import filters
from .draws import Exact, accept, draw, shifts
from .philox import LAST, PLAIN
from .request import (
    BAD_DRAFT,
    BAD_VALUE,
    NO_CANDIDATE,
    Rules,
    bounds_are_sound,
    chance,
    changes,
    is_distribution,
    normalised,
    read,
    residual,
    rules_of,
)


@dataclass(kw_only=True)
class TreeRequest(Rules):
    """One request: its own rows and numbers, nothing else."""

    target: torch.Tensor  # [D + 1, V] raw logits; node j's row is j + 1
    tokens: list  # D ids, -1 = absent
    parents: list  # D nodes before their children
    draft_rows: torch.Tensor | None  # [D, V]: what node j's parent drew its children from

    def present(self):
        """Nodes that are there: with a token, and not below one without."""
        there = {ROOT}
        for j, (x, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if x >= 0 and parent in there:
                there.add(j)
        return there

    def children(self):
        there = self.present()
        kids = {node: [] for node in there}
        for j in sorted(there - {ROOT}):
            kids[self.parents[j]].append(j)
        return kids

    def own_distribution(self, j):
        """q of node ``j`` as given, a point mass without draft rows; None if its row is unusable."""
        x = self.tokens[j]
        if self.draft_rows is None:
            return filters.one_hot(x, self.target.shape[1])
        q = self.draft_rows[j].double()
        return q if is_distribution(q) and q[x] > 0 else None

    def draft_distribution(self, j, removed):
        """q of node ``j`` when its siblings ``removed`` (token ids) have been drawn and put aside before it."""
        q = self.own_distribution(j)
        if not removed or self.draft_rows is None:
            return q
        q = q.clone()
        q[removed] = 0.0
        return q / q.sum()


def follow_argmax(r):
    kids, path, flags, node = r.children(), [], 0, ROOT
    while True:
        row, hard = read(r.target[node + 1])
        flags |= hard
        best = filters.argmax(row)
        node = next((j for j in kids[node] if r.tokens[j] == best), None)
        if node is None:
            return path, filters.one_hot(best, len(row)) if best >= 0 else torch.zeros_like(row), flags
        path.append(node)


def token(r, decide):
    """Top-down: the children of a node are tried in order, each against what its siblings left of p.

    Accept x iff u*q(x) < P(x); after a refusal P = norm((P - q)+), and x is taken out of the siblings' q, as drawing
    without replacement does (recursive rejection sampling, RSD 2402.14160, Sequoia 2402.12374). Deterministic siblings
    are point masses: accept iff u < P(x), else P(x) = 0.
    """
    if r.greedy:
        return follow_argmax(r)
    kids, path, flags, node = r.children(), [], 0, ROOT
    while True:
        row, hard = read(r.target[node + 1])
        flags |= hard
        p, removed, below = normalised(r.weights(row, decide)), [], None
        for j in kids[node]:
            if r.own_distribution(j) is None:
                flags |= BAD_DRAFT
                continue
            if not p.any():
                break
            x, q = r.tokens[j], r.draft_distribution(j, removed)
            if accept(r.seed, r.position, j, float(q[x]), float(p[x]), decide):
                below = j
                break
            p = normalised(residual(p, q))
            removed.append(x)
        if below is None:
            return path, p, flags
        path.append(below)
        node = below


def traversal(r, decide):
    """Bottom-up (2505.12398): leaves in depth-first order; block verification where the tree is a chain.

    r(root) = 1, r(child) = min(r(parent) p(x)/q(x), 1). The first leaf's path is accepted with chance r(leaf). Else the
    leaf goes, and its parent gets r = S/(S + 1 - r), S = sum (r p - q)+, p = norm((r p - q)+), q without x. The root is
    always accepted; the last token is drawn from the accepted node's p.
    """
    if r.greedy:
        return follow_argmax(r)
    flags, p, kids = 0, {}, {ROOT: []}
    for j in [ROOT, *sorted(r.present() - {ROOT})]:
        if j != ROOT:
            parent = r.parents[j]
            if parent not in kids:
                continue
            if r.own_distribution(j) is None:
                flags |= BAD_DRAFT
                continue
            if not p[parent].any():
                continue
            kids[parent].append(j)
            kids[j] = []
        row, hard = read(r.target[j + 1])
        flags |= hard
        p[j] = normalised(r.weights(row, decide))
    removed, ratio = {node: [] for node in kids}, {ROOT: 1.0}
    while True:
        path = [ROOT]
        while kids[path[-1]]:
            parent, j = path[-1], kids[path[-1]][0]
            if j not in ratio:  # a node whose own children were refused keeps what they left it
                q, x = r.draft_distribution(j, removed[parent]), r.tokens[j]
                ratio[j] = min(ratio[parent] * float(p[parent][x]) / float(q[x]), 1.0)
            path.append(j)
        leaf = path.pop()
        if leaf == ROOT or accept(r.seed, r.position, leaf, 1.0, ratio[leaf], decide):
            return [node for node in (*path, leaf) if node != ROOT], p[leaf], flags
        parent, q = path[-1], r.draft_distribution(leaf, removed[path[-1]])
        p[parent], ratio[parent] = (
            normalised(residual(p[parent], q, ratio[parent])),
            chance(p[parent], q, ratio[parent]),
        )
        kids[parent].pop(0)
        removed[parent].append(r.tokens[leaf])


def typical(r, decide):
    """Nodes with p(x) > min(eps, delta*exp(-H)) below accepted ones (Medusa; lossy): the longest path, ties by
    sum log p, then the lowest node."""
    kids, flags, ends, open_ = r.children(), 0, [], [([], 0.0)]
    while open_:
        path, score = open_.pop()
        node = path[-1] if path else ROOT
        row, hard = read(r.target[node + 1])
        flags |= hard
        w = r.weights(row, decide)
        ends.append((path, score, w))
        p = normalised(w)
        for j in kids[node]:
            chosen = float(p[r.tokens[j]])
            if w.any() and decide.exceeds(chosen, r.typical_bound(p)):
                open_.append(([*path, j], score + math.log(chosen)))
    longest = max(len(path) for path, _, _ in ends)
    ends = sorted((e for e in ends if len(e[0]) == longest), key=lambda e: e[0][-1:])
    path, _, w = ends[decide.best([score for _, score, _ in ends])]
    return path, w, flags


def threshold(r, decide):
    """Down to the child of largest target logit as long as it is in the support and P_target(c)/P_draft(c_best) >
    theta, c_best the child of largest P_draft (lossy)."""
    kids, path, flags, node = r.children(), [], 0, ROOT
    while True:
        row, hard = read(r.target[node + 1])
        flags |= hard
        w = r.weights(row, decide)
        usable = [j for j in kids[node] if r.own_distribution(j) is not None]
        if len(usable) < len(kids[node]):
            flags |= BAD_DRAFT
        if not usable or not w.any():
            return path, w, flags
        c = min(usable, key=lambda j: (-float(row[r.tokens[j]]), r.tokens[j]))
        best = max(float(r.own_distribution(j)[r.tokens[j]]) for j in usable)
        x = r.tokens[c]
        if not (r.support(row, decide)[x] and decide.exceeds(float(r.unfiltered(row)[x]) / best, r.theta)):
            return path, w, flags
        path.append(c)
        node = c


RULES = {"token": token, "traversal": traversal, "typical": typical, "threshold": threshold}


def verify_request(r, decide):
    """Returns (path, emitted tokens, flags)."""
    path, last, flags = RULES[r.rule](r, decide)
    tokens = [r.tokens[j] for j in path]
    if not last.any():
        return path, tokens, flags | NO_CANDIDATE
    if r.greedy:
        tokens.append(filters.argmax(last))
    elif not r.children()[ROOT]:
        tokens.append(draw(last, r.seed, r.position, PLAIN, 0, decide))
    else:
        tokens.append(draw(last, r.seed, r.position, LAST, len(path), decide))
    return path, tokens, flags


def requests(target_logits, tree_tokens, parents, cu_nodes, draft_rows, *parameters, max_depth):
    """The call taken apart into its requests; None for one with a bad value (possible on a GPU only)."""
    vocabulary, ids, links = target_logits.shape[1], tree_tokens.tolist(), parents.tolist()
    for b, (start, stop) in enumerate(itertools.pairwise(cu_nodes.tolist())):
        rules = rules_of(b, *parameters)
        if rules is None or not bounds_are_sound(b, start, stop, len(cu_nodes) - 1, len(ids)):
            yield None
            continue
        try:
            deepest = tree_depth(ids[start:stop], links[start:stop], vocabulary)
        except ValueError:
            deepest = max_depth + 1
        if deepest > max_depth:
            yield None
            continue
        yield TreeRequest(
            target=target_logits[start + b : stop + b + 1].cpu(), tokens=ids[start:stop], parents=links[start:stop],
            draft_rows=None if draft_rows is None else draft_rows[start:stop].cpu(), **rules,
        )  # fmt: skip


def verify_tree(*args):
    *call, path, tokens, num_accepted, logprobs, flags = args
    path.fill_(-1)
    tokens.fill_(-1)
    num_accepted.zero_()
    if logprobs is not None:
        logprobs.fill_(torch.nan)
    for b, request in enumerate(requests(*call, max_depth=path.shape[1])):
        if request is None:
            flags[b] = BAD_VALUE
            continue
        nodes, emitted, flags[b] = verify_request(request, Exact())
        num_accepted[b] = len(nodes)
        if nodes:
            path[b, : len(nodes)] = torch.tensor(nodes, device="cpu")
        if emitted:
            tokens[b, : len(emitted)] = torch.tensor(emitted, device="cpu")
        if logprobs is not None:
            for i, (node, x) in enumerate(zip([ROOT, *nodes], emitted, strict=False)):
                logprobs[b, i] = filters.clean(request.target[node + 1])[0].log_softmax(0)[x]


def fragile(*args):
    """Which requests of the call (same arguments as :func:`verify_tree`) give other tokens when comparisons move."""
    *call, path, _tokens, _num_accepted, _logprobs, _flags = args
    run = lambda r: lambda decide: verify_request(r, decide)
    return [r is not None and changes(run(r), Exact(), shifts()) for r in requests(*call, max_depth=path.shape[1])]
