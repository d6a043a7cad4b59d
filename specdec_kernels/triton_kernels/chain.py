"""Last launch of ``verify``: one program per request walks its rows, judges the drafts and draws the last token.

Launches: survey (all rows, split over the vocabulary); settle (all rows; only with filters or rule "typical"); this.
"""

import triton
import triton.language as tl

from ..reference import request
from .draw import draw
from .launch import Matrix, Sampling, describe, launch, on_device, padded
from .philox import COIN, LAST, PLAIN, uniform
from .proposal import Drafts, draft_probability, read_proposal
from .row import (
    GROUP,
    SETTLED,
    Rows,
    argmax,
    entries,
    facts_of,
    log_probability,
    of_request,
    read_facts,
    read_survey,
    unfiltered,
    weigh,
    weight_of,
)

HARD_TARGET, NO_CANDIDATE = tl.constexpr(request.HARD_TARGET), tl.constexpr(request.NO_CANDIDATE)
BAD_VALUE, BAD_DRAFT = tl.constexpr(request.BAD_VALUE), tl.constexpr(request.BAD_DRAFT)
STEP = tl.constexpr(2048)  # ids at a time where a whole row is summed up
ENTROPY_OF_A_POINT = tl.constexpr(-1e-5)


@triton.jit
def good_sampling(t, top_p, least):
    """Whether the parameters can be used; false for NaN."""
    return (t >= 0.0) & (t < float("inf")) & (top_p >= 0.0) & (least <= 1.0)


@triton.jit
def coin(seeds, positions, b, i):
    """Coin i of request b. The keys are loaded here so that nothing derived from them stays in registers."""
    return uniform(tl.load(seeds + b), tl.load(positions + b), i + COIN, i * 0)


@triton.jit
def typical_bound(eps, delta, entropy):
    """min(eps, delta * exp(-H)): what p(x) has to exceed (Medusa, 2401.10774)."""
    return tl.minimum(tl.full([], eps, tl.float64), delta * tl.exp(-entropy))


@triton.jit
def left_over(target, r, facts, drafts, proposal, draft, temperature, least, ratio,
              PROBS: tl.constexpr, DENSE: tl.constexpr):  # fmt: skip
    """sum max(ratio * p - q, 0) over row r."""
    total = tl.full([], 0.0, tl.float64)
    scale = ratio / facts.total
    tops = target.stats + r * target.fields * target.groups
    for at in range(0, target.columns, STEP):
        ids = at + tl.arange(0, STEP)
        inside = ids < target.columns
        inside = inside & (tl.load(tops + ids // GROUP, mask=inside, other=float("-inf")) >= facts.cut)
        if tl.max(inside.to(tl.int32), axis=0) > 0:
            x = entries(target.data + r * target.stride, ids, inside)
            w = weigh(x, ids, temperature, facts, least) * scale
            w = tl.where((ids == draft) & (proposal.dense == 0), 0.0, w)
            if DENSE:
                if proposal.dense:
                    w -= draft_probability(drafts, proposal.row, ids, inside, proposal.facts, temperature, least, PROBS)
            total += tl.sum(tl.maximum(w, 0.0), axis=0)
    return total


@triton.jit
def chance(s, ratio):
    """S/(S + 1 - r): with what chance a block that could go on ends here."""
    return tl.where(s + 1.0 - ratio > 0.0, s / tl.where(s + 1.0 - ratio > 0.0, s + 1.0 - ratio, 1.0), 1.0)


@triton.jit
def _walk(target, drafts, draft_tokens, start, b, proposals, t, least, theta, eps, delta, seeds, positions, going,
          RULE: tl.constexpr, RANDOM: tl.constexpr, PROBS: tl.constexpr, DENSE: tl.constexpr,
          G: tl.constexpr, DRAFT_G: tl.constexpr):  # fmt: skip
    """Judges the drafts: how many are accepted, flags, and r of the residual max(r*p - q, 0) that gives the last token
    (0: p itself does)."""
    accepted = start * 0
    flags = start * 0
    residual = tl.full([], 0.0, tl.float64)
    ratio = tl.full([], 1.0, tl.float64)
    i = start * 0
    while going:
        r = (start + b + i).to(tl.int64)
        draft = tl.load(draft_tokens + start + i, mask=i < proposals, other=-1).to(tl.int32)
        accept = draft < -1
        if (t == 0.0) & (RULE != "threshold"):
            top, sums = read_survey(target, r, G)
            if (tl.min(sums, axis=0) < 0.0) | (tl.max(top, axis=0) == float("inf")):
                flags = flags | HARD_TARGET
            accept = (draft >= 0) & (argmax(target, r, top, G) == draft)
            if RULE == "typical":
                accept = accept & (typical_bound(eps, delta, tl.full([], ENTROPY_OF_A_POINT, tl.float64)) < 1.0)
            accepted += accept.to(tl.int32)
        elif RANDOM or RULE == "threshold":
            temperature = tl.where(t == 0.0, 1.0, t)
            facts = facts_of(target, r, temperature, G)
            candidates = facts.best > float("-inf")
            if (facts.nan != 0) | (facts.best == float("inf")):
                flags = flags | HARD_TARGET
            if RULE == "typical":
                if (draft >= 0) & candidates:
                    p = weight_of(target, r, draft, temperature, facts, least) / facts.total
                    accept = p > typical_bound(eps, delta, tl.load(target.settled + r * SETTLED + 5))
                accepted += accept.to(tl.int32)
            else:
                d = (start + i).to(tl.int64)
                proposal = read_proposal(drafts, d, draft, temperature, least, RULE == "threshold", PROBS, DRAFT_G)
                if (draft >= 0) & (proposal.usable == 0):
                    flags = flags | BAD_DRAFT
                judged = proposal.usable & candidates
                w = tl.where(judged, weight_of(target, r, draft, temperature, facts, least), 0.0)
                if RULE == "threshold":
                    top, sums = read_survey(target, r, G)
                    raw = unfiltered(target, r, top, sums, temperature, G)
                    p = weight_of(target, r, draft, temperature, raw, -1.0) / raw.total
                    accept = judged & (w > 0.0) & (p / proposal.q > tl.full([], theta, tl.float64))
                    accepted += accept.to(tl.int32)
                elif RULE == "token":
                    if judged:
                        accept = coin(seeds, positions, b, i) * proposal.q < w / facts.total
                        residual = (accept == 0).to(tl.float64)
                    accepted += accept.to(tl.int32)
                else:  # block: the longest prefix whose coin is below its h
                    h = ratio
                    u = coin(seeds, positions, b, tl.maximum(i - 1, 0))
                    if judged & (i > 0) & (u < ratio):
                        s = left_over(target, r, facts, drafts, proposal, draft, temperature, least, ratio, PROBS,
                                      DENSE)  # fmt: skip
                        h = chance(s, ratio)
                    if (i == 0) | (u < h):
                        accepted = i
                        residual = tl.where(judged, ratio, 0.0)
                    accept = judged
                    ratio = tl.minimum(ratio * (w / facts.total) / tl.where(judged, proposal.q, 1.0), 1.0)
        i += 1
        going = accept
    return accepted, flags, residual


@triton.jit(do_not_specialize=["steps", "draft_count", "width"])
def verify_kernel(
    target, target_stride, columns, target_stats, target_groups, target_settled,
    drafts, draft_stride, draft_columns, draft_stats, draft_groups, draft_settled, draft_kind, draft_ids, steps,
    draft_tokens, cu_drafts, draft_count, width,
    temperature, temperatures, top_p, top_ps, min_p, min_ps, theta, thetas, eps, delta, seeds, positions,
    tokens, num_accepted, logprobs, all_flags,
    RULE: tl.constexpr, FIELDS: tl.constexpr, PROBS: tl.constexpr,
    G: tl.constexpr, DRAFT_G: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start = tl.load(cu_drafts + b)
    count = tl.load(cu_drafts + b + 1) - start
    t = of_request(temperature, temperatures, b)
    least = of_request(min_p, min_ps, b)
    bound = of_request(theta, thetas, b)
    good = (start >= 0) & (count >= 0) & (start + count <= draft_count) & (count < width)
    good = good & ((b > 0) | (start == 0)) & ((b + 1 < tl.num_programs(0)) | (start + count == draft_count))
    good = good & good_sampling(t, of_request(top_p, top_ps, b), least) & (bound == bound)

    # The proposals end before the first -1; all of them have to be ids.
    place = tl.arange(0, WIDTH)
    proposed = tl.load(draft_tokens + start + place, mask=good & (place < count), other=-1)
    proposals = tl.min(tl.where(proposed == -1, place, width - 1), axis=0)
    wrong = ((proposed < 0) | (proposed >= columns)) & (place < proposals)
    good = good & (tl.max(wrong.to(tl.int32), axis=0) == 0)

    RANDOM: tl.constexpr = seeds is not None
    DENSE: tl.constexpr = drafts is not None
    rows = Rows(target, target_stride, columns, target_stats, FIELDS, target_groups, target_settled)
    q = Drafts(
        Rows(drafts, draft_stride, draft_columns, draft_stats, 2, draft_groups, draft_settled),
        draft_kind, draft_ids, steps,
    )  # fmt: skip
    accepted, flags, residual = _walk(
        rows, q, draft_tokens, start, b, proposals, t, least, bound, eps, delta, seeds, positions, good,
        RULE, RANDOM, PROBS, DENSE, G, DRAFT_G,
    )  # fmt: skip

    token = b * 0 - 1
    r = (start + b + accepted).to(tl.int64)
    if good == 0:
        flags = b * 0 + BAD_VALUE
    elif t == 0.0:
        top, _ = read_survey(rows, r, G)
        token = argmax(rows, r, top, G)
    elif RANDOM:
        facts, mass = read_facts(rows, r, t, least, G)
        if facts.best > float("-inf"):
            refused = tl.load(draft_tokens + start + accepted, mask=residual > 0.0, other=-1).to(tl.int32)
            d = (start + accepted).to(tl.int64)
            proposal = read_proposal(q, d, refused, t, least, False, PROBS, DRAFT_G)
            point = tl.where(proposal.dense, -1, refused)
            factor = tl.where(proposal.dense, facts.total / tl.where(residual > 0.0, residual, 1.0), 0.0)
            purpose = tl.where(proposals == 0, PLAIN, accepted + LAST)
            token = draw(rows, r, facts, mass, t, least, factor, point, q, proposal, tl.load(seeds + b),
                         tl.load(positions + b), purpose, DENSE, PROBS, False, G)  # fmt: skip
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
            id_ = tl.sum(tl.where(place == i, emitted, 0), axis=0)
            tl.store(logprobs + out + i, log_probability(rows, (start + b + i).to(tl.int64), id_, G))


def verify(
    target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind,
    temperature, top_k, top_p, min_p, seed, position, rule, theta, typical, tokens, num_accepted, logprobs, flags,
):  # fmt: skip
    requests, width = tokens.shape
    if requests == 0:
        return
    sampling = Sampling(temperature, top_k, top_p, min_p, seed, position, rule)
    target = Matrix(target_logits, sampling.settled, logprobs is not None)
    draft = None
    if draft_rows is not None and sampling.reads_drafts:
        draft = Matrix(draft_rows, sampling.settled and draft_is_logits and rule != "threshold")
    with on_device(target_logits):
        describe(target, draft, not draft_is_logits, draft_kind, cu_drafts, requests, sampling)
        launch(
            verify_kernel, (requests,), target.threads,
            *target.arguments, *Matrix.arguments_of(draft), draft_kind, draft_ids,
            0 if draft_ids is None else len(draft_ids).bit_length(),
            draft_tokens, cu_drafts, len(draft_tokens), width,
            *sampling.temperature, *sampling.top_p, *sampling.min_p, *sampling.theta(theta), *typical, seed, position,
            tokens, num_accepted, logprobs, flags,
            RULE=rule, FIELDS=target.fields, PROBS=not draft_is_logits,
            G=target.padded, DRAFT_G=1 if draft is None else draft.padded, WIDTH=padded(width),
        )  # fmt: skip
