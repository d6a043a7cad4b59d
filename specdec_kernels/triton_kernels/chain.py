"""Last launch of ``verify``: one program per request walks its rows, judges the drafts and draws the last token.

Launches: survey (all rows, split over the vocabulary), settle (all rows; only with filters), this. Rows after the first
refusal are surveyed, but nothing here looks at them.
"""

import triton
import triton.language as tl

from ..reference import request
from ..registry import Unsupported
from .draw import draft_probability, draw
from .launch import Rows, filtered, launch, on_device, per_request, survey_and_settle, warps
from .philox import COIN, LAST, PLAIN, uniform
from .row import argmax, entries, masses, read_survey, unfiltered, weigh
from .settle import of_request

HARD_TARGET, NO_CANDIDATE = tl.constexpr(request.HARD_TARGET), tl.constexpr(request.NO_CANDIDATE)
BAD_VALUE, BAD_DRAFT = tl.constexpr(request.BAD_VALUE), tl.constexpr(request.BAD_DRAFT)


@triton.jit
def read_facts(row, columns, stats, groups, settled, place, temperature, G: tl.constexpr):
    """What settle stored, or the facts of an unfiltered row; and each group's top and mass or a bound of it."""
    top, sums = read_survey(stats, groups, G)
    if settled is not None:
        settled += place * 5
        best = tl.load(settled).to(tl.float32)
        total = tl.load(settled + 1)
        cut = tl.load(settled + 2).to(tl.float32)
        last = tl.load(settled + 3).to(tl.int32)
        nan = tl.load(settled + 4).to(tl.int32)
    else:
        best, total, cut, last, nan = unfiltered(row, columns, top, sums, temperature, G)
    mass = tl.where(top >= cut, masses(top, sums, best, temperature, last, G), 0.0)
    return top, mass, best, total, cut, last, nan


@triton.jit
def log_probability(row, columns, token, stats, groups, G: tl.constexpr):
    """log-softmax of the raw row at a token."""
    group = tl.arange(0, G)
    top = tl.load(stats + group, mask=group < groups, other=float("-inf"))
    total = tl.load(stats + 2 * groups + group, mask=group < groups, other=0.0)
    best = tl.max(top, axis=0)
    x = tl.load(row + token).to(tl.float32)
    mass = tl.sum((total * tl.exp(tl.where(total > 0.0, top - best, 0.0))).to(tl.float64), axis=0)
    logprob = x.to(tl.float64) - best.to(tl.float64) - tl.log(mass)
    return tl.where(best == float("inf"), 0.0, logprob).to(tl.float32)


@triton.jit
def verify_kernel(
    target, target_stride, columns, target_stats, target_groups, target_settled,
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_settled, draft_kind, draft_ids, steps,
    draft_tokens, cu_drafts, draft_count, width,
    temperature, temperatures, top_p, top_ps, min_p, min_ps, seeds, positions,
    tokens, num_accepted, logprobs, all_flags,
    DRAFT_PROBS: tl.constexpr, G: tl.constexpr, DRAFT_G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start = tl.load(cu_drafts + b)
    count = tl.load(cu_drafts + b + 1) - start
    t = of_request(temperature, temperatures, b)
    p = of_request(top_p, top_ps, b)
    least = of_request(min_p, min_ps, b)
    good = (start >= 0) & (count >= 0) & (start + count <= draft_count) & (count < width)
    good = good & (t >= 0.0) & (t < float("inf")) & (p >= 0.0) & (least <= 1.0)  # false for NaN

    # The proposals end before the first -1; all of them have to be ids.
    place = tl.arange(0, WIDTH)
    proposed = tl.load(draft_tokens + start + place, mask=good & (place < count), other=-1)
    proposals = tl.min(tl.where(proposed == -1, place, width - 1), axis=0)
    wrong = ((proposed < 0) | (proposed >= columns)) & (place < proposals)
    good = good & (tl.max(wrong.to(tl.int32), axis=0) == 0)

    stats_per_row = (3 if logprobs is not None else 2) * target_groups
    flags = tl.where(good, 0, BAD_VALUE)
    accepted = tl.full([], 0, tl.int32)
    token = tl.full([], -1, tl.int32)
    walking = good
    while walking:
        r = (start + b + accepted).to(tl.int64)
        row = target + r * target_stride
        draft = tl.full([], -1, tl.int32)
        if accepted < proposals:
            draft = tl.load(draft_tokens + start + accepted).to(tl.int32)
        accept = False
        if t == 0.0:
            top, sums = read_survey(target_stats + r * stats_per_row, target_groups, G)
            best = tl.max(top, axis=0)
            if (tl.min(sums, axis=0) < 0.0) | (best == float("inf")):
                flags = flags | HARD_TARGET
            if best > float("-inf"):
                token = argmax(row, columns, top, G)
                accept = (draft >= 0) & (token == draft)
            else:
                token = tl.full([], -1, tl.int32)
        elif seeds is not None:
            seed = tl.load(seeds + b)
            position = tl.load(positions + b)
            top, mass, best, total, cut, last, nan = read_facts(
                row, columns, target_stats + r * stats_per_row, target_groups, target_settled, r, t, G
            )
            candidates = best > float("-inf")
            if (nan > 0) | (best == float("inf")):
                flags = flags | HARD_TARGET

            # q, and whether its row is of any use.
            d = (start + accepted).to(tl.int64)
            dense = False
            usable = draft >= 0
            q = tl.full([], 1.0, tl.float64)
            draft_row = row
            draft_best = best
            draft_total = total
            draft_cut = cut
            draft_last = last
            if drafts is not None:
                draft_row = drafts + d * draft_stride
                dense = draft >= 0
                if draft_kind is not None:
                    dense = dense & (tl.load(draft_kind + d, mask=dense, other=1) == 0)
                if dense:
                    draft_stats_here = draft_stats + d * 2 * draft_groups
                    if DRAFT_PROBS:
                        _, sums = read_survey(draft_stats_here, draft_groups, DRAFT_G)
                        usable = tl.min(sums, axis=0) >= 0.0
                    else:
                        _, _, draft_best, draft_total, draft_cut, draft_last, nan = read_facts(
                            draft_row, draft_columns, draft_stats_here, draft_groups, draft_settled, d, t, DRAFT_G,
                        )  # fmt: skip
                        usable = (nan == 0) & (draft_best > float("-inf"))
                    if usable:
                        q = draft_probability(draft_row, draft_columns, draft, True, draft_ids, steps, t, draft_best,
                                              draft_total, draft_cut, draft_last, least,
                                              not DRAFT_PROBS)  # fmt: skip
                        usable = q > 0.0
                    if usable == 0:
                        flags = flags | BAD_DRAFT

            refused = False
            if usable & candidates:
                w = weigh(entries(row, draft, True), draft, t, best, cut, last, least)
                u = uniform(seed, position, accepted + COIN, tl.full([], 0, tl.uint32))
                accept = u * q < w / total
                refused = accept == 0
                token = draft
            if accept == 0:
                token = tl.full([], -1, tl.int32)
                if candidates:
                    purpose = tl.where(proposals == 0, PLAIN, accepted + LAST)
                    token = draw(
                        row, columns, mass, t, best, cut, last, least,
                        tl.where(refused, 1.0 / total, 1.0), tl.where(refused & (dense == 0), draft, -1),
                        refused & dense,
                        draft_row, draft_columns, draft_ids, steps, draft_best, draft_total, draft_cut, draft_last,
                        seed, position, purpose,
                        drafts is not None, not DRAFT_PROBS, G,
                    )  # fmt: skip
        if accept:
            accepted += 1
        else:
            walking = False

    if good & (token < 0):
        flags = flags | NO_CANDIDATE
    emitted = tl.where(place < accepted, proposed, tl.where(place == accepted, token.to(tl.int64), -1))
    out = b.to(tl.int64) * width
    tl.store(tokens + out + place, emitted, mask=place < width)
    tl.store(num_accepted + b, accepted)
    tl.store(all_flags + b, flags)
    if logprobs is not None:
        tl.store(logprobs + out + place, float("nan"), mask=(place < width) & (emitted < 0))
        for i in range(accepted + (token >= 0).to(tl.int32)):
            r = (start + b + i).to(tl.int64)
            id_ = tl.sum(tl.where(place == i, emitted, 0), axis=0)
            logprob = log_probability(
                target + r * target_stride, columns, id_, target_stats + r * stats_per_row, target_groups, G
            )
            tl.store(logprobs + out + i, logprob)


def verify(
    target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind,
    temperature, top_k, top_p, min_p, seed, position, rule, theta, typical, tokens, num_accepted, logprobs, flags,
):  # fmt: skip
    if rule != "token":
        raise Unsupported(f"rule {rule!r}")
    requests, width = tokens.shape
    if requests == 0:
        return
    filters = filtered(top_k, top_p, min_p) and seed is not None
    target = Rows(target_logits, filters, logprobs is not None)
    draft = None if draft_rows is None or seed is None else Rows(draft_rows, filters and draft_is_logits)
    with on_device(target_logits):
        survey_and_settle(
            target, draft, draft_kind, draft_is_logits, cu_drafts, len(draft_tokens), requests, width,
            temperature, top_k, top_p, min_p, logprobs is not None,
        )  # fmt: skip
        launch(
            verify_kernel, (requests,),
            target.rows, target.stride, target.columns, target.stats, target.groups, target.settled,
            *((None, 0, 0, None, 0, None) if draft is None else (
                draft.rows, draft.stride, draft.columns, draft.stats, draft.groups, draft.settled
            )),
            draft_kind, draft_ids, 0 if draft_ids is None else len(draft_ids).bit_length(),
            draft_tokens, cu_drafts, len(draft_tokens), width,
            *per_request(temperature), *per_request(top_p), *per_request(min_p), seed, position,
            tokens, num_accepted, logprobs, flags,
            DRAFT_PROBS=not draft_is_logits, G=target.padded, DRAFT_G=1 if draft is None else draft.padded,
            WIDTH=triton.next_power_of_2(width), warps=warps(target),
        )  # fmt: skip
