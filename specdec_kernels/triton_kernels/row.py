"""What a row of raw logits stands for, in Triton (reference/filters.py is the specification).

With w = exp((l - max)/T) every filter is a threshold, so a row is described by a few numbers, its :class:`Facts`, and
by min-p, whose bound is compared with the weights themselves. Sums over a row come from the survey's numbers per group
in float32, added up in float64 (relative error about 1e-7); the weights that a coin, a residual or a pick looks at are
float64.
"""

from typing import NamedTuple

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
LOWEST = tl.constexpr(-3.4028234663852886e38)
MANY = tl.constexpr(0x7FFFFFFF)  # above every id
SETTLED = tl.constexpr(6)  # float64 numbers per row that settle.py stores: the facts and the entropy


class Rows(NamedTuple):
    """A matrix of rows in a kernel: its elements, and what the survey and settle left about it."""

    data: tl.tensor
    stride: tl.tensor
    columns: tl.tensor
    stats: tl.tensor  # [rows, fields, groups]
    fields: tl.constexpr
    groups: tl.tensor
    settled: tl.tensor  # [rows, SETTLED] or None


class Facts(NamedTuple):
    best: tl.tensor  # the largest entry; -inf: no candidate; +inf: a point mass on the first +inf
    total: tl.tensor  # the sum of the weights (float64)
    cut: tl.tensor  # the support: entries above it,
    last: tl.tensor  # and those equal to it up to this id
    nan: tl.tensor  # not 0: the row holds a NaN


@triton.jit
def entries(row, ids, mask):
    """Entries in float32, NaN and what is masked as -inf."""
    x = tl.load(row + ids, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def read_survey(rows, r, G: tl.constexpr):
    """Tops and sums of all groups of row r (int64), padded to G."""
    group = tl.arange(0, G)
    stats = rows.stats + r * rows.fields * rows.groups + group
    top = tl.load(stats, mask=group < rows.groups, other=float("-inf"))
    total = tl.load(stats + rows.groups, mask=group < rows.groups, other=0.0)
    return top, total


@triton.jit
def argmax(rows, r, top, G: tl.constexpr):
    """The lowest id of the largest entry, given the groups' tops; -1 without a candidate."""
    best = tl.max(top, axis=0)
    group = tl.min(tl.where(top == best, tl.arange(0, G), G - 1), axis=0)
    ids = group * GROUP + tl.arange(0, GROUP)
    x = entries(rows.data + r * rows.stride, ids, ids < rows.columns)
    found = tl.min(tl.where(x == best, ids, MANY), axis=0)
    return tl.where(best > float("-inf"), found, -1)


@triton.jit
def masses(top, total, best, temperature, last, G: tl.constexpr):
    """Each group's sum of weights, before filters, in float32."""
    point = tl.where(tl.arange(0, G) == last // GROUP, 1.0, 0.0)
    below = tl.where(top == float("-inf"), float("-inf"), top - tl.where(best == float("inf"), 0.0, best))
    m = tl.abs(total) * tl.exp(below / temperature)
    m = tl.where(top == float("-inf"), 0.0, m)
    return tl.where(best == float("inf"), point, m)


@triton.jit
def unfiltered(rows, r, top, total, temperature, G: tl.constexpr):
    """The facts of a row without filters."""
    best = tl.max(top, axis=0)
    nan = tl.max((total < 0.0).to(tl.int32), axis=0)
    cut = tl.full([], LOWEST, tl.float32)
    last = rows.columns - 1
    if best == float("inf"):
        cut = tl.full([], 0.0, tl.float32)
        last = argmax(rows, r, top, G)
    sum_of_weights = tl.sum(masses(top, total, best, temperature, last, G).to(tl.float64), axis=0)
    return Facts(best, sum_of_weights, cut, last, nan)


@triton.jit
def read_facts(rows, r, temperature, least, G: tl.constexpr):
    """The facts of row r, from settle if it ran, and each group's mass; with filters a bound, 0 where none passes."""
    top, sums = read_survey(rows, r, G)
    if rows.settled is not None:
        here = rows.settled + r * SETTLED
        facts = Facts(
            tl.load(here).to(tl.float32),
            tl.load(here + 1),
            tl.load(here + 2).to(tl.float32),
            tl.load(here + 3).to(tl.int32),
            tl.load(here + 4).to(tl.int32),
        )
    else:
        facts = unfiltered(rows, r, top, sums, temperature, G)
    mass = masses(top, sums, facts.best, temperature, facts.last, G)
    if rows.settled is not None:
        below = tl.where(facts.best == float("inf"), 0.0, top - facts.best)
        mass = tl.where((top >= facts.cut) & (tl.exp(below / temperature) >= least * 0.9999), mass, 0.0)
    return facts, mass


@triton.jit
def facts_of(rows, r, temperature, G: tl.constexpr):
    facts, _ = read_facts(rows, r, temperature, -1.0, G)
    return facts


@triton.jit
def weigh(x, ids, temperature, facts, least):
    """Weights in float64 of entries ``x``: 0 outside the support, else exp((x - best) / T)."""
    endless = facts.best == float("inf")
    x = tl.where(endless, tl.where(x == float("inf"), 0.0, float("-inf")), x)
    base = tl.where(endless, 0.0, facts.best)
    w = tl.exp((x.to(tl.float64) - base.to(tl.float64)) / temperature.to(tl.float64))
    kept = ((x > facts.cut) | ((x == facts.cut) & (ids <= facts.last))) & (w >= least)
    return tl.where(kept, w, 0.0)


@triton.jit
def weight_of(rows, r, token, temperature, facts, least):
    """The weight of one id."""
    return weigh(entries(rows.data + r * rows.stride, token, token >= 0), token, temperature, facts, least)


@triton.jit
def log_probability(rows, r, token, G: tl.constexpr):
    """log-softmax of the raw row at a token, from the survey's third field."""
    top, _ = read_survey(rows, r, G)
    group = tl.arange(0, G)
    sums = rows.stats + (r * rows.fields + 2) * rows.groups + group
    sums = tl.load(sums, mask=group < rows.groups, other=0.0)
    best = tl.max(top, axis=0)
    x = tl.load(rows.data + r * rows.stride + token).to(tl.float64)
    mass = tl.sum((sums * tl.exp(tl.where(sums > 0.0, top - best, 0.0))).to(tl.float64), axis=0)
    return tl.where(best == float("inf"), 0.0, x - best.to(tl.float64) - tl.log(mass)).to(tl.float32)


@triton.jit
def of_request(value, values, b):
    """A parameter of request b: one number for all, or a tensor."""
    if values is not None:
        value = tl.load(values + b)
    return value
