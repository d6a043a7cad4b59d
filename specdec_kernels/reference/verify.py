"""Reference of ``verify``: one request after the other, one row after the other, in float64.

Arguments, as the public function hands them to every backend:

    target_logits  [M, V] f32/f16/bf16, last dimension contiguous
    draft_tokens   [N] int64, contiguous;  cu_drafts [B + 1] int32, contiguous
    draft_rows     [N, V or Vd] f32/f16/bf16, last dimension contiguous, or None;  draft_is_logits: what they hold
    draft_ids      [Vd] int32 ascending, contiguous, or None;  draft_kind [N] bool, contiguous, or None
    temperature, top_p, min_p   a float that is exact in f32, or a contiguous f32 tensor [B]
    top_k          an int, or a contiguous int32 tensor [B]
    seed, position [B] int64, contiguous; or None, None if every request is greedy
    tokens [B, W] int64, num_accepted [B] int32, logprobs [B, W] f32 or None, flags [B] int32: outputs, contiguous
"""

import itertools
import math
from dataclasses import dataclass

import torch

from . import filters
from .draws import Exact, accept, draw, shifts
from .philox import LAST, PLAIN

# Bits of `flags`.
HARD_TARGET = 1  # an examined target row had NaN or +inf
NO_CANDIDATE = 2  # the row that had to give the last token has no candidate
BAD_VALUE = 4  # an argument that only a GPU could not check beforehand
BAD_DRAFT = 8  # an examined draft row was unusable


@dataclass
class Request:
    """One request: its own rows and numbers, nothing else."""

    target: torch.Tensor  # [K + 1, V] raw logits
    drafts: list  # K ids, -1 = no proposal
    draft_rows: torch.Tensor | None  # [K, V or Vd]
    draft_is_logits: bool
    draft_ids: torch.Tensor | None
    point_mass: list  # K bools
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int

    def target_weights(self, row, decide):
        return filters.weights(row, self.temperature, self.top_k, self.top_p * decide.top_p, self.min_p * decide.min_p)

    def draft_distribution(self, i, decide):
        """q of draft ``i`` over the target's vocabulary; None if its row is unusable."""
        draft = self.drafts[i]
        if self.point_mass[i]:
            return filters.one_hot(draft, self.target.shape[1])
        q = self.draft_rows[i].double()
        if q.isnan().any() or (not self.draft_is_logits and (q.isinf() | (q < 0)).any()):
            return None
        if self.draft_is_logits:
            w = self.target_weights(filters.clean(q)[0], decide)
            q = w / w.sum()  # 0/0 where the row has no candidate
        if self.draft_ids is not None:
            everywhere = torch.zeros(self.target.shape[1], dtype=torch.float64, device="cpu")
            q = everywhere.index_put((self.draft_ids.long(),), q)
        return q if q[draft] > 0 else None


def verify_request(r, decide):
    """Returns (emitted tokens, accepted drafts, flags)."""
    flags, tokens = 0, []
    for i, draft in enumerate([*r.drafts, -1]):
        row, suspicious = filters.clean(r.target[i])
        flags |= HARD_TARGET * suspicious
        last = w = r.target_weights(row, decide)  # last: the weights of the last token, should this row have to give it
        if draft < 0:
            break
        if r.temperature == 0:
            if draft != filters.argmax(row):
                break
        else:
            q = r.draft_distribution(i, decide)
            if q is None:
                flags |= BAD_DRAFT
                break
            if not w.any():
                break
            p = w / w.sum()
            if not accept(r.seed, r.position, i, float(q[draft]), float(p[draft]), decide):
                residual = (p - q).clamp(min=0)
                last = residual if residual.any() else p
                break
        tokens.append(draft)
    accepted = len(tokens)
    if not last.any():
        return tokens, accepted, flags | NO_CANDIDATE
    if r.temperature == 0:
        tokens.append(filters.argmax(row))
    elif not r.drafts or r.drafts[0] < 0:
        tokens.append(draw(last, r.seed, r.position, PLAIN, 0, decide))
    else:
        tokens.append(draw(last, r.seed, r.position, LAST, accepted, decide))
    return tokens, accepted, flags


def requests(
    target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind,
    temperature, top_k, top_p, min_p, seed, position,
):  # fmt: skip
    """The call taken apart into its requests; None for one with a bad value (possible on a GPU only)."""
    vocabulary, bounds, drafts = target_logits.shape[1], cu_drafts.tolist(), draft_tokens.tolist()
    ids = None if draft_ids is None else draft_ids.cpu()
    for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
        temp, p, least = at(temperature, b), at(top_p, b), at(min_p, b)
        if not (0 <= start <= stop <= len(drafts) and 0 <= temp < math.inf and p >= 0 and least <= 1):
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
            draft_is_logits=draft_is_logits, draft_ids=ids, point_mass=point_mass,
            temperature=temp, top_k=at(top_k, b), top_p=p, min_p=least,
            seed=0 if seed is None else int(seed[b]), position=0 if position is None else int(position[b]),
        )  # fmt: skip


def at(parameter, b):
    """Request ``b``'s value of a parameter that is one number for all, or a tensor."""
    return parameter[b].item() if isinstance(parameter, torch.Tensor) else parameter


def verify(*args):
    *call, tokens, num_accepted, logprobs, flags = args
    tokens.fill_(-1)
    num_accepted.zero_()
    if logprobs is not None:
        logprobs.fill_(torch.nan)
    for b, request in enumerate(requests(*call)):
        if request is None:
            flags[b] = BAD_VALUE
            continue
        emitted, accepted, flags[b] = verify_request(request, Exact())
        num_accepted[b] = accepted
        if emitted:
            tokens[b, : len(emitted)] = torch.tensor(emitted, device="cpu")
        if logprobs is not None:
            for i, token in enumerate(emitted):
                logprobs[b, i] = filters.clean(request.target[i])[0].log_softmax(0)[token]


def fragile(*args):
    """Which requests of the call (same arguments as :func:`verify`) give other tokens when comparisons move."""
    *call, _tokens, _num_accepted, _logprobs, _flags = args
    return [r is not None and _changes(lambda decide, r=r: verify_request(r, decide)) for r in requests(*call)]


def _changes(run):
    exact = run(Exact())
    return any(run(shift) != exact for shift in shifts())
