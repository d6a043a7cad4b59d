"""How many tokens to draft: the number that makes most tokens per second, by measured cost and measured acceptance.

A round with K drafts emits on average tau(K) = 1 + a_1 + a_1 a_2 + ... + a_1..a_K tokens (a_j: acceptance of draft j
given that those before it were accepted) and costs cost(K + 1 rows) + K * draft_cost. K is the argmax of their ratio
over *all* K: the cost has steps (a kernel that runs out of registers), on which climbing by one gets stuck.

a_j is counted per *strength* s + j, s being the draft's own outlook (see drafts/base.py). A lookup that matched s ids
and sees j guesses accepted is a lookup that matched s + j ids: one row of counters serves all positions, long matches
do not pay for short ones, and a draft without strengths gets plain counters per position.

The decision uses only what is known before the tokens are drawn, so the output's law does not change. It is also a
function of the committed ids and the costs alone: with costs given, a seed always makes the same text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

K_MAX = 8
STREAMED_ROWS = 16  # a pass that waits for a file has time for more rows
DECAY = 0.9  # in simulated play as good as 0.97 on even text and 5 % better on text that changes every 30 rounds
MIN_SPEEDUP = 1.03  # below this, drafting is noise
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds between probes while drafting does not pay
PROBE = 2
PRIOR_WEIGHT = 2.0
CELLS = 12


def cell(strength: int) -> int:
    """0..8 one by one, then by doublings: 9..15, 16..31, 32 and more."""
    return strength if strength < 9 else 9 if strength < 16 else 10 if strength < 32 else 11


def prior(strength: int) -> float:
    """A guess at acceptance before anything was counted: about what lookups of that length get in chat and code."""
    return strength / (strength + 2.0) if strength else 0.5


@dataclass(slots=True)
class Counter:
    hits: float = 0.0
    trials: float = 0.0

    def observe(self, hit: bool) -> None:
        self.fade()
        self.hits += hit
        self.trials += 1

    def fade(self) -> None:
        """What was counted long ago weighs less than what is believed."""
        self.hits *= DECAY
        self.trials *= DECAY

    def rate(self, belief: float) -> float:
        return (self.hits + PRIOR_WEIGHT * belief) / (self.trials + PRIOR_WEIGHT)


class Fixed:
    """Always K, or as many as the draft has."""

    def __init__(self, k: int):
        self.k = k

    def choose(self, outlook: tuple[int, int]) -> int:
        return min(self.k, outlook[1])

    def observe(self, outlook, proposed: int, accepted: int, seconds=None, rows=None) -> None:
        pass

    def off_reason(self) -> str | None:
        return None if self.k else "no draft"


def plan(controllers, outlooks):
    """K for each of the requests that share a round."""
    return [min(c.choose(o), o[1]) for c, o in zip(controllers, outlooks, strict=True)]


class Auto:
    """The K of one request. ``costs[i]``: seconds of a pass over i + 1 rows; ``draft_cost``: seconds per draft."""

    def __init__(self, costs: Sequence[float], draft_cost: float = 0.0):
        self.costs = [cost / costs[0] for cost in costs]
        self.draft_cost = draft_cost / costs[0]
        self.counters = [Counter() for _ in range(CELLS)]
        self.pause = FIRST_PAUSE
        self.skipped = 0  # rounds in which drafting did not pay, since the last probe
        self.last_best: float | None = None

    def choose(self, outlook: tuple[int, int]) -> int:
        """K for this round; 0 also where drafting is not expected to pay, with a probe now and then."""
        strength, limit = outlook
        limit = min(limit, len(self.costs) - 1)
        if limit <= 0:
            return 0
        k, self.last_best = self.best(strength, limit)
        if self.last_best >= MIN_SPEEDUP:
            return k
        self.skipped += 1
        return min(PROBE, limit) if self.skipped >= self.pause else 0

    def best(self, strength: int, limit: int) -> tuple[int, float]:
        """The best K in 1..limit and its expected speed, plain decoding being 1.

        Before it has been seen, a token deeper in the draft is believed to be as good as the one before it: otherwise
        a K that never was tried would never be.
        """
        expected, reach, rate, best, best_k = 1.0, 1.0, 0.0, 0.0, 0
        for k in range(1, limit + 1):
            at = strength + k - 1
            rate = self.counters[cell(at)].rate(max(prior(at), rate))
            reach *= rate
            expected += reach
            speed = expected / (self.costs[k] + k * self.draft_cost)
            if speed > best:
                best, best_k = speed, k
        return best_k, best

    def observe(self, outlook: tuple[int, int], proposed: int, accepted: int, seconds=None, rows=None) -> None:
        """The fate of a whole round. Rounds that were cut by a stop, the length limit or a fault must not come here."""
        if not proposed:
            return
        strength = outlook[0]
        for j in range(proposed):
            counter = self.counters[cell(strength + j)]
            if j <= accepted:
                counter.observe(j < accepted)
            else:
                counter.fade()
        if self.skipped >= self.pause:  # this was a probe
            self.pause = FIRST_PAUSE if accepted == proposed else min(self.pause * 2, LONGEST_PAUSE)
            self.skipped = 0

    def off_reason(self) -> str | None:
        if self.last_best is None or self.last_best >= MIN_SPEEDUP:
            return None
        return f"drafting does not pay: {self.last_best:.2f}x expected at the measured acceptance and cost"


def warm_up(model, *rows: int) -> None:
    """Makes passes over so many rows: memory is touched, and what a model keeps to repeat a pass is made."""
    for n in rows:
        n = min(n, model.context)
        model.forward([0] * n, model.new_cache(n), last=n)


def measure_costs(model, rows: int = K_MAX + 1, budget: float = 0.2) -> list[float]:
    """Seconds of a pass over 1..``rows`` rows: the least of two sweeps or more, made monotone."""
    if getattr(model, "streams", False):
        return _streamed_costs(model)
    rows = min(rows, model.context)
    cache = model.new_cache(rows)
    least = [float("inf")] * rows
    deadline = time.perf_counter() + budget
    model.forward([0], cache, last=1)  # touches every weight once
    sweeps = 0
    while sweeps < 2 or (sweeps < 8 and time.perf_counter() < deadline):
        for n in range(1, rows + 1):
            cache.truncate(0)
            start = time.perf_counter()
            model.forward([0] * n, cache, last=n)
            least[n - 1] = min(least[n - 1], time.perf_counter() - start)
        sweeps += 1
    for n in range(rows - 2, -1, -1):  # fewer rows can't cost more: a spike is noise
        least[n] = min(least[n], least[n + 1])
    return [max(seconds, 1e-9) for seconds in least]


def _streamed_costs(model, rows: int = STREAMED_ROWS) -> list[float]:
    """The same for a model whose passes read from a file: each takes long, and more rows hardly longer.

    So one row and ``rows`` are measured, two passes each, and a straight line is drawn between.
    """
    rows = min(rows, model.context)
    cache, least = model.new_cache(rows), {1: float("inf"), rows: float("inf")}
    model.forward([0], cache, last=1)
    for n in (1, rows, 1, rows):
        cache.truncate(0)
        start = time.perf_counter()
        model.forward([0] * n, cache, last=n)
        least[n] = min(least[n], time.perf_counter() - start)
    first, slope = least[1], max(least[rows] - least[1], 0.0) / max(rows - 1, 1)
    return [first + slope * n for n in range(rows)]
