"""What passes cost: measured, kept fresh, and extrapolated."""

import random
import time

import pytest
import torch

from controllers import CHEAP, LINEAR
from specloop.controller import Auto
from specloop.costs import CostCurve, measure_costs


def test_beyond_what_was_measured_the_slope_of_the_last_half_holds():
    curve = CostCurve([1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert [curve.seconds(n) for n in (1, 4, 8, 9, 12)] == [1, 1, 5, 6, 9]
    assert CostCurve([2.0]).seconds(3) == 6.0
    with pytest.raises(ValueError, match="measured"):
        CostCurve([1.0, float("nan")])
    with pytest.raises(ValueError, match="measured"):
        CostCurve([])


def test_rounds_keep_the_costs_fresh():
    curve = CostCurve([0.01] * 16)
    for _ in range(100):
        curve.observe(5, 0.02)
        curve.observe(1, 0.01)
    assert curve.seconds(1) == pytest.approx(0.01) and curve.seconds(5) == pytest.approx(0.02, rel=0.01)
    assert curve.seconds(3) == pytest.approx(0.01 * 2**0.5, rel=0.01)  # half way
    assert curve.seconds(16) == pytest.approx(0.02, rel=0.01) and curve.measured == (0.01,) * 16
    curve.observe(40, 1.0)  # nothing is known of so many
    assert list(curve) == sorted(curve)


def test_spikes_hardly_move_the_costs():
    rng, curve, seen = random.Random(1), CostCurve([0.01] * 9), []
    for n in range(500):
        curve.observe(4, 0.5 if n % 25 == 0 else 0.01 * rng.uniform(0.95, 1.05))
        seen.append(curve.seconds(4))
    assert max(seen) < 0.0112


def test_the_requests_of_a_batch_tell_of_the_same_pass():
    one, five = CostCurve([0.01] * 9), CostCurve([0.01] * 9)
    for n in range(20):
        one.observe(5, 0.02 + n * 1e-6)
        for _ in range(5):
            five.observe(5, 0.02 + n * 1e-6)
    assert list(one) == list(five)


def test_a_busy_machine_is_no_drift_another_shape_is():
    told = []
    busy = CostCurve([0.01 * c for c in CHEAP], lambda: told.append("busy"))
    for n in range(200):
        busy.observe(n % 9 + 1, 0.03 * CHEAP[n % 9])
    assert not told and busy.drift < 0.1
    assert Auto(busy).choose((9, 8)) == Auto(CHEAP).choose((9, 8))
    other = CostCurve([0.01 * c for c in CHEAP], lambda: told.append("other"))
    for n in range(400):
        other.observe(n % 9 + 1, 0.01 * LINEAR[n % 9])
    assert told == ["other"]
    assert Auto(other).choose((2, 8)) == 0 < Auto(CHEAP).choose((2, 8))


# ---- measuring -------------------------------------------------------------------------------------------------------


class Sleepy:
    """A pass over n rows takes n milliseconds, except that some take a spike more."""

    def __init__(self, spikes=(), context=64):
        self.calls, self.spikes, self.vocab_size, self.context = 0, spikes, 4, context

    def new_cache(self, capacity):
        from scripted import ScriptedCache

        return ScriptedCache(capacity)

    def forward(self, tokens, cache, *, last):
        cache.ids.extend(tokens)
        assert cache.length <= cache.capacity
        self.calls += 1
        time.sleep(0.001 * len(tokens) + (0.02 if self.calls in self.spikes else 0))
        return torch.zeros(last, 4)


def test_costs_are_measured_within_the_budget():
    start = time.perf_counter()
    costs = measure_costs(Sleepy(), budget=0.2)
    assert time.perf_counter() - start < 3  # two sweeps take 0.1 s where sleeping is exact
    assert len(costs) == 16 and costs == sorted(costs) and costs[8] > 0.009 and costs[15] > 0.016


def test_a_context_of_a_few_tokens():
    costs = measure_costs(Sleepy(context=3), budget=0.0)
    assert len(costs) == 3 and Auto(costs).choose((9, 8)) <= 2


def test_a_spike_is_not_a_cost():
    costs = measure_costs(Sleepy(spikes={3}), budget=0.1)
    assert costs[1] < 0.02
