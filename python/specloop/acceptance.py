"""One round's verdicts: the target's rows and the proposals of several requests in, emitted tokens out.

Chains are judged by ``specdec_kernels.verify``, trees by ``verify_tree``. Requests with the same rule share a call,
each with its own temperature, filters and seed. A round is named by the number of committed ids, so random numbers are
a function of seed and text, not of what was drafted before or of who else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specdec_kernels import sample, verify, verify_tree

from .threshold import lend

NO_CANDIDATE, BAD_VALUE = 2, 4  # flag bits of a verdict
TREE_RULES = {"token": "token", "block": "traversal", "threshold": "threshold"}  # what is the same for a tree


@dataclass(slots=True)
class Verdict:
    """``tokens``: what the round emits, the first ``accepted`` of them drafts; ``path``: their nodes, if it is a tree.
    ``stuck``: there was no candidate for the last token.
    """

    tokens: list[int]
    accepted: int
    path: list[int] | None
    stuck: bool
    error: Exception | None = None  # why its rows could not be judged at all
    logprobs: list[float] | None = None  # of each token: log-softmax of its row, before temperature and filters
    top: list[list[tuple[int, float]]] | None = None  # of each token: the likeliest ids
    agreed: list[bool] = field(default_factory=list)  # rule "threshold": whether each token is its row's argmax
    gaps: list[float] = field(default_factory=list)  # and how much more log-probability the argmax has
    lent: list[int] = field(default_factory=list)  # which tokens the lossless rule would have refused

    def note(self, request, committed: int) -> None:
        """The first ``committed`` tokens came into the text."""
        if request.logprobs is not None:
            top = self.top or [None] * committed
            request.logprobs += list(zip(self.logprobs[:committed], top[:committed], strict=True))
        if request.threshold is not None:
            lent = sum(at < committed for at in self.lent)
            request.threshold.observe(self.agreed[:committed], self.gaps[:committed], lent)


def judge(logits, crew: Sequence, proposals: Sequence) -> list[Verdict]:
    """``logits``: f32 [sum of 1 + drafts, V], each request's row for the pending id and one per draft, in order; may be
    changed. Returns a verdict per request.
    """
    starts, groups = _layout(crew, proposals)
    errors = [_process(logits[a:b], *one) for a, b, *one in zip(starts, starts[1:], crew, proposals, strict=False)]
    verdicts = [None] * len(crew)
    for members in groups:
        rows = logits
        if len(groups) > 1:
            spans = [torch.arange(starts[i], starts[i + 1], device=logits.device) for i in members]
            rows = logits[torch.cat(spans)]
        group = [crew[i] for i in members]
        judged = _judge_group(rows, group, [proposals[i] for i in members], _lossless(group[0].rule))
        for i, verdict in zip(members, judged, strict=True):
            verdicts[i], verdict.error = verdict, errors[i]
    for request, proposal, verdict, start in zip(crew, proposals, verdicts, starts, strict=False):
        if request.threshold is not None and proposal.tokens:
            rows = logits[start : start + 1 + len(proposal.tokens)]
            part = lambda rows, *rest, request=request: _judge_part(rows, request, *rest)
            lend(request.threshold, rows, proposal, verdict, part)
        if request.top_logprobs or request.threshold is not None:
            at = _rows_of(verdict, proposal)
            chain = slice(start, start + len(at))  # which needs no copy
            _look_closer(logits[[start + row for row in at] if proposal.parents else chain], request, verdict)
    return verdicts


def _process(rows, request, proposal) -> Exception | None:
    """What the request does to its rows. An error of a function that it brought along is its own matter alone."""
    if request.processor is None:
        return None
    try:
        request.processor.rows(rows, request.ids, proposal.tokens, proposal.parents)
    except Exception as error:
        rows.fill_(-torch.inf)
        return error
    return None


def _layout(crew, proposals):
    """Each request's first row (and the end), and the indices of the requests that can share a call."""
    starts, groups = [0], {}
    for i, (request, proposal) in enumerate(zip(crew, proposals, strict=True)):
        starts.append(starts[-1] + len(proposal.tokens) + 1)
        groups.setdefault((_lossless(request.rule), _form(proposal)), []).append(i)
    for rule, form in list(groups):
        drawn = next(((r, f) for r, f in groups if r == rule and isinstance(f, int)), None)
        if form == "point" and drawn is not None:  # point masses go along with chains that were drawn
            groups[drawn] = sorted(groups[drawn] + groups.pop((rule, form)))
    return starts, list(groups.values())


def _form(proposal):
    """What proposals must have in common to be judged in one call; for chains that were drawn: their vocabulary."""
    if proposal.parents is not None:
        return "tree"
    if proposal.logits is None:
        return "point"
    return 0 if proposal.ids is None else proposal.ids.data_ptr()


def _lossless(rule):
    """What a round begins with: the rule "threshold" takes the verdict further (threshold.py)."""
    return "token" if rule == "threshold" else rule


def _judge_part(rows, request, proposal, rule, ahead):
    """The verdict on a part of a request's proposal."""
    return _judge_group(rows, [request], [proposal], rule, ahead)[0]


def _judge_group(logits, crew, proposals, rule, ahead=0):
    """Verdicts of requests by one rule, all chains or all trees, ``ahead`` tokens behind the round's start."""
    device = logits.device
    vector = lambda values, dtype=torch.int64: torch.tensor(values, dtype=dtype, device=device)
    counts, ends = [len(p.tokens) for p in proposals], [0]
    for count in counts:
        ends.append(ends[-1] + count)
    tokens, bounds = vector([t for p in proposals for t in p.tokens]), vector(ends, torch.int32)
    sampling = [r.sampling for r in crew]
    same = len(set(sampling)) == 1
    common = {
        name: getattr(sampling[0], name) if same else vector([getattr(s, name) for s in sampling], dtype)
        for name, dtype in (("top_k", torch.int64), ("top_p", torch.float32), ("min_p", torch.float32))
    }
    common["temperature"] = (
        sampling[0].temperature if same else vector([s.temperature for s in sampling], torch.float32)
    )
    common["seed"] = vector([s.seed for s in sampling])
    common["position"] = vector([len(r.ids) + ahead for r in crew])
    common["return_logprobs"] = any(r.logprobs is not None for r in crew)
    if rule == "threshold":
        common["theta"] = vector([r.threshold.theta for r in crew], torch.float32)
    if proposals[0].parents is None:
        common |= _distributions(logits, proposals)
        judged = verify(logits, tokens, bounds, max_drafts=max(counts), rule=rule, **common)
        paths = [None] * len(crew)
    else:
        parents = vector([parent for p in proposals for parent in p.parents])
        depth = max(p.depth for p in proposals)
        judged = verify_tree(logits, tokens, parents, bounds, max_depth=depth, rule=TREE_RULES[rule], **common)
        paths = judged.path.tolist()
    accepted, flags, emitted = judged.num_accepted.tolist(), judged.flags.tolist(), judged.tokens.tolist()
    logprobs = None if judged.logprobs is None else judged.logprobs.tolist()
    verdicts = []
    for i, path in enumerate(paths):
        kept = [token for token in emitted[i] if token >= 0]
        path = None if path is None else path[: accepted[i]]
        stuck = bool(flags[i] & (NO_CANDIDATE | BAD_VALUE))
        asked = crew[i].logprobs is not None  # or it is someone else's wish
        verdicts.append(Verdict(kept, accepted[i], path, stuck, logprobs=logprobs[i][: len(kept)] if asked else None))
    return verdicts


def _distributions(logits, proposals):
    """What ``verify`` needs to know of the drafts' distributions; nothing if all are point masses."""
    drawn = [p.logits is not None for p in proposals]
    if not any(drawn):
        return {}
    ids = next((p.ids for p in proposals if p.ids is not None), None)
    if all(drawn) or len(proposals) == 1:
        rows = proposals[0].logits if len(proposals) == 1 else torch.cat([p.logits for p in proposals])
        return {"draft_logits": rows, "draft_ids": ids}
    width = next(p.logits.shape[1] for p in proposals if p.logits is not None)
    rows, kind, at = logits.new_empty(sum(len(p.tokens) for p in proposals), width), [], 0
    for proposal in proposals:
        n = len(proposal.tokens)
        if proposal.logits is not None:
            rows[at : at + n] = proposal.logits
        kind += [proposal.logits is None] * n
        at += n
    return {"draft_logits": rows, "draft_ids": ids, "draft_kind": torch.tensor(kind, device=logits.device)}


def _rows_of(verdict, proposal):
    """The rows, counted from the request's first, that its emitted tokens came from."""
    if proposal.parents is None:
        return range(len(verdict.tokens))
    return [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]


def _look_closer(rows, request, verdict):
    """The likeliest ids of the rows, and how the tokens compare with them."""
    if not len(rows):
        return
    if request.top_logprobs:
        logs = torch.log_softmax(_finite(rows), -1)
        best = logs.topk(min(request.top_logprobs, logs.shape[1]), -1)
        verdict.top = [
            [(token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    if request.threshold is not None:
        tokens = torch.tensor(verdict.tokens, device=rows.device)
        argmax = sample(rows, temperature=0.0)  # which is quicker than torch's
        verdict.agreed = (argmax == tokens).tolist()
        both = rows.gather(1, torch.stack([argmax, tokens], 1))
        verdict.gaps = (both[:, 0] - both[:, 1]).tolist()  # the softmax cancels out


def _finite(rows):
    """The rows as ``verify`` reads them, so that their softmax has no NaN: a NaN is -inf, the first +inf is certain."""
    rows = rows.float()
    if bool(rows.amax(1).isfinite().all()):
        return rows
    rows = torch.where(rows.isnan(), -math.inf, rows)
    certain = rows == math.inf
    first = certain & (certain.cumsum(1) == 1)
    return torch.where(certain.any(1, keepdim=True), torch.where(first, 0.0, -math.inf), rows)
