"""What a pass over n rows takes: measured once, then kept fresh by the rounds themselves."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

ROWS = (*range(1, 10), 12, 16)  # measured; a straight line lies between
MOST_SWEEPS = 8
TWICE = 1.15  # two times that differ by less are the same
WEIGHT = 0.1  # of a new pass in the running mean
MOST_NEWS = 0.5  # of a pass's logarithm: a spike moves the mean by 5 % at most
DRIFT = math.log(1.3)  # by which rounds may disagree with what was measured
ENOUGH = 16  # passes over so many rows, before they may disagree

# Of passes over 1, 2, ... rows, in passes over one: to decide by where a decision has to be the same at every load, on
# any machine, and to hope for where others disturbed the measurement. Of a model in memory what int8 kernels take of a
# 135M model on two cores, between what an Intel and an AMD took when it was measured (docs/measurements.md).
NOMINAL = (1.0, 1.08, 1.15, 1.22, 1.29, 1.36, 1.46, 1.54, 1.67, 1.78, 1.88, 1.98, 2.08, 2.18, 2.28, 2.38)
NOMINAL_STREAMED = tuple(1.0 + 0.02 * n for n in range(16))
NOMINAL_DRAFT = 0.1  # of a draft model that does not say how large it is


class CostCurve(Sequence):
    """Seconds of a pass over 1, 2, ... rows, as a sequence; ``seconds(n)`` also goes beyond what was measured.

    ``measured`` never changes. What passes really take is kept beside it, as the running mean of the logarithm of
    the ratio, per number of rows; numbers that have not been seen follow their neighbours. So a pass that took long for
    reasons of its own is no news, a machine that became slower is none for any decision, and one on which some passes
    have become cheap or dear is. ``on_drift()`` is called once if the curve's *shape* has changed by
    more than 30 %.
    """

    def __init__(self, measured: Sequence[float], on_drift: Callable[[], None] | None = None):
        if not measured or not all(math.isfinite(seconds) and seconds > 0 for seconds in measured):
            raise ValueError(f"measured: expected seconds > 0 of passes over 1, 2, ... rows, got {list(measured)}")
        self.measured = tuple(float(seconds) for seconds in measured)
        self.timeless = False  # True: what passes take is not looked at
        self._on_drift = on_drift
        self._news: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        self._last: tuple[int, float] | None = None
        self._now = self.measured

    @classmethod
    def given(cls, costs: Sequence[float]) -> CostCurve:
        """A curve as it is; a sequence of numbers becomes one that rounds don't change."""
        if isinstance(costs, CostCurve):
            return costs
        curve = cls(costs)
        curve.timeless = True
        return curve

    def __len__(self) -> int:
        return len(self._now)

    def __getitem__(self, index):
        return self._now[index]

    def seconds(self, rows: int) -> float:
        """Of a pass over ``rows`` rows; beyond what was measured with the slope of the last half."""
        return _extended(self._now, rows)

    def measured_seconds(self, rows: int) -> float:
        """The same as it was measured."""
        return _extended(self.measured, rows)

    def observe(self, rows: int, seconds: float) -> None:
        """A pass took so long. The requests of a batch may all tell of the same one."""
        if self.timeless or not 1 <= rows <= len(self.measured) or not seconds > 0 or (rows, seconds) == self._last:
            return
        self._last = rows, seconds
        news, before = math.log(seconds / self.measured[rows - 1]), self._news.get(rows, 0.0)
        self._news[rows] = before + WEIGHT * max(-MOST_NEWS, min(news - before, MOST_NEWS))
        self._seen[rows] = self._seen.get(rows, 0) + 1
        self._now = self._refreshed()
        if self._on_drift is not None and self.drift > DRIFT:
            tell, self._on_drift = self._on_drift, None
            tell()

    @property
    def drift(self) -> float:
        """How much the shape has changed: the logarithm of the largest change of a ratio of two costs."""
        sure = [self._news[rows] for rows, seen in self._seen.items() if seen >= ENOUGH]
        return max(sure) - min(sure) if sure else 0.0

    def _refreshed(self):
        known, costs, highest = sorted(self._news), [], 0.0
        for n, seconds in enumerate(self.measured, 1):
            below = max((k for k in known if k <= n), default=known[0])
            above = min((k for k in known if k >= n), default=known[-1])
            share = (n - below) / (above - below) if above > below else 0.0
            news = self._news[below] * (1 - share) + self._news[above] * share
            highest = max(highest, seconds * math.exp(news))  # more rows can't cost less: that is noise
            costs.append(highest)
        return tuple(costs)


def nominal_costs(model) -> tuple[float, ...]:
    """Of passes of the model over 1, 2, ... rows, in passes over one."""
    return NOMINAL_STREAMED if getattr(model, "streams", False) else NOMINAL


def hopeful(costs: Sequence[float], nominal: Sequence[float]) -> list[float]:
    """Costs that others at work may have spoilt, none dearer than the nominal ones are.

    A draft that is tried in vain is soon known to be dear, by the rounds; one that is never tried stays so.
    """
    return [min(seconds, costs[0] * _extended(nominal, n)) for n, seconds in enumerate(costs, 1)]


def _extended(costs, rows):
    most = len(costs)
    if rows <= most:
        return costs[rows - 1]
    half = (most + 1) // 2
    slope = (costs[-1] - costs[half - 1]) / (most - half) if most > half else costs[-1]
    return costs[-1] + slope * (rows - most)


def warm_up(model, *rows: int) -> None:
    """Makes passes over so many rows: memory is touched, and what a model keeps to repeat a pass is made."""
    for n in rows:
        n = min(n, model.context)
        model.forward([0] * n, model.new_cache(n), last=n)


def measure_costs(model, rows: int = ROWS[-1], budget: float = 0.3) -> list[float]:
    """Seconds of a pass over 1..``rows`` rows: the least of two sweeps or more, made monotone."""
    return measure(model, rows, budget)[0]


def measure(model, rows: int = ROWS[-1], budget: float = 0.3, clock=None) -> tuple[list[float], bool]:
    """As :func:`measure_costs`, and whether the machine was quiet: for each number of rows the least was met twice."""
    clock = clock or time.perf_counter
    rows = min(rows, model.context)
    counts = sorted({n for n in ROWS if n < rows} | {rows})
    if getattr(model, "streams", False):  # each pass reads a file, takes long, and more rows hardly longer
        counts, budget = sorted({1, rows}), 0.0
    cache, taken = model.new_cache(rows), {n: [] for n in counts}
    deadline = clock() + budget
    model.forward([0], cache, last=1)  # touches every weight once
    for sweep in range(MOST_SWEEPS):
        if sweep >= 2 and clock() > deadline:
            break
        for n in counts:
            cache.truncate(0)
            start = clock()
            model.forward([0] * n, cache, last=n)
            taken[n].append(max(clock() - start, 1e-9))
    first_two = [sorted(seconds)[:2] for seconds in taken.values()]
    least = {n: first for n, (first, _) in zip(counts, first_two, strict=True)}
    for few, more in reversed(list(itertools.pairwise(counts))):
        least[few] = min(least[few], least[more])  # fewer rows can't cost more: a spike is noise
    quiet = all(second <= TWICE * first for first, second in first_two)
    return [_between(least, counts, n) for n in range(1, rows + 1)], quiet


def _between(least, counts, n):
    above = next(count for count in counts if count >= n)
    below = max((count for count in counts if count <= n), default=above)
    share = (n - below) / (above - below) if above > below else 0.0
    return min(least[below] + share * (least[above] - least[below]), least[above])
