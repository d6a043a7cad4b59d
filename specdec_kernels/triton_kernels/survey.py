"""First launch: every row of a call, split over the vocabulary, to a few numbers per group of 64 ids.

    top   the largest entry of the group; NaN counts as -inf
    sum   of exp((l - top) / T), so 1 to 64, or 0 in a group without a candidate; negative if the group holds a NaN
    sum1  the same at T = 1, where log-probabilities are asked for
    Rows of draft probabilities: sum of the entries, or -1 if one of them is NaN, infinite or negative.

They lie as [row][field][group] in float32. With T and the row's maximum known, masses and totals follow from them, so
what comes later touches V/64 numbers per row, and of the row itself only the groups that matter.
"""

import triton
import triton.language as tl

from .row import GROUP, MANY, of_request

TILE = 64  # groups per program


@triton.jit
def _survey(row, columns, chunk, temperature, out, groups, PROBS: tl.constexpr, LOGPROBS: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    group = chunk * TILE + tl.arange(0, TILE)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    raw = tl.load(row + ids, mask=ids < columns, other=0.0 if PROBS else float("-inf")).to(tl.float32)
    nan = tl.max((raw != raw).to(tl.int32), axis=1)
    x = tl.where(raw == raw, raw, float("-inf"))
    top = tl.max(x, axis=1)
    tl.store(out + group, top, mask=group < groups)
    if PROBS:
        bad = tl.max((((raw == raw) & (raw < 0.0)) | (raw == float("inf"))).to(tl.int32), axis=1)
        tl.store(out + groups + group, tl.where((nan | bad) > 0, -1.0, tl.sum(raw, axis=1)), mask=group < groups)
    else:
        below = tl.where(top == float("-inf"), 0.0, top)
        below = x - tl.where(below == float("inf"), 0.0, below)[:, None]
        total = tl.sum(tl.exp(below / temperature), axis=1)
        tl.store(out + groups + group, tl.where(nan > 0, -tl.maximum(total, 1.0), total), mask=group < groups)
        if LOGPROBS:
            tl.store(out + 2 * groups + group, tl.sum(tl.exp(below), axis=1), mask=group < groups)


@triton.jit
def request_of(row, bounds, requests, EXTRA: tl.constexpr):
    """The request that owns a row: bounds[b] <= row < bounds[b + 1], EXTRA more rows per request; 0 if none does."""
    owner = tl.full([], MANY, tl.int32)
    for at in range(0, requests, 256):
        b = at + tl.arange(0, 256)
        first = tl.load(bounds + b, mask=b < requests, other=0) + b * EXTRA
        end = tl.load(bounds + b + 1, mask=b < requests, other=0) + (b + 1) * EXTRA
        mine = (b < requests) & (first <= row) & (row < end)
        owner = tl.minimum(owner, tl.min(tl.where(mine, b, MANY), axis=0))
    return tl.where(owner < MANY, owner, 0)


@triton.jit
def request_of_program(target_rows, bounds, requests):
    """(whether the program has a target row, the row, its request): target rows come first, then draft rows."""
    row = tl.program_id(0)
    targets = row < target_rows
    row = tl.where(targets, row, row - target_rows)
    b = row
    if bounds is not None:
        if targets:
            b = request_of(row, bounds, requests, 1)
        else:
            b = request_of(row, bounds, requests, 0)
    return targets, row.to(tl.int64), b


@triton.jit(do_not_specialize=["target_rows", "requests"])
def survey_kernel(
    target, target_stride, columns, target_stats, target_groups, target_rows,
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_kind,
    bounds, requests,  # bounds None: one row per request
    temperature, temperatures,  # a number for all, or a tensor
    FIELDS: tl.constexpr, PROBS: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs (row, chunk of the vocabulary). ALL: greedy requests' draft rows, too."""
    targets, r, b = request_of_program(target_rows, bounds, requests)
    chunk = tl.program_id(1)
    t = of_request(temperature, temperatures, b)
    positive = tl.where(t == 0.0, 1.0, t)
    if targets:
        if chunk * TILE < target_groups:
            _survey(target + r * target_stride, columns, chunk, positive, target_stats + r * FIELDS * target_groups,
                    target_groups, False, FIELDS == 3, TILE)  # fmt: skip
    elif drafts is not None:
        needed = chunk * TILE < draft_groups
        if not ALL:
            needed = needed & (t != 0.0)
        if draft_kind is not None:
            needed = needed & (tl.load(draft_kind + r, mask=needed, other=1) == 0)
        if needed:
            _survey(drafts + r * draft_stride, draft_columns, chunk, positive, draft_stats + r * 2 * draft_groups,
                    draft_groups, PROBS, False, TILE)  # fmt: skip
