"""A token drawn from weights: groups of 64 ids race (reference/draws.py), and few of them are looked at.

The time of a group of mass m is E/m, so a bound m' >= m bounds it from below by E/m'. Groups are evaluated in the order
of these bounds until the next bound is no earlier than the best time. With the survey's masses as bounds a draw from p
evaluates one or two groups; a draw from the residual after a refusal evaluates about 1 / (mass of the residual) groups,
and the refusal had just that probability.

The weights are max(w(v) - factor * q(v), 0), without the id ``point``. If all of them are 0 the draw is from w.
"""

import triton
import triton.language as tl

from .philox import PICK, exponential, uniform, word
from .proposal import draft_probability
from .row import GROUP, MANY, entries, weigh
from .tree_state import after_refusals

SLACK = tl.constexpr(1.00003)  # a bound is this much larger than a mass in float32


@triton.jit
def draw(target, r, facts, mass, temperature, least, factor, point, drafts, proposal, seed, position, purpose,
         DENSE: tl.constexpr, PROBS: tl.constexpr, TREE: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """An id of row r. ``mass``: of each group, or a bound; ``factor`` 0: nothing is subtracted.

    TREE: ``drafts`` is the Tree (tree_state.py), which knows what its refused nodes have left of the row.
    """
    group = tl.arange(0, G)
    bounds = exponential(word(seed, position, purpose, group)) / (mass * SLACK)
    bounds = tl.where(mass > 0.0, bounds, float("inf"))
    waiting = bounds
    fastest = tl.full([], float("inf"), tl.float64)
    winner = tl.full([], -1, tl.int32)
    searching = True
    while searching:
        next_, g = tl.min(waiting, axis=0, return_indices=True)
        if (next_.to(tl.float64) < fastest) & (next_ < float("inf")):
            w = _weights(target, r, g, facts, temperature, least, factor, point, drafts, proposal, DENSE, PROBS, TREE)
            m = tl.sum(w, axis=0)
            e = exponential(word(seed, position, purpose, g)).to(tl.float64)
            time = tl.where(m > 0.0, e / tl.where(m > 0.0, m, 1.0), float("inf"))
            if (time < fastest) | ((time == fastest) & (g < winner)):
                fastest = time
                winner = g
            waiting = tl.where(group == g, float("inf"), waiting)
        elif (winner < 0) & ((point >= 0) | (factor > 0.0)):
            point = tl.full([], -1, tl.int32)
            factor = tl.full([], 0.0, tl.float64)
            waiting = bounds
        else:
            searching = False

    w = _weights(target, r, winner, facts, temperature, least, factor, point, drafts, proposal, DENSE, PROBS, TREE)
    return pick(w, winner, seed, position, purpose)


@triton.jit
def pick(w, winner, seed, position, purpose):
    """The id inside the winning group: the first whose running sum exceeds u*m."""
    ids = winner * GROUP + tl.arange(0, GROUP)
    u = uniform(seed, position, purpose, winner.to(tl.uint32) + PICK)
    over = (tl.cumsum(w, axis=0) > u * tl.sum(w, axis=0)) & (w > 0.0)
    first = tl.min(tl.where(over, ids, MANY), axis=0)
    return tl.where(first < MANY, first, tl.max(tl.where(w > 0.0, ids, -1), axis=0))


@triton.jit
def _weights(target, r, g, facts, temperature, least, factor, point, drafts, proposal,
             DENSE: tl.constexpr, PROBS: tl.constexpr, TREE: tl.constexpr):  # fmt: skip
    """max(w - factor*q, 0) of the 64 ids of group g."""
    ids = g * GROUP + tl.arange(0, GROUP)
    inside = (ids >= 0) & (ids < target.columns)
    w = weigh(entries(target.data + r * target.stride, ids, inside), ids, temperature, facts, least)
    w = tl.where(ids == point, 0.0, w)
    if TREE:
        if factor > 0.0:
            w = after_refusals(drafts, r, ids, inside, w, DENSE)
    elif DENSE:
        if factor > 0.0:
            q = draft_probability(drafts, proposal.row, ids, inside, proposal.facts, temperature, least, PROBS)
            w = tl.maximum(w - factor * q, 0.0)
    return w
