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

from .row import GROUP

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
def survey_kernel(
    target, target_stride, columns, target_stats, target_groups, target_chunks,  # M rows
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_kind,  # N rows or None
    cu_drafts, draft_count, width,  # None: one row per request
    temperature, temperatures,  # a number for all, or a tensor
    chunks,  # the larger number of chunks of the two kinds of rows
    DRAFT_PROBS: tl.constexpr, LOGPROBS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // chunks
    chunk = tl.program_id(0) % chunks
    slot = tl.program_id(1)  # 0 .. width - 1: target rows of the request; from width on: its draft rows
    first = b
    count = 0
    if cu_drafts is not None:
        first = tl.load(cu_drafts + b)
        count = tl.load(cu_drafts + b + 1) - first
        if (first < 0) | (count < 0) | (first + count > draft_count) | (count >= width):
            count = -1  # no row of it is touched
    t = temperature
    if temperatures is not None:
        t = tl.load(temperatures + b)
    if slot < width:
        if (slot <= count) & (chunk < target_chunks):
            row = first + slot
            if cu_drafts is not None:
                row += b
            out = target_stats + row.to(tl.int64) * (3 if LOGPROBS else 2) * target_groups
            begin = target + row.to(tl.int64) * target_stride
            _survey(begin, columns, chunk, tl.where(t == 0.0, 1.0, t), out, target_groups, False, LOGPROBS, TILE)
    elif drafts is not None:
        needed = (slot - width < count) & (t != 0.0)
        row = first + slot - width
        if draft_kind is not None:
            needed = needed & (tl.load(draft_kind + row, mask=needed, other=1) == 0)
        if needed:
            out = draft_stats + row.to(tl.int64) * 2 * draft_groups
            begin = drafts + row.to(tl.int64) * draft_stride
            _survey(begin, draft_columns, chunk, t, out, draft_groups, DRAFT_PROBS, False, TILE)
