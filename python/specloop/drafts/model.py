"""A model as a draft: chains or trees of a smaller model with the target's vocabulary.

Its cache holds a prefix of the committed ids and behind them what it guessed. What was committed since decides how much
of that stays: the longest common prefix. So an accepted guess is never computed twice, and whatever happens to the
cache (a fault, another version of the model) costs time only: what is missing is filled from the committed ids.

Chains. Greedy requests get the model's argmaxes. For others the tokens are drawn from the model's own law with the
request's temperature and filters, by the numbers of the *round* (stream 0, the round's position, the place in the
chain), and the raw rows go along, so that the verifier judges exactly what was drawn from.

Trees. The nodes are those N whose probability to be reached, by the draft, is largest: from the likeliest on, each is
taken into the tree and asked for its children (as EAGLE-2 orders its trees, 2406.16858). They are chosen, not drawn, so
the law of the text is the target's with any of them. A tree one deep is a set of candidates for the next token.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import SLOW_SECONDS, Proposal
from .likeliest import likeliest
from .steps import ByRows, Compiled

if TYPE_CHECKING:
    from torch import Tensor


PATIENCE = 10.0  # times the measured cost
CHUNK = 256  # ids per pass while reading what is missing
FEW = 16  # so many ids share the pass of the first guess
LEAST_REACH = 0.25  # of a greedy chain: the best of 0.15 .. 0.4 on chat and code, where 3 % are gained over the best K


class ModelDraft:
    """``seat``: the draft model with a cache (versions.Seat). ``vocab_size``: of the target; ids beyond it are padding
    in one model or the other and are never proposed. ``max_tokens``: most per chain; of a tree, how deep it may be.

    ``sampling``: the request's; None = greedy. ``ids``: the target's ids that the columns of the model's logits stand
    for (vocabulary.py); None = its first columns are the target's ids. ``tree``: most nodes of a tree; 0 = chains.
    ``cost``: seconds of a pass, as measured: a slow model may take its time, but not ten times as long. ``costs``: a
    CostCurve that is told what a token of a chain took: more than a pass that follows another one, as the target's
    weights have been through the processor's caches in between.
    ``confidence``: a chain ends with the first token to which the model gives less than this probability (temperature
    1, before filters). Whether another token follows is thus a matter of those before it, and the law stays exact.
    ``reach``: a greedy chain ends with the token behind which the model puts the chance that all of it is right below
    this: what comes next would hardly be looked at, and costs a pass of the draft and a row of the target's.
    """

    name = "model"
    timely = True

    def __init__(
        self,
        seat,
        vocab_size: int,
        max_tokens: int = 8,
        sampling=None,
        ids: Tensor | None = None,
        tree=0,
        cost=0.0,
        confidence=0.0,
        reach=0.0,
        costs=None,
    ):
        self.confidence, self.reach, self.costs = confidence, reach, costs
        self.seat, self.vocab_size, self.max_tokens = seat, vocab_size, max_tokens
        self.sampling, self.tree, self.cost, self._map = sampling, tree, cost, ids
        self._ids: list[int] = []  # committed
        self._held: list[int] = []  # what the cache holds, unless it was lost
        self._agreed = 0  # so many of these are committed
        self._rows = None  # what a chain was drawn from

    def begin(self, ids: Sequence[int]) -> None:
        """Also reads the ids, all but the last: a long prompt takes time, which no proposal should."""
        self._ids, self._held, self._agreed = list(ids), [], 0
        with self._reading():
            if ids and self.outlook()[1]:
                self._hold(self._ids[:-1])

    def append(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)

    def outlook(self) -> tuple[int, int]:
        """No strength; as many tokens as its context has room for."""
        return 0, max(0, min(self.max_tokens, self.seat.capacity + 1 - len(self._ids)))

    def propose(self, k: int) -> Proposal:
        with self._reading():
            k = min(k, self.outlook()[1])  # asked again: in the meantime another version may have come, or none
            if not k:
                return Proposal([])
            if len(self._ids) - len(self._held) > FEW:
                self._hold(self._ids[:-1])
            seconds, started = max(SLOW_SECONDS, PATIENCE * self.cost * (self.tree or k)), time.perf_counter()
            deadline = started + seconds, seconds
            if self.tree:
                return self._grow(k, deadline)
            found = self._chain(k, deadline)
            if self.costs is not None and found.tokens:
                self.costs.observe(1, (time.perf_counter() - started) / len(found.tokens))
            return found

    def _reading(self):
        """A context manager around whatever makes passes."""
        return self.seat.lock

    def _chain(self, k, deadline):
        drawn = self.sampling is not None and self.sampling.temperature > 0
        found = []
        row = self._row(found)
        if drawn:
            self._make_room(row)
        steps = self._compiled(row, drawn) or ByRows(row, self._row, self._draw() if drawn else None)
        try:
            fault = self._follow(steps, found, k, deadline, 0.0 if drawn else self.reach)
        finally:
            steps.end()
        if steps.passes:
            self._held += found[: steps.passes]
            self.seat.advance(steps.passes)
        if not drawn or not found:
            return Proposal(found, fault=fault)
        return Proposal(found, None, self._rows[: len(found)], self._map, fault)

    def _follow(self, steps, found, k, deadline, least):
        """Fills ``found`` with at most ``k`` guesses; says what is wrong if that ended it."""
        reach = 1.0
        while True:
            column = steps.pick()
            if column < 0:
                return f"the draft's logits of token {len(found) + 1} have NaN, or no candidate"
            found.append(column if self._map is None else int(self._map[column]))
            if len(found) == k or found[-1] in self.seat.eos_ids:
                return None
            if self.confidence or least:
                sure = steps.probability
                reach *= sure
                if sure < self.confidence or reach < least:
                    return None
            fault = _late(deadline, found, k)
            if fault is not None:
                return fault
            steps.follow(found)

    def _compiled(self, row, drawn):
        """A chain's steps in compiled code, behind the first row of logits; None where there is no such way."""
        make = getattr(self.seat, "guesses", None)
        if make is None or (drawn and self.confidence):  # what is drawn is not asked for its probability there
            return None
        made = make(self._map, len(row))
        if made is None:
            return None
        guesses, features = made
        if guesses.logits.data_ptr() != row.data_ptr():  # they were made in several passes
            return None
        chain = {"features": features}
        if drawn:
            s = self.sampling
            chain |= {"rows": self._rows, "seed": s.seed, "position": len(self._ids)}
            chain |= {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
        guesses.begin(self.seat.length - 1, self.seat.capacity, **chain)
        return Compiled(guesses)

    def _make_room(self, row):
        """For the rows that a chain is drawn from."""
        rows = self._rows
        if rows is None or rows.shape[1] != len(row) or rows.device != row.device:
            self._rows = row.new_empty(self.max_tokens, len(row))

    def _draw(self):
        """A function that draws from a row of logits, as token number ``i`` of this round, and keeps the row."""
        import torch

        from specdec_kernels import sample

        s, rows = self.sampling, self._rows
        numbers = {"seed": torch.tensor([s.seed]), "position": torch.tensor([len(self._ids)])}
        filters = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
        where = {name: number.to(rows.device) for name, number in numbers.items()}

        def draw(row, i):
            rows[i].copy_(row)  # the model's own memory serves the next pass, of whichever request
            return int(sample(rows[i : i + 1], stream=0, index=i, **where, **filters))

        return draw

    def _grow(self, k, deadline):
        """The tree of the likeliest nodes, none deeper than ``k``."""
        tokens, parents, paths, fault = [], [], [], None
        temperature = (self.sampling.temperature if self.sampling is not None else 0) or 1.0
        front = []  # (-log of the probability to get there, number, id, parent): what may come into the tree next
        node, path, reach, number = -1, [], 0.0, itertools.count()
        while True:
            found = likeliest(self._row(path), self._map, self.tree - len(tokens), temperature)
            if found is None:
                fault = f"the draft's logits behind {len(path)} tokens have NaN, or no candidate"
                break
            for token, log in found:
                heapq.heappush(front, (reach - log, next(number), token, node))
            asked = False
            while front and len(tokens) < self.tree and not asked:
                reach, _, token, parent = heapq.heappop(front)
                node, path = len(tokens), ([] if parent < 0 else paths[parent]) + [token]
                tokens.append(token)
                parents.append(parent)
                paths.append(path)
                asked = len(path) < k and token not in self.seat.eos_ids
            if not asked or len(tokens) == self.tree:
                break
            fault = _late(deadline, tokens, self.tree)
            if fault is not None:
                break
        return Proposal(tokens, parents, fault=fault)

    def _row(self, path):
        """Logits of what follows the committed ids and the ids of ``path``, over what can be proposed."""
        import torch

        row = self._hold(self._ids + path, last=1)[0]
        if self._map is None and len(row) < self.vocab_size:  # the target's vocabulary is filled up to more
            self._map = torch.arange(len(row), dtype=torch.int32, device=row.device)
        return row[: self.vocab_size if self._map is None else len(self._map)]

    def _hold(self, wanted, last=0):
        """Makes the cache hold these ids, committed ones or guesses behind them. Logits of the last if asked for."""
        held, logits = self._held, None
        del held[self.seat.length :]  # the cache may have been lost
        most = min(len(held), len(wanted) - last)
        same = min(self._agreed, most)
        while same < most and held[same] == wanted[same]:
            same += 1
        del held[same:]
        self.seat.truncate(same)
        self._agreed = min(same, len(self._ids))
        while len(held) < len(wanted):
            tokens = wanted[len(held) : len(held) + CHUNK]
            logits = self.seat.forward(tokens, self.seat, last=last if len(held) + len(tokens) == len(wanted) else 0)
            held += tokens
        return logits


def _late(deadline, found, wanted):
    """What is wrong if there is no time for another token, although one is wanted."""
    end, seconds = deadline
    if len(found) < wanted and time.perf_counter() > end:
        return f"TimeoutError: {len(found)} of {wanted} tokens took more than {seconds:g} s"
    return None
