"""How the drafts of a round are shared out among several requests. Costs are given, so every figure here is exact."""

import itertools
import random

import pytest

from controllers import BLAS, CHEAP, crew
from scripted import request_for, scripted
from specloop.controller import FIRST_PAUSE, Auto, Fixed, plan
from specloop.costs import CostCurve
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft


def best_by_trying(rates, limits, costs, draft_cost=0.0):
    """(speed, Ks) over all combinations."""
    found = []
    for ks in itertools.product(*(range(limit + 1) for limit in limits)):
        tokens = len(rates) + sum(sum(r**j for j in range(1, k + 1)) for r, k in zip(rates, ks, strict=True))
        found.append((tokens / (costs.seconds(len(ks) + sum(ks)) + sum(ks) * draft_cost), ks))
    return max(found)


@pytest.mark.parametrize("costs", [CHEAP, BLAS, [0.01 * c for c in CHEAP]])
@pytest.mark.parametrize("draft_cost", [0.0, 0.05])
def test_shared_rows_go_where_they_are_accepted(costs, draft_cost):
    """The greedy choice by survival is the best of all combinations."""
    costs, rng = CostCurve.given(costs), random.Random(7)
    draft_cost *= costs.seconds(1)
    for _ in range(12):
        rates = [rng.choice((0.0, 0.2, 0.5, 0.7, 0.9)) + 0.01 * rng.random() for _ in range(rng.choice((1, 2, 3)))]
        limits = [rng.randrange(5) for _ in rates]
        ks = plan(crew(rates, costs, draft_cost=draft_cost), [(0, limit) for limit in limits])
        speed, best = best_by_trying(rates, limits, costs, draft_cost)
        plain = len(rates) / costs.seconds(len(rates))
        assert ks == (list(best) if speed >= 1.03 * plain else [0] * len(rates)), (rates, limits)


def test_a_request_without_drafts_does_not_keep_others_from_theirs():
    ks = plan(crew([0.9, 0.0, 0.9], CHEAP), [(0, 8), (0, 0), (0, 8)])
    assert ks[1] == 0 and min(ks[0], ks[2]) >= 2
    ks = plan(crew([0.9, 0.02], CHEAP), [(0, 8), (0, 8)])
    assert ks[0] >= 4 and ks[1] == 0


def test_more_requests_leave_fewer_rows_for_each():
    costs = [1.0 + 0.05 * n + (0.2 * (n - 8) if n > 8 else 0.0) for n in range(16)]
    alone = plan(crew([0.7], costs), [(0, 8)])[0]
    together = plan(crew([0.7] * 8, costs), [(0, 8)] * 8)
    assert alone >= 4 and max(together) <= 1
    assert plan(crew([0.7] * 40, costs), [(0, 8)] * 40) == [0] * 40  # beyond what was measured


def test_what_is_fixed_is_given_and_the_rest_planned_around_it():
    costs = [1.0] * 8 + [3.0] * 8
    auto, outlooks = crew([0.9], costs), [(0, 6), (0, 8)]
    ks = plan([Fixed(4), *auto], outlooks)
    assert ks == [4, 2]  # eight rows are as cheap as one
    assert plan([Fixed(4), *crew([0.9], costs)], [(0, 3), (0, 8)]) == [3, 3]


def test_a_steady_request_is_decided_as_if_it_were_alone():
    costs, steady = CostCurve([1.0 + 0.1 * n for n in range(16)]), [2.0 + 0.1 * n for n in range(16)]
    outlook = (0, 8)
    for rate in (0.3, 0.6, 0.9):
        alone = crew([rate], costs, steady=steady)[0].choose(outlook)
        (one,) = crew([rate], costs, steady=steady)
        for neighbours in ([0.9] * 3, [0.1] * 7):
            ks = plan([*crew(neighbours, costs), one], [outlook] * (len(neighbours) + 1))
            assert ks[-1] == alone
    for _ in range(50):
        costs.observe(9, 20.0)
    assert crew([0.6], costs, steady=steady)[0].choose(outlook) == plan(crew([0.6], steady), [outlook])[0]


def test_a_request_in_a_batch_probes_on_its_own():
    (good, bad), outlooks = crew([0.9, 0.0], CHEAP), [(0, 8), (0, 8)]
    probes = []
    for n in range(3 * FIRST_PAUSE + 1):
        ks = plan([good, bad], outlooks)
        assert ks[0] >= 2
        for auto, k, accepted in ((good, ks[0], ks[0]), (bad, ks[1], 0)):
            auto.observe((0, 8), k, accepted)
        probes += [n] if ks[1] else []
    assert probes == [FIRST_PAUSE - 1, 3 * FIRST_PAUSE - 1]


def test_a_tree_costs_its_nodes_however_deep_it_is():
    costs = [1.0 + 0.05 * n for n in range(16)]
    for rate in (0.05, 0.3, 0.5, 0.9):
        for draft_cost in (0.0, 0.05, 0.2):
            (auto,) = crew([rate], costs, draft_cost=draft_cost, tree=5)
            speed = (1 + sum(rate**j for j in range(1, 5))) / (costs[5] + 5 * draft_cost)
            assert auto.choose((0, 4)) == (4 if speed >= 1.03 else 0)
            assert auto.choose((9, 4)) == crew([rate], costs)[0].choose((9, 4))  # a lookup beside it is a chain
    ks = plan([*crew([0.9], costs, tree=6), *crew([0.9], costs)], [(0, 8), (0, 8)])
    assert min(ks) > 2


def test_a_repeating_row_speeds_up_beside_a_random_one():
    """In the loop, as a batch: K of each follows its own text."""
    rng = random.Random(3)
    phrase, noise = [rng.randrange(300) for _ in range(10)], [rng.randrange(300) for _ in range(200)]
    texts = {7: phrase * 20, 8: noise}  # by the first id
    model = scripted(lambda prefix: texts[prefix[0]][len(prefix) - 1], 300)
    costs = [1.0 + 0.05 * n for n in range(16)]
    both = [request_for(model, [first], 199, LookupDraft(), Auto(costs)) for first in texts]
    repeats, random_text = both
    list(decode(model, [repeats, random_text]))
    assert [request.ids[1:] for request in both] == [text[:199] for text in texts.values()]
    assert repeats.stats.speculation.rounds < 60 and random_text.stats.speculation.rounds > 190
    assert sum(random_text.stats.speculation.k_history) < 20
