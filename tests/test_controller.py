"""How K follows cost and acceptance. Costs are given, so every figure here is exact."""

import itertools
import random
import time

import pytest
import torch

from scripted import FunctionDraft, anti, oracle, request_for, scripted
from specloop.controller import FIRST_PAUSE, LONGEST_PAUSE, PROBE, Auto, Fixed, measure_costs
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft

CHEAP = [1.0, 1.06, 1.12, 1.18, 1.25, 1.4, 1.5, 1.6, 1.7]  # reads every weight once per pass
BLAS = [1.0, 1.9, 1.9, 1.9, 1.9, 1.95, 1.95, 2.0, 2.0]  # the second row costs as much as the first
LINEAR = [float(n) for n in range(1, 10)]


def feed(auto, rate, rounds, strength=0, limit=8, seed=0):
    """Plays rounds with that acceptance per token; returns (the Ks, cost of it all, tokens)."""
    rng, ks, cost, tokens = random.Random(seed), [], 0.0, 0
    for _ in range(rounds):
        k = auto.choose((strength, limit))
        accepted = next((j for j in range(k) if rng.random() >= rate), k)
        auto.observe((strength, limit), k, accepted)
        ks.append(k)
        cost += auto.costs[k]
        tokens += accepted + 1
    return ks, cost, tokens


def test_all_accepted_means_the_most_rows():
    ks, cost, tokens = feed(Auto(CHEAP), 1.0, 60)
    assert ks[-30:] == [8] * 30 and tokens / cost > 4


def test_none_accepted_costs_less_than_three_percent():
    ks, cost, tokens = feed(Auto(CHEAP), 0.0, 400)
    assert tokens == 400 and cost < 1.03 * 400
    assert ks[30:].count(0) > 350


@pytest.mark.parametrize("rate, best", [(0.9, 8), (0.8, 8)])
def test_a_step_in_the_cost_is_no_trap(rate, best):
    """With the second row this dear K = 1 loses at any acceptance; only the argmax over all K sees that 8 wins."""
    auto = Auto(BLAS)
    ks, cost, tokens = feed(auto, rate, 200)
    assert max(set(ks[50:]), key=ks[50:].count) == best and tokens / cost > 1.2


def test_rows_that_cost_as_much_as_passes_are_never_worth_it():
    ks, cost, tokens = feed(Auto(LINEAR), 0.9, 300)
    assert ks.count(0) > 270 and cost < 1.1 * tokens


def test_k_matches_the_formula():
    auto = Auto(CHEAP)
    for counter in auto.counters:
        counter.hits, counter.trials = 6e6, 10e6
    speeds = [sum(0.6**j for j in range(k + 1)) / CHEAP[k] for k in range(9)]
    assert auto.choose((0, 8)) == speeds.index(max(speeds))
    assert auto.last_best == pytest.approx(max(speeds))
    assert auto.choose((0, 2)) == 2


def test_k_rises_and_falls_with_the_text():
    auto = Auto(CHEAP)
    feed(auto, 0.0, 60)
    pause = auto.pause
    ks, _, _ = feed(auto, 1.0, 200)
    first = next(i for i, k in enumerate(ks) if k)
    assert first <= pause and ks[first + 10] == 8
    ks, _, _ = feed(auto, 0.0, 40)
    assert min(ks[:20]) <= 4 and max(ks[30:]) <= 1


def test_long_matches_do_not_pay_for_short_ones():
    auto = Auto(CHEAP)
    for _ in range(60):
        for strength, good in ((2, 0.0), (20, 1.0)):
            k = auto.choose((strength, 8))
            auto.observe((strength, 8), k, int(good * k))
    auto.skipped = 0
    assert auto.choose((2, 8)) == 0 and auto.choose((20, 8)) == 8


def test_an_accepted_token_makes_the_match_longer():
    auto = Auto(CHEAP)
    auto.observe((3, 3), 3, 2)  # 3 -> hit, 4 -> hit, 5 -> miss
    assert {i: c.hits for i, c in enumerate(auto.counters) if c.trials} == {3: 1, 4: 1, 5: 0}


def test_probes_back_off_and_come_back():
    auto = Auto(CHEAP)
    ks, _, _ = feed(auto, 0.0, 2000)
    probes = [i for i, k in enumerate(ks) if k and i > 60]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert {ks[i] for i in probes} == {PROBE}
    assert sorted(gaps) == gaps and gaps[-1] == LONGEST_PAUSE
    feed(auto, 1.0, LONGEST_PAUSE + 1)
    assert auto.pause == FIRST_PAUSE


def test_nothing_to_propose_is_k_zero_and_no_lesson():
    auto = Auto(CHEAP)
    for _ in range(100):
        assert auto.choose((0, 0)) == 0
        auto.observe((0, 0), 0, 0)
    assert not any(c.trials for c in auto.counters) and auto.off_reason() is None


def test_off_reason():
    auto = Auto(CHEAP)
    feed(auto, 0.0, 100)
    assert auto.off_reason().startswith("drafting does not pay")
    assert Fixed(0).off_reason() == "no draft" and Fixed(2).off_reason() is None


def test_a_dear_draft_is_not_used():
    assert set(feed(Auto(CHEAP, draft_cost=2.0), 1.0, 15)[0]) == {0}


def test_fixed_takes_what_there_is():
    assert [Fixed(3).choose((1, n)) for n in (0, 2, 5)] == [0, 2, 3]


# ---- in the loop -----------------------------------------------------------------------------------------------------


def decoded(model, draft, tokens=120):
    request = request_for(model, [1, 2], tokens, draft, Auto(CHEAP))
    list(decode(model, [request]))
    cost = sum(CHEAP[k] for k in request.stats.speculation.k_history)
    return request, tokens / cost


def test_speed_with_good_and_bad_drafts():
    model = scripted(lambda prefix: len(prefix) * len(prefix) % 17, 17)
    assert decoded(model, oracle(model))[1] > 3
    assert decoded(model, anti(model))[1] > 0.95
    assert decoded(model, FunctionDraft(lambda prefix, j: 0, limit=0))[1] == 1


def test_lookup_on_repeats_and_on_noise():
    rng = random.Random(3)
    noise = [rng.randrange(500) for _ in range(400)]
    repeats = scripted(lambda prefix: noise[len(prefix) % 23], 500)
    random_text = scripted(lambda prefix: noise[len(prefix)], 500)
    assert decoded(repeats, LookupDraft())[1] > 2
    assert decoded(random_text, LookupDraft())[1] > 0.97


def test_rounds_that_were_cut_teach_nothing():
    seen = []

    class Spy(Auto):
        def observe(self, *args):
            seen.append(args)

    model = scripted(lambda prefix: 9 if len(prefix) == 4 else 1, 10, eos_ids=[9])
    request = request_for(model, [1, 2], 38, oracle(model), Spy([1.0] * 9))
    list(decode(model, [request]))
    assert request.ids == [1, 2, 1, 1, 9] and seen == []


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
    assert len(costs) == 9 and costs == sorted(costs) and costs[8] > 0.009


def test_a_context_of_a_few_tokens():
    costs = measure_costs(Sleepy(context=3), budget=0.0)
    assert len(costs) == 3 and Auto(costs).choose((9, 8)) <= 2


def test_a_spike_is_not_a_cost():
    costs = measure_costs(Sleepy(spikes={3}), budget=0.1)
    assert costs[1] < 0.02
