"""Second launch, only with filters: one program per row finds the row's support and total (facts, row.py).

Triton programs can't wait for each other, so selection needs a launch of its own if all rows are to be settled at the
same time rather than one after the other by the request's program.

1. A floor from the survey alone, by bisection on the groups' tops: for top-k a value that k tops reach; for top-p one
   above which the groups' tops and masses vouch for enough mass. Groups below can't matter; the others become a list.
2. The cut, by bisection on the listed groups' entries. Each pass sums what lies at or above the middle and moves the
   ends of the bracket onto entries, so it takes about log2(entries left) passes.
3. Ties at the cut are kept in the order of their ids; then the total of what is left.
"""

import triton
import triton.language as tl

from .row import GROUP, LOWEST, MANY, SETTLED, Rows, entries, masses, of_request, read_survey, unfiltered
from .survey import request_of_program

TILE = 64  # listed groups per step
FLOOR_STEPS = tl.constexpr(16)  # of the floor's bisection, which need not be exact


@triton.jit
def _key(x):
    """Orders float32 as integers (int64, so that differences fit); -0 and 0 share one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _of_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _floor(top, mass, best, temperature, by_count, top_k, need):
    """A value that the cut is not below."""
    low = _key(tl.full([], LOWEST, tl.float32))
    high = _key(best) + 1
    for _ in range(FLOOR_STEPS):
        middle = low + (high - low) // 2
        c = _of_key(middle)
        # A group whose top reaches c holds at least the top's weight, and all but 63 weights below c of its mass.
        vouched = tl.maximum(tl.exp((top - best) / temperature), mass - 63.0 * tl.exp((c - best) / temperature))
        vouched = tl.where(by_count, 1.0, vouched)
        wanted = tl.where(by_count, top_k.to(tl.float64), need * 1.00003)
        if tl.sum(tl.where(top >= c, vouched, 0.0).to(tl.float64), axis=0) >= wanted:
            low = middle
        else:
            high = middle
    return _of_key(low)


@triton.jit
def _candidates(row, columns, listed, count, at, cut, last, TILE: tl.constexpr):
    """A tile of listed groups: ids, entries, and which entries are in the support so far."""
    place = at + tl.arange(0, TILE)
    group = tl.load(listed + place, mask=place < count, other=0)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = entries(row, ids, (ids < columns) & (place < count)[:, None])
    return ids, x, (x > cut) | ((x == cut) & (ids <= last))


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, axis=1).to(tl.float64), axis=0)


@triton.jit
def _cut(row, columns, listed, count, best, temperature, cut, last, floor, wanted, by_count, TILE: tl.constexpr):
    """The largest entry at and above which the support holds ``wanted`` (a count or a mass)."""
    low = _key(floor)
    high = _key(best)
    while low < high:
        middle = low + (high - low + 1) // 2
        c = _of_key(middle)
        reached = tl.full([], 0.0, tl.float64)
        above = best
        below = _of_key(low)
        for at in range(0, count, TILE):
            _, x, kept = _candidates(row, columns, listed, count, at, cut, last, TILE)
            value = tl.where(by_count, 1.0, tl.exp((x - best) / temperature))
            reached += _sum(tl.where(kept & (x >= c), value, 0.0))
            above = tl.minimum(above, tl.min(tl.min(tl.where(kept & (x >= c), x, best), axis=1), axis=0))
            below = tl.maximum(below, tl.max(tl.max(tl.where(kept & (x < c), x, below), axis=1), axis=0))
        if reached >= wanted:
            low = _key(above)
        else:
            high = _key(below)
    return _of_key(low)


@triton.jit
def _nth_equal(row, columns, listed, count, value, n, cut, last, TILE: tl.constexpr):
    """The id of the n-th entry, from 1, that equals ``value``."""
    found = last
    seen = n * 0
    for at in range(0, count, TILE):
        ids, x, kept = _candidates(row, columns, listed, count, at, cut, last, TILE)
        equal = tl.reshape((kept & (x == value)).to(tl.int32), [TILE * GROUP])
        here = tl.sum(equal, axis=0)
        if (seen < n) & (seen + here >= n):
            hit = (tl.cumsum(equal, axis=0) == n - seen) & (equal > 0)
            found = tl.min(tl.where(hit, tl.reshape(ids, [TILE * GROUP]), MANY), axis=0)
        seen += here
    return found


@triton.jit
def _settle(rows, r, listed, temperature, top_k, top_p, min_p, ENTROPY: tl.constexpr, G: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    row = rows.data + r * rows.stride
    columns = rows.columns
    listed += r * rows.groups
    top, sums = read_survey(rows, r, G)
    facts = unfiltered(rows, r, top, sums, temperature, G)
    best = facts.best
    total = facts.total
    cut = facts.cut
    last = facts.last
    by_count = (top_k > 0) & (top_k < columns)
    by_mass = top_p < 1.0
    by_weight = min_p > 0.0
    # What the entropy sums: p log(p + 1e-5), of a point mass log(1 + 1e-5).
    entropy = tl.full([], -1e-5, tl.float64)
    if (best < float("inf")) & (best > float("-inf")) & (by_count | by_mass | by_weight | ENTROPY):
        mass = masses(top, sums, best, temperature, last, G)
        floor = tl.full([], LOWEST, tl.float32)
        if (by_count | by_mass) & (rows.groups > TILE):
            floor = _floor(top, mass, best, temperature, by_count, top_k, top_p.to(tl.float64) * total)
        active = (top >= floor) & (top > float("-inf"))
        if (by_count == 0) & (by_mass == 0):
            # Without filters all weights are needed for the entropy only, and p below 1e-9 count as p log(1e-5).
            relevant = tl.where(by_weight, min_p * 0.9999, 1e-9 * total.to(tl.float32))
            active = tl.exp((top - best) / temperature) >= relevant
        rank = tl.cumsum(active.to(tl.int32), axis=0)
        tl.store(listed + rank - 1, tl.arange(0, G), mask=active)
        count = tl.max(rank, axis=0)
        tl.debug_barrier()  # the list is read by other threads than wrote it

        for stage in range(2):  # top-k, then top-p of what is left
            counting = stage == 0
            if (counting & by_count) | ((stage == 1) & by_mass):
                wanted = tl.where(counting, top_k.to(tl.float64), top_p.to(tl.float64) * total)
                value = _cut(row, columns, listed, count, best, temperature, cut, last, floor, wanted, counting, TILE)
                above_count = tl.full([], 0.0, tl.float64)
                above_mass = tl.full([], 0.0, tl.float64)
                equal = tl.full([], 0.0, tl.float64)
                for at in range(0, count, TILE):
                    _, x, kept = _candidates(row, columns, listed, count, at, cut, last, TILE)
                    above_count += _sum(tl.where(kept & (x > value), 1.0, 0.0))
                    above_mass += _sum(tl.where(kept & (x > value), tl.exp((x - best) / temperature), 0.0))
                    equal += _sum(tl.where(kept & (x == value), 1.0, 0.0))
                each = tl.exp((value - best) / temperature).to(tl.float64)
                n = tl.where(counting, wanted - above_count, tl.ceil((wanted - above_mass) / each))
                n = tl.minimum(tl.maximum(n, 1.0), equal)
                if n < equal:
                    last = _nth_equal(row, columns, listed, count, value, n.to(tl.int32), cut, last, TILE)
                elif value > cut:
                    last = columns - 1
                cut = value
                total = above_mass + n * each

        if by_count | by_mass | by_weight:
            total = tl.full([], 0.0, tl.float64)
            for at in range(0, count, TILE):
                _, x, kept = _candidates(row, columns, listed, count, at, cut, last, TILE)
                w = tl.exp((x - best) / temperature)
                total += _sum(tl.where(kept & (w >= min_p), w, 0.0))
        if ENTROPY:
            entropy = tl.full([], 0.0, tl.float64)
            if (by_count == 0) & (by_mass == 0) & (by_weight == 0):
                unlisted = tl.sum(tl.where(active, 0.0, mass).to(tl.float64), axis=0)
                entropy = unlisted / total * 11.512925464970229
            for at in range(0, count, TILE):
                _, x, kept = _candidates(row, columns, listed, count, at, cut, last, TILE)
                w = tl.exp((x - best) / temperature)
                p = tl.where(kept & (w >= min_p), w, 0.0) / total.to(tl.float32)
                entropy -= _sum(p * tl.log(p + 1e-5))
    out = rows.settled + r * SETTLED
    tl.store(out, best.to(tl.float64))
    tl.store(out + 1, total)
    tl.store(out + 2, cut.to(tl.float64))
    tl.store(out + 3, last.to(tl.float64))
    tl.store(out + 4, facts.nan.to(tl.float64))
    tl.store(out + 5, entropy)


@triton.jit(do_not_specialize=["target_rows", "requests", "top_k"])
def settle_kernel(
    target, target_stride, columns, target_stats, target_groups, target_rows, target_listed, target_settled,
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_listed, draft_settled, draft_kind,
    bounds, requests,
    temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps,
    FIELDS: tl.constexpr, ALL: tl.constexpr, ENTROPY: tl.constexpr,
    G: tl.constexpr, DRAFT_G: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program per row, as in the survey. ALL: greedy requests, too, as at temperature 1."""
    targets, r, b = request_of_program(target_rows, bounds, requests)
    t = of_request(temperature, temperatures, b)
    k = of_request(top_k, top_ks, b)
    p = of_request(top_p, top_ps, b)
    least = of_request(min_p, min_ps, b)
    wanted = t >= 0.0
    if not ALL:
        wanted = t != 0.0
    t = tl.where(t == 0.0, 1.0, t)
    if targets:
        if wanted:
            rows = Rows(target, target_stride, columns, target_stats, FIELDS, target_groups, target_settled)
            _settle(rows, r, target_listed, t, k, p, least, ENTROPY, G, TILE)
    elif drafts is not None:
        if draft_kind is not None:
            wanted = wanted & (tl.load(draft_kind + r, mask=wanted, other=1) == 0)
        if wanted:
            rows = Rows(drafts, draft_stride, draft_columns, draft_stats, 2, draft_groups, draft_settled)
            _settle(rows, r, draft_listed, t, k, p, least, False, DRAFT_G, TILE)
