"""The rule "threshold": lossy, with a share of tokens that stay those of greedy decoding.

A round is lossless as far as it goes. Where that would refuse a draft, the draft may be taken nevertheless: if its
probability exceeds theta (contract, rule "threshold"), and if there is credit for a token that is not the target's
first choice. Credit is what the *set point* leaves: of all tokens so far, and of every ``window`` tokens in a row, at
least the share ``set_point`` is the argmax of the target at its prefix. It has to be earned before it is spent, so the
share holds for every text whenever it ends, whatever the drafts are: with 98 % and 64 tokens, the first one may come
after 49 others, and one per 64 tokens. (What is *drawn* from the target at a temperature above 0 often is not the
argmax either, without having asked; until that debt is paid nothing is lent.)

Theta adapts so that credit goes where it costs least: it falls, round by round, while there is credit that nothing was
good enough for, and rises with each token that was. Without credit it is ``STRICT``: a token with more than half of the
probability is the argmax.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import torch

from specdec_kernels import sample

from .errors import OptionError

START = 0.3
STRICT = 0.5
LEAST = 0.05
FALL, RISE = 0.95, 1.25  # per round with credit left over, per token that was lent
WINDOW, SET_POINT = 64, 0.98


class Threshold:
    """``start``: theta of the first round with credit. The state of one request; the loop tells it what was emitted."""

    def __init__(self, start: float | None = None, window: int = WINDOW, set_point: float = SET_POINT):
        start = START if start is None else start
        if isinstance(start, bool) or not isinstance(start, int | float) or not 0 < start < math.inf:
            raise OptionError(f"theta: expected a finite number > 0, got {start!r}")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise OptionError(f"theta_window: expected an integer >= 1, got {window!r}")
        if isinstance(set_point, bool) or not isinstance(set_point, int | float) or not 0 < set_point <= 1:
            raise OptionError(f"agreement: expected a number above 0 and at most 1, got {set_point!r}")
        self.start, self.window, self.set_point = float(start), window, float(set_point)
        self.path: list[float] = []  # theta of each round
        self.lent = 0  # tokens that are in the text because of theta
        self.tokens = self.misses = 0  # emitted; of these not the argmax
        self._recent: deque[bool] = deque(
            maxlen=window - 1
        )  # agreement of the tokens that share a window with the next
        self._level = min(max(self.start, LEAST), STRICT)
        self._gaps = 0.0

    @property
    def theta(self) -> float:
        """For the next round."""
        return self._level if self.credit else STRICT

    @property
    def credit(self) -> bool:
        """Whether the next round may lend."""
        return self.allows(())

    @property
    def agreement(self) -> float | None:
        """Share of the emitted tokens that are the argmax of the target at their prefix; None before the first."""
        return 1 - self.misses / self.tokens if self.tokens else None

    @property
    def mean_gap(self) -> float | None:
        """Mean over the emitted tokens of log p(argmax) - log p(token), in nats, p before temperature and filters."""
        return self._gaps / self.tokens if self.tokens else None

    def allows(self, agreed: Sequence[bool]) -> bool:
        """Whether the token after those of this round (whether each is its argmax) may be another than the argmax."""
        misses = self.misses + agreed.count(False) + 1
        if misses > self._most(self.tokens + len(agreed) + 1):
            return False
        near = [*self._recent, *agreed][1 - self.window :] if self.window > 1 else []
        return near.count(False) + 1 <= self._most(self.window)

    def _most(self, tokens: int) -> int:
        """So many of ``tokens`` need not be the argmax."""
        return math.floor((1 - self.set_point) * tokens + 1e-9)

    def observe(self, agreed: Sequence[bool], gaps: Sequence[float], lent: int = 0) -> None:
        """A round's emitted tokens: whether each is the argmax, and by how much log-probability it is not; ``lent``:
        how many the lossless rule would have refused.
        """
        credit = self.credit
        self.path.append(self.theta)
        self.tokens += len(agreed)
        self.misses += list(agreed).count(False)
        self._recent.extend(agreed)
        self._gaps += sum(gap for gap in gaps if math.isfinite(gap))
        self.lent += lent
        if lent:
            self._level = min(self._level * RISE**lent, STRICT)
        elif credit:
            self._level = max(self._level * FALL, LEAST)


def lend(threshold: Threshold, rows: torch.Tensor, proposal, verdict, judge: Callable) -> None:
    """Takes a lossless verdict further, as far as there is credit; a round that begins without any stays lossless.

    ``rows``: the request's logits, f32 [1 + drafts, V]. ``judge(rows, proposal, rule, ahead)``: the verdict on a part
    of the proposal by "token" or "threshold", ``ahead`` tokens behind the round's start. A draft that is lent ends the
    round, and those behind it are the next round's, which begins at the next position: so no random number is used
    twice, and drafts that were drawn are judged by the law that they were drawn from.
    """
    while threshold.credit and not verdict.stuck and len(verdict.tokens) == verdict.accepted + 1:
        at = verdict.accepted
        node = _last(verdict, proposal)
        children = _children(proposal, node)
        if not children or not threshold.allows(_agreed(rows, proposal, verdict, at)):
            return
        asked = judge(
            rows[[node + 1, *(child + 1 for child in children)]], _part(proposal, children, node), "threshold", at
        )
        if not asked.accepted:
            return
        child = children[asked.path[0] if asked.path is not None else 0]
        below = _below(proposal, child)
        rest = judge(rows[[child + 1, *(node + 1 for node in below)]], _part(proposal, below, child), "token", at + 1)
        verdict.tokens[at:] = [proposal.tokens[child], *rest.tokens]
        verdict.accepted, verdict.stuck = at + 1 + rest.accepted, rest.stuck
        if verdict.path is not None:
            verdict.path += [child, *(below[i] for i in rest.path or ())]
        if verdict.logprobs is not None:
            verdict.logprobs[at:] = [asked.logprobs[0], *rest.logprobs]
        verdict.lent.append(at)


def _last(verdict, proposal) -> int:
    """The node that was accepted last; -1 = none."""
    if proposal.parents is None:
        return verdict.accepted - 1
    return verdict.path[-1] if verdict.path else -1


def _children(proposal, node) -> list[int]:
    if proposal.parents is None:
        return [node + 1] if node + 1 < len(proposal.tokens) else []
    return [child for child, parent in enumerate(proposal.parents) if parent == node]


def _below(proposal, node) -> list[int]:
    if proposal.parents is None:
        return list(range(node + 1, len(proposal.tokens)))
    inside = {node}
    for child, parent in enumerate(proposal.parents):
        if parent in inside:
            inside.add(child)
    return sorted(inside - {node})


def _part(proposal, nodes, root):
    """The proposal cut down to ``nodes``, which hang below ``root``."""
    from .drafts.base import Proposal

    tokens = [proposal.tokens[node] for node in nodes]
    if proposal.parents is None or not nodes:
        logits = None if proposal.logits is None or not nodes else proposal.logits[nodes[0] : nodes[-1] + 1]
        return Proposal(tokens, None, logits, None if logits is None else proposal.ids)
    place = {node: i for i, node in enumerate(nodes)} | {root: -1}
    return Proposal(tokens, [place[proposal.parents[node]] for node in nodes])


def _agreed(rows, proposal, verdict, count) -> list[bool]:
    """Whether each of the round's first ``count`` tokens is its row's argmax."""
    at = range(count) if proposal.parents is None else [0, *(node + 1 for node in verdict.path)][:count]
    best = sample(rows[list(at)], temperature=0.0).tolist() if count else []
    return [a == b for a, b in zip(best, verdict.tokens, strict=False)]
