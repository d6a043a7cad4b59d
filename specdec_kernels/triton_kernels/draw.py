"""A token drawn from weights: groups of 64 ids race (reference/draws.py), and few of them are looked at.

The time of a group of mass m is E/m, so a bound m' >= m bounds it from below by E/m'. Groups are evaluated in the order
of these bounds until the next bound is no earlier than the best time. With the survey's masses as bounds a draw from p
evaluates one or two groups; a draw from the residual after a refusal evaluates about 1 / (mass of the residual) groups,
and the refusal had just that probability.

The weights are max(scale * w(v) - q(v), 0), without the id ``point``; q only if ``subtract``. If all of them are 0 the
draw is from w.
"""

import triton
import triton.language as tl

from .philox import PICK, exponential, uniform, word
from .row import GROUP, MANY, entries, weigh

SLACK = tl.constexpr(1.00003)  # a bound is this much larger than a mass in float32


@triton.jit
def draft_probability(
    row, columns, ids, mask, draft_ids, steps, temperature, best, total, cut, last, least, LOGITS: tl.constexpr
):  # fmt: skip
    """q(ids) in float64. ``draft_ids``: ids that the columns stand for, ascending, found by bisection in ``steps``."""
    column = ids
    if draft_ids is not None:
        column = ids * 0
        end = column + columns
        for _ in range(steps):
            middle = (column + end) // 2
            open_ = column < end
            right = open_ & (tl.load(draft_ids + middle, mask=mask & open_, other=MANY) < ids)
            column = tl.where(right, middle + 1, column)
            end = tl.where(open_ & (right == 0), middle, end)
        mask = mask & (column < columns)
        mask = mask & (tl.load(draft_ids + column, mask=mask, other=-1) == ids)
    if LOGITS:
        q = weigh(entries(row, column, mask), column, temperature, best, cut, last, least) / total
    else:
        q = tl.load(row + column, mask=mask, other=0.0).to(tl.float32).to(tl.float64)
    return tl.where(mask, q, 0.0)


@triton.jit
def draw(
    row, columns, mass, temperature, best, cut, last, least,  # p; mass: of each group, a bound if there are filters
    scale, point, subtract,
    draft_row, draft_columns, draft_ids, steps, draft_best, draft_total, draft_cut, draft_last,  # q
    seed, position, purpose,
    DENSE: tl.constexpr, LOGITS: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, G)
    times = exponential(word(seed, position, purpose, group))
    bounds = tl.where(mass > 0.0, times / (mass * scale.to(tl.float32) * SLACK), float("inf"))
    waiting = bounds
    fastest = tl.full([], float("inf"), tl.float64)
    winner = tl.full([], -1, tl.int32)
    searching = True
    while searching:
        next_, g = tl.min(waiting, axis=0, return_indices=True)
        if (next_.to(tl.float64) < fastest) & (next_ < float("inf")):
            w = _weights(row, columns, g, temperature, best, cut, last, least, scale, point, subtract, draft_row,
                         draft_columns, draft_ids, steps, draft_best, draft_total, draft_cut, draft_last, DENSE,
                         LOGITS)  # fmt: skip
            m = tl.sum(w, axis=0)
            e = tl.sum(tl.where(group == g, times, 0.0), axis=0).to(tl.float64)
            time = tl.where(m > 0.0, e / m, float("inf"))
            if (time < fastest) | ((time == fastest) & (g < winner)):
                fastest = time
                winner = g
            waiting = tl.where(group == g, float("inf"), waiting)
        elif (winner < 0) & ((point >= 0) | subtract):
            point = tl.full([], -1, tl.int32)
            subtract = False
            waiting = bounds
        else:
            searching = False

    w = _weights(row, columns, winner, temperature, best, cut, last, least, scale, point, subtract, draft_row,
                 draft_columns, draft_ids, steps, draft_best, draft_total, draft_cut, draft_last, DENSE,
                 LOGITS)  # fmt: skip
    ids = winner * GROUP + tl.arange(0, GROUP)
    u = uniform(seed, position, purpose, winner.to(tl.uint32) + PICK)
    over = (tl.cumsum(w, axis=0) > u * tl.sum(w, axis=0)) & (w > 0.0)
    first = tl.min(tl.where(over, ids, MANY), axis=0)
    return tl.where(first < MANY, first, tl.max(tl.where(w > 0.0, ids, -1), axis=0))


@triton.jit
def _weights(
    row, columns, g, temperature, best, cut, last, least, scale, point, subtract,
    draft_row, draft_columns, draft_ids, steps, draft_best, draft_total, draft_cut, draft_last,
    DENSE: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    ids = g * GROUP + tl.arange(0, GROUP)
    inside = (ids >= 0) & (ids < columns)
    w = weigh(entries(row, ids, inside), ids, temperature, best, cut, last, least) * scale
    w = tl.where(ids == point, 0.0, w)
    if DENSE:
        if subtract:
            q = draft_probability(draft_row, draft_columns, ids, inside, draft_ids, steps, temperature, draft_best,
                                  draft_total, draft_cut, draft_last, least, LOGITS)  # fmt: skip
            w = tl.maximum(w - q, 0.0)
    return w
