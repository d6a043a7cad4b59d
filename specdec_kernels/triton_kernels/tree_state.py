"""What the refused nodes of a draft tree have left of their parent's row.

A node is known by its row in ``target_logits`` (the root's row, then one per node); so is what is kept about it.
What is left of p after the children 1 .. i of a node have been refused:

    w_0 = w,  w_i = max(w_{i-1} - factor_i * q_i, 0)      (a point mass: w_i = w_{i-1} without its id)

with factor_i = T_{i-1} / (r * sum of q_i), T_i the sum of w_i, and r = 1 but for rule "traversal". So a row's weights
can be evaluated anywhere from the row itself, the draft rows and one number per refused child.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .row import Rows, entries, read_survey, weigh

STEP = tl.constexpr(2048)  # ids at a time where a whole row is summed up


class Tree(NamedTuple):
    tokens: tl.tensor  # [D] of all requests
    parents: tl.tensor  # [D], counted inside the request
    root: tl.tensor  # the root's row
    shift: tl.tensor  # a node's row minus its place in tokens
    first: tl.tensor  # [D + B] a node's first child (its row), or -1
    next: tl.tensor  # [D + B] a node's next sibling, or -1
    factor: tl.tensor  # [D + B] < 0: not refused; 0: refused, but nothing would have been left, so all of it was
    drafts: Rows  # probabilities, or data None


@triton.jit
def put(pointer, value):
    """Stores a number that every thread of the program reads from now on, none before."""
    tl.debug_barrier()
    tl.store(pointer, value)
    tl.debug_barrier()


@triton.jit
def token_of(tree, j):
    return tl.load(tree.tokens + j - tree.shift).to(tl.int32)


@triton.jit
def parent_of(tree, j):
    """The row of node j's parent."""
    return tree.root + 1 + tl.load(tree.parents + j - tree.shift)


@triton.jit
def draft_row(tree, j, ids, mask):
    """The entries of node j's draft row in float64."""
    row = tree.drafts.data + (j - tree.shift).to(tl.int64) * tree.drafts.stride
    return tl.load(row + ids, mask=mask, other=0.0).to(tl.float32).to(tl.float64)


@triton.jit
def after_refusals(tree, r, ids, mask, w, DENSE: tl.constexpr):
    """What the refused children of row r have left of its weights w at ``ids``."""
    j = tl.load(tree.first + r)
    while j >= 0:
        factor = tl.load(tree.factor + j)
        if factor > 0.0:
            if DENSE:
                w = tl.maximum(w - factor * _remaining(tree, r, j, ids, mask), 0.0)
            else:
                w = tl.where(ids == token_of(tree, j), 0.0, w)
        j = tl.load(tree.next + j)
    return w


@triton.jit
def _remaining(tree, r, j, ids, mask):
    """Node j's draft row without the ids of the siblings before it that were refused and left p as it was.

    (Where a refusal changed p, nothing is left at the refused id, and it does not matter what is subtracted there.)
    """
    q = draft_row(tree, j, ids, mask)
    k = tl.load(tree.first + r)
    while k != j:
        if tl.load(tree.factor + k) == 0.0:
            q = tl.where(ids == token_of(tree, k), 0.0, q)
        k = tl.load(tree.next + k)
    return q


@triton.jit
def weight_left(target, tree, r, token, facts, temperature, least, DENSE: tl.constexpr):
    """What is left at one id."""
    r = r.to(tl.int64)
    w = weigh(entries(target.data + r * target.stride, token, token >= 0), token, temperature, facts, least)
    return after_refusals(tree, r, token, token >= 0, w, DENSE)


@triton.jit
def total_left(target, tree, r, facts, temperature, least, DENSE: tl.constexpr):
    """The sum of what is left."""
    r = r.to(tl.int64)
    total = tl.full([], 0.0, tl.float64)
    tops = target.stats + r * target.fields * target.groups
    for at in range(0, target.columns, STEP):
        ids = at + tl.arange(0, STEP)
        inside = ids < target.columns
        inside = inside & (tl.load(tops + ids // 64, mask=inside, other=float("-inf")) >= facts.cut)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            w = weigh(entries(target.data + r * target.stride, ids, inside), ids, temperature, facts, least)
            total += tl.sum(after_refusals(tree, r, ids, inside, w, DENSE), axis=0)
    return total


@triton.jit
def own_probability(tree, j, DENSE: tl.constexpr, G: tl.constexpr):
    """q(x) of node j by its own row as given; 0 if the row is unusable."""
    q = tl.full([], 1.0, tl.float64)
    if DENSE:
        _, sums = read_survey(tree.drafts, (j - tree.shift).to(tl.int64), G)
        q = draft_row(tree, j, token_of(tree, j), True)
        q = tl.where(tl.min(sums, axis=0) >= 0.0, q, 0.0)
    return q


@triton.jit
def mass_without_refused(tree, r, j, q, DENSE: tl.constexpr, G: tl.constexpr):
    """By what node j's draft row is divided: 1 for the first child, later the sum without its refused siblings' ids."""
    total = tl.full([], 1.0, tl.float64)
    if DENSE:
        _, sums = read_survey(tree.drafts, (j - tree.shift).to(tl.int64), G)
        whole = tl.sum(sums.to(tl.float64), axis=0)
        refused = j * 0
        k = tl.load(tree.first + r)
        while k != j:
            if tl.load(tree.factor + k) >= 0.0:
                whole -= draft_row(tree, j, token_of(tree, k), True)
                refused += 1
            k = tl.load(tree.next + k)
        total = tl.where(refused > 0, tl.maximum(whole, q), 1.0)
    return total


@triton.jit
def refuse(target, tree, r, j, total, mass, ratio, facts, temperature, least, DENSE: tl.constexpr):
    """Notes that child j of row r was refused; returns what is left of ``total``, 0 if nothing is (p stays as it was).

    ``mass``: what the child's row is divided by; ``ratio``: r of (r p - q)+.
    """
    left = tl.full([], 0.0, tl.float64)
    if ratio > 0.0:
        if DENSE:
            put(tree.factor + j, total / (ratio * mass))
            left = total_left(target, tree, r, facts, temperature, least, DENSE)
        else:
            left = total - weight_left(target, tree, r, token_of(tree, j), facts, temperature, least, DENSE)
            put(tree.factor + j, tl.full([], 1.0, tl.float64))
    if left <= 0.0:
        put(tree.factor + j, tl.full([], 0.0, tl.float64))
    return tl.maximum(left, 0.0)
