"""First launch: every row of a call, split over the vocabulary, to a few numbers per group of 64 ids.

    top   the largest entry of the group; NaN counts as -inf
    sum   of exp((l - top) / T), so 1 to 64, or 0 in a group without a candidate; negative if the group holds a NaN
    sum1  the same at T = 1, where log-probabilities are asked for
    Rows of draft probabilities: sum = -1 if an entry is NaN, infinite or negative, else 1.

They lie as [row][field][group] in float32. With T and the row's maximum known, masses and totals follow from them, so
what comes later touches V/64 numbers per row, and of the row itself only the groups that matter.
"""

import triton
import triton.language as tl

from .row import GROUP, of_request

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
        tl.store(out + groups + group, tl.where((nan | bad) > 0, -1.0, 1.0), mask=group < groups)
    else:
        below = tl.where(top == float("-inf"), 0.0, top)
        below = x - tl.where(below == float("inf"), 0.0, below)[:, None]
        total = tl.sum(tl.exp(below / temperature), axis=1)
        tl.store(out + groups + group, tl.where(nan > 0, -tl.maximum(total, 1.0), total), mask=group < groups)
        if LOGPROBS:
            tl.store(out + 2 * groups + group, tl.sum(tl.exp(below), axis=1), mask=group < groups)


@triton.jit
def slot_of(cu_drafts, draft_count, width):
    """The place of a program (request, slot): slots up to width - 1 are the request's target rows, then its draft rows.

    Returns (request, slot, the request's first row in cu_drafts' count, its drafts; -1: bad, no row may be touched).
    """
    b = tl.program_id(0)
    slot = tl.program_id(1)
    first = b
    count = b * 0
    if cu_drafts is not None:
        first = tl.load(cu_drafts + b)
        count = tl.load(cu_drafts + b + 1) - first
        if (first < 0) | (count < 0) | (first + count > draft_count) | (count >= width):
            count = count * 0 - 1
    return b, slot, first, count


@triton.jit
def survey_kernel(
    target, target_stride, columns, target_stats, target_groups,  # M rows
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_kind,  # N rows or None
    cu_drafts, draft_count, width,  # cu_drafts None: one row per request
    temperature, temperatures,  # a number for all, or a tensor
    FIELDS: tl.constexpr, PROBS: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs (request, slot, chunk of the vocabulary). ALL: greedy requests' draft rows, too."""
    b, slot, first, count = slot_of(cu_drafts, draft_count, width)
    chunk = tl.program_id(2)
    t = of_request(temperature, temperatures, b)
    if slot < width:
        row = (first + slot).to(tl.int64)
        if cu_drafts is not None:
            row += b
        if (slot <= count) & (chunk * TILE < target_groups):
            _survey(target + row * target_stride, columns, chunk, tl.where(t == 0.0, 1.0, t),
                    target_stats + row * FIELDS * target_groups, target_groups, False, FIELDS == 3, TILE)  # fmt: skip
    elif drafts is not None:
        needed = (slot - width < count) & (chunk * TILE < draft_groups)
        if not ALL:
            needed = needed & (t != 0.0)
        row = (first + slot - width).to(tl.int64)
        if draft_kind is not None:
            needed = needed & (tl.load(draft_kind + row, mask=needed, other=1) == 0)
        if needed:
            _survey(drafts + row * draft_stride, draft_columns, chunk, tl.where(t == 0.0, 1.0, t),
                    draft_stats + row * 2 * draft_groups, draft_groups, PROBS, False, TILE)  # fmt: skip
