"""Reference of ``verify``: one request after the other, one row after the other, in float64.

Arguments, as the public function hands them to every backend:

    target_logits  [M, V] f32/f16/bf16, last dimension contiguous
    draft_tokens   [N] int64, contiguous;  cu_drafts [B + 1] int32, contiguous
    draft_rows     [N, V or Vd] f32/f16/bf16, last dimension contiguous, or None;  draft_is_logits: what they hold
    draft_ids      [Vd] int32 ascending, contiguous, or None;  draft_kind [N] bool, contiguous, or None
    temperature, top_p, min_p   a float that is exact in f32, or a contiguous f32 tensor [B]
    top_k          an int, or a contiguous int32 tensor [B]
    seed, position [B] int64, contiguous; or None, None if every request is greedy
    rule           "token", "block", "typical" or "threshold"
    theta          as temperature, for rule "threshold", else None;  typical (eps, delta), floats exact in f32
    tokens [B, W] int64, num_accepted [B] int32, logprobs [B, W] f32 or None, flags [B] int32: outputs, contiguous

A rule returns (number of accepted drafts, weights of the last token, flags).
"""

import itertools
from dataclasses import dataclass

import torch

from . import filters
from .draws import Exact, accept, draw, shifts
from .philox import LAST, PLAIN
from .request import (
    BAD_DRAFT,
    BAD_VALUE,
    NO_CANDIDATE,
    Rules,
    bounds_are_sound,
    chance,
    changes,
    is_distribution,
    normalised,
    read,
    residual,
    rules_of,
)


@dataclass(kw_only=True)
class Request(Rules):
    """One request: its own rows and numbers, nothing else."""

    target: torch.Tensor  # [K + 1, V] raw logits
    drafts: list  # K ids, -1 = no proposal
    draft_rows: torch.Tensor | None  # [K, V or Vd]
    draft_is_logits: bool
    draft_ids: torch.Tensor | None
    point_mass: list  # K bools

    def draft_distribution(self, i, decide, filtered=True):
        """q of draft ``i`` over the target's vocabulary; None if its row is unusable."""
        draft = self.drafts[i]
        if self.point_mass[i]:
            return filters.one_hot(draft, self.target.shape[1])
        q = self.draft_rows[i].double()
        if self.draft_is_logits:
            if q.isnan().any():
                return None
            row = filters.clean(q)[0]
            q = normalised(self.weights(row, decide)) if filtered else self.unfiltered(row)
        elif not is_distribution(q):
            return None
        if self.draft_ids is not None:
            everywhere = torch.zeros(self.target.shape[1], dtype=torch.float64, device="cpu")
            q = everywhere.index_put((self.draft_ids.long(),), q)
        return q if q[draft] > 0 else None


def rows(r, decide):
    """The request's rows in turn: (i, draft i or -1 at the end, the clean row, its weights, flags so far)."""
    flags = 0
    for i, draft in enumerate([*r.drafts, -1]):
        row, hard = read(r.target[i])
        flags |= hard
        yield i, draft, row, r.weights(row, decide), flags


def token(r, decide):
    """Accept x iff u*q(x) < p(x); at the first refusal draw from (p - q)+ (Leviathan et al., Chen et al.)."""
    for i, draft, _, w, flags in rows(r, decide):
        if draft < 0:
            return i, w, flags
        if r.greedy:
            if w[draft] == 0:
                return i, w, flags
            continue
        q = r.draft_distribution(i, decide)
        if q is None:
            return i, w, flags | BAD_DRAFT
        if not w.any():
            return i, w, flags
        p = normalised(w)
        if not accept(r.seed, r.position, i, float(q[draft]), float(p[draft]), decide):
            return i, residual(p, q), flags


def block(r, decide):
    """All drafts judged together (Sun et al. 2403.10444).

    r_0 = 1, r_i = min(r_{i-1} p_i(x_i)/q_i(x_i), 1); at the block's end h = r, before it h_i = S_i/(S_i + 1 - r_i) with
    S_i = sum (r_i p_{i+1} - q_{i+1})+. Accepted is the longest prefix whose coin is below its h; the last token is
    drawn from (r p - q)+ there, at the end from p.
    """
    if r.greedy:
        return token(r, decide)
    p, q, ratio = [], [], [1.0]
    for i, draft, _, w, flags in rows(r, decide):
        p.append(normalised(w))
        if draft < 0:
            break
        proposal = r.draft_distribution(i, decide)
        if proposal is None:
            flags |= BAD_DRAFT
            break
        if not p[i].any():
            break
        q.append(proposal)
        ratio.append(min(ratio[i] * float(p[i][draft]) / float(proposal[draft]), 1.0))
    end, accepted = len(q), 0
    for i in range(1, end + 1):
        h = ratio[i] if i == end else chance(p[i], q[i], ratio[i])
        if accept(r.seed, r.position, i - 1, 1.0, h, decide):
            accepted = i
    last = p[end] if accepted == end else residual(p[accepted], q[accepted], ratio[accepted])
    return accepted, last, flags


def typical(r, decide):
    """Accept x iff p(x) > min(eps, delta*exp(-H)) (Medusa; lossy). Draft rows are not read."""
    for i, draft, _, w, flags in rows(r, decide):
        p = normalised(w)
        if draft < 0 or not w.any() or not decide.exceeds(float(p[draft]), r.typical_bound(p)):
            return i, w, flags


def threshold(r, decide):
    """Accept x iff it is in the support and P_target(x)/P_draft(x) > theta, both before filters (lossy)."""
    for i, draft, row, w, flags in rows(r, decide):
        if draft < 0:
            return i, w, flags
        q = r.draft_distribution(i, decide, filtered=False)
        if q is None:
            return i, w, flags | BAD_DRAFT
        if not w.any() or not r.support(row, decide)[draft]:
            return i, w, flags
        if not decide.exceeds(float(r.unfiltered(row)[draft] / q[draft]), r.theta):
            return i, w, flags


RULES = {"token": token, "block": block, "typical": typical, "threshold": threshold}


def verify_request(r, decide):
    """Returns (emitted tokens, accepted drafts, flags)."""
    accepted, last, flags = RULES[r.rule](r, decide)
    tokens = r.drafts[:accepted]
    if not last.any():
        return tokens, accepted, flags | NO_CANDIDATE
    if r.greedy:
        tokens.append(filters.argmax(last))
    elif not r.drafts or r.drafts[0] < 0:
        tokens.append(draw(last, r.seed, r.position, PLAIN, 0, decide))
    else:
        tokens.append(draw(last, r.seed, r.position, LAST, accepted, decide))
    return tokens, accepted, flags


def requests(
    target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind, *parameters
):  # fmt: skip
    """The call taken apart into its requests; None for one with a bad value (possible on a GPU only)."""
    vocabulary, bounds, drafts = target_logits.shape[1], cu_drafts.tolist(), draft_tokens.tolist()
    ids = None if draft_ids is None else draft_ids.cpu()
    for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
        rules = rules_of(b, *parameters)
        if rules is None or not bounds_are_sound(b, start, stop, len(cu_drafts) - 1, len(drafts)):
            yield None
            continue
        mine = drafts[start:stop]
        proposed = mine[: mine.index(-1)] if -1 in mine else mine
        if any(not 0 <= x < vocabulary for x in proposed):
            yield None
            continue
        if draft_rows is None:
            point_mass = [True] * len(mine)
        else:
            point_mass = [False] * len(mine) if draft_kind is None else draft_kind[start:stop].tolist()
        yield Request(
            target=target_logits[start + b : stop + b + 1].cpu(), drafts=mine,
            draft_rows=None if draft_rows is None else draft_rows[start:stop].cpu(),
            draft_is_logits=draft_is_logits, draft_ids=ids, point_mass=point_mass, **rules,
        )  # fmt: skip


def verify(*args):
    *call, tokens, num_accepted, logprobs, flags = args
    tokens.fill_(-1)
    num_accepted.zero_()
    if logprobs is not None:
        logprobs.fill_(torch.nan)
    for b, request in enumerate(requests(*call)):
        if request is None or len(request.drafts) >= tokens.shape[1]:
            flags[b] = BAD_VALUE
            continue
        emitted, accepted, flags[b] = verify_request(request, Exact())
        num_accepted[b] = accepted
        if emitted:
            tokens[b, : len(emitted)] = torch.tensor(emitted, device="cpu")
        if logprobs is not None:
            for i, x in enumerate(emitted):
                logprobs[b, i] = filters.clean(request.target[i])[0].log_softmax(0)[x]


def fragile(*args):
    """Which requests of the call (same arguments as :func:`verify`) give other tokens when comparisons move."""
    *call, _tokens, _num_accepted, _logprobs, _flags = args
    run = lambda r: lambda decide: verify_request(r, decide)
    return [r is not None and changes(run(r), Exact(), shifts()) for r in requests(*call)]
