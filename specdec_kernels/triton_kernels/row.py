"""What a row of raw logits stands for, in Triton (reference/filters.py is the specification).

With w = exp((l - max)/T) every filter is a threshold, so a row is described by five numbers, its *facts*:

    best   the largest entry; -inf: no candidate; +inf: a point mass on the first +inf
    total  the sum of the weights (float64)
    cut, last   the support: entries above ``cut``, and those equal to it up to id ``last``
    nan    whether the row holds a NaN

and min-p, whose bound is compared with the weights themselves. Sums over a row come from the survey's numbers per group
in float32 with float64 totals (relative error about 1e-7); the weights that a coin, a residual or a pick looks at are
float64.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
LOWEST = tl.constexpr(-3.4028234663852886e38)
MANY = tl.constexpr(0x7FFFFFFF)  # above every id


@triton.jit
def entries(row, ids, mask):
    """Entries in float32, NaN and what is masked as -inf."""
    x = tl.load(row + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def read_survey(stats, groups, G: tl.constexpr):
    """Tops and sums of all groups, padded to G."""
    group = tl.arange(0, G)
    top = tl.load(stats + group, mask=group < groups, other=float("-inf"))
    total = tl.load(stats + groups + group, mask=group < groups, other=0.0)
    return top, total


@triton.jit
def argmax(row, columns, top, G: tl.constexpr):
    """The lowest id of the largest entry, given the groups' tops; anything without a candidate."""
    best = tl.max(top, axis=0)
    group = tl.min(tl.where(top == best, tl.arange(0, G), G - 1), axis=0)
    ids = group * GROUP + tl.arange(0, GROUP)
    found = tl.min(tl.where(entries(row, ids, ids < columns) == best, ids, MANY), axis=0)
    return found


@triton.jit
def masses(top, total, best, temperature, last, G: tl.constexpr):
    """Each group's sum of weights, before filters, in float32."""
    point = tl.where(tl.arange(0, G) == last // GROUP, 1.0, 0.0)
    below = tl.where(top == float("-inf"), float("-inf"), top - tl.where(best == float("inf"), 0.0, best))
    m = tl.abs(total) * tl.exp(below / temperature)
    m = tl.where(top == float("-inf"), 0.0, m)
    return tl.where(best == float("inf"), point, m)


@triton.jit
def unfiltered(row, columns, top, total, temperature, G: tl.constexpr):
    """The facts of a row without filters."""
    best = tl.max(top, axis=0)
    nan = tl.max((total < 0.0).to(tl.int32), axis=0)
    cut = tl.full([], LOWEST, tl.float32)
    last = columns - 1
    if best == float("inf"):
        cut = tl.full([], 0.0, tl.float32)
        last = argmax(row, columns, top, G)
    sum_of_weights = tl.sum(masses(top, total, best, temperature, last, G).to(tl.float64), axis=0)
    return best, sum_of_weights, cut, last, nan


@triton.jit
def weigh(x, ids, temperature, best, cut, last, least):
    """Weights in float64 of entries ``x``: 0 outside the support, else exp((x - best) / T)."""
    endless = best == float("inf")
    x = tl.where(endless, tl.where(x == float("inf"), 0.0, float("-inf")), x)
    base = tl.where(endless, 0.0, best)
    w = tl.exp((x.to(tl.float64) - base.to(tl.float64)) / temperature.to(tl.float64))
    kept = ((x > cut) | ((x == cut) & (ids <= last))) & (w >= least)
    return tl.where(kept, w, 0.0)
