"""The distribution q that a draft was drawn from: a point mass, raw logits under the request's own filters, or
probabilities as they are; over the whole vocabulary or over a part of it."""

from typing import NamedTuple

import triton
import triton.language as tl

from .row import MANY, Facts, entries, facts_of, read_survey, unfiltered, weigh


class Drafts(NamedTuple):
    """The draft rows of a call (``rows.data`` None: every draft is a point mass)."""

    rows: tl.tensor
    kind: tl.tensor  # not 0: this one is a point mass; or None
    ids: tl.tensor  # the ids that the columns stand for, ascending; or None
    steps: tl.tensor  # halvings that find one of them


class Proposal(NamedTuple):
    row: tl.tensor
    dense: tl.tensor  # its row counts: it is no point mass
    usable: tl.tensor
    q: tl.tensor  # of the draft
    facts: Facts  # of a row of logits


@triton.jit
def draft_probability(drafts, d, ids, mask, facts, temperature, least, PROBS: tl.constexpr):
    """q(ids) of draft row d in float64."""
    rows = drafts.rows
    column = ids
    if drafts.ids is not None:
        column = ids * 0
        end = column + rows.columns
        for _ in range(drafts.steps):
            middle = (column + end) // 2
            open_ = column < end
            right = open_ & (tl.load(drafts.ids + middle, mask=mask & open_, other=MANY) < ids)
            column = tl.where(right, middle + 1, column)
            end = tl.where(open_ & (right == 0), middle, end)
        mask = mask & (column < rows.columns)
        mask = mask & (tl.load(drafts.ids + column, mask=mask, other=-1) == ids)
    begin = rows.data + d * rows.stride
    if PROBS:
        q = tl.load(begin + column, mask=mask, other=0.0).to(tl.float32).to(tl.float64)
    else:
        q = weigh(entries(begin, column, mask), column, temperature, facts, least) / facts.total
    return tl.where(mask, q, 0.0)


@triton.jit
def read_proposal(drafts, d, draft, temperature, least, RAW: tl.constexpr, PROBS: tl.constexpr, G: tl.constexpr):
    """Draft d of the call with token ``draft`` (-1: none, unusable). RAW: rows of logits before their filters."""
    nothing = tl.full([], 0.0, tl.float32)
    facts = Facts(nothing, tl.full([], 1.0, tl.float64), nothing, draft, draft)
    usable = draft >= 0
    dense = usable & (draft < 0)
    q = tl.full([], 1.0, tl.float64)
    if drafts.rows.data is not None:
        dense = draft >= 0
        if drafts.kind is not None:
            dense = dense & (tl.load(drafts.kind + d, mask=dense, other=1) == 0)
        if dense:
            if PROBS:
                _, sums = read_survey(drafts.rows, d, G)
                usable = tl.min(sums, axis=0) >= 0.0
            else:
                if RAW:
                    top, sums = read_survey(drafts.rows, d, G)
                    facts = unfiltered(drafts.rows, d, top, sums, temperature, G)
                else:
                    facts = facts_of(drafts.rows, d, temperature, G)
                usable = (facts.nan == 0) & (facts.best > float("-inf"))
            if usable:
                q = draft_probability(drafts, d, draft, True, facts, temperature, -1.0 if RAW else least, PROBS)
                usable = q > 0.0
    return Proposal(d, dense, usable, q, facts)
