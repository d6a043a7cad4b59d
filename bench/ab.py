"""Fair comparison on a noisy machine: both sides in one run, taking turns, judged by the median of the pairs' ratios.

result = compare(a, b, pairs=15)
result.ratio             # median of time(a) / time(b) over the pairs
result.interval          # bootstrap 95 % interval of that median
result.least             # the shortest time(a) / the shortest time(b): what a busy machine disturbs least
noise = aa(a, pairs=15)  # the same statistic for a against itself: an effect inside this interval is no effect
"""

import gc
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Comparison:
    ratio: float
    interval: tuple
    least: float
    a_seconds: float
    b_seconds: float
    pairs: int


def _seconds(run, repeat, clock):
    start = clock()
    for _ in range(repeat):
        run()
    return (clock() - start) / repeat


def _bootstrap(values, draws=1000):
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def compare(a, b, *, pairs=15, repeat=1, warmup=2, clock=time.perf_counter):
    """Times ``a()`` and ``b()`` in turn, in alternating order; ``repeat`` calls make one timing.

    ``clock=time.thread_time`` counts this thread only, and only while it has a core: for work of one thread on a
    machine that others use.
    """
    for _ in range(warmup):
        a(), b()
    enabled = gc.isenabled()
    gc.disable()
    try:
        times = []
        for i in range(pairs):
            if i % 2:
                tb, ta = _seconds(b, repeat, clock), _seconds(a, repeat, clock)
            else:
                ta, tb = _seconds(a, repeat, clock), _seconds(b, repeat, clock)
            times.append((ta, tb))
    finally:
        if enabled:
            gc.enable()
    ratios = [ta / tb for ta, tb in times]
    return Comparison(
        ratio=statistics.median(ratios),
        interval=_bootstrap(ratios),
        least=min(ta for ta, _ in times) / min(tb for _, tb in times),
        a_seconds=statistics.median(ta for ta, _ in times),
        b_seconds=statistics.median(tb for _, tb in times),
        pairs=pairs,
    )


def aa(a, **options):
    """``a`` against itself: how far from 1 the statistic strays on this machine at this moment."""
    return compare(a, a, **options)


def as_json(name, comparison, **extra):
    return json.dumps({"name": name, **asdict(comparison), **extra})
