"""How K follows cost and acceptance. Costs are given, so every figure here is exact."""

import itertools
import json
import random
import time

import pytest
import torch

import specloop.pair
from scripted import FunctionDraft, ToyTokenizer, anti, oracle, request_for, scripted
from specloop import cli
from specloop.controller import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PROBE,
    STREAK,
    Auto,
    Fixed,
    plan,
    worth_drafting,
    worth_loading,
)
from specloop.costs import CostCurve, measure_costs
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.pair import Pair

CHEAP = [1.0, 1.06, 1.12, 1.18, 1.25, 1.4, 1.5, 1.6, 1.7]  # reads every weight once per pass
BLAS = [1.0, 1.9, 1.9, 1.9, 1.9, 1.95, 1.95, 2.0, 2.0]  # the second row costs as much as the first
LINEAR = [float(n) for n in range(1, 10)]


def play(model, prompt, tokens, draft, controller):
    """The request, decoded to its end."""
    request = request_for(model, list(prompt), tokens, draft, controller)
    list(decode(model, [request]))
    return request


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


@pytest.mark.parametrize("strength", [0, 2, 5, 9, 20, 100])
@pytest.mark.parametrize("costs", [CHEAP, BLAS])
def test_none_accepted_costs_less_than_three_percent(strength, costs):
    """However much the draft's strength promises."""
    ks, cost, tokens = feed(Auto(costs), 0.0, 400, strength)
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
    assert min(ks[:20]) <= 4 and ks[30:].count(0) >= 9


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
    ks = feed(Auto(CHEAP, draft_cost=2.0), 1.0, 300)[0]
    assert ks.count(0) >= 290


def test_fixed_takes_what_there_is():
    assert [Fixed(3).choose((1, n)) for n in (0, 2, 5)] == [0, 2, 3]


def test_a_match_that_grows_round_by_round_is_a_reason_to_try():
    """Without drafts a round emits one id; a lookup whose match grew by one would have been right."""
    auto = Auto(CHEAP)
    for counter in auto.counters:  # long matches were wrong
        counter.trials = 20.0
    auto.pause = LONGEST_PAUSE
    waited = next(n for n in range(60) if auto.choose((2 + n, 8)))
    assert waited <= STREAK + 1


def test_a_probe_that_goes_better_than_expected_brings_the_next_ones_near():
    """Acceptance has moved. One that goes well, as expected, has nothing new to say: the cost is what keeps K at 0."""
    for rate, outcomes in ((0.0, (False, True, True)), (0.5, (False, False, True)), (0.95, (False, False, False))):
        for accepted, near in enumerate(outcomes):
            (auto,) = crew([rate], CHEAP, draft_cost=2.0)  # never pays
            auto.pause = 64
            while not auto.choose((0, 8)):
                pass
            auto.observe((0, 8), 2, accepted)
            assert auto.pause == (FIRST_PAUSE if near else 128) and auto.skipped == 0, (rate, accepted)


def test_decisions_are_a_function_of_the_committed_ids():
    """Same ids, same Ks: clocks that tell another story change nothing where the costs are given, or steady."""
    rng = random.Random(5)
    text = [rng.randrange(6) for _ in range(300)]
    model = scripted(lambda prefix: text[len(prefix)], 6)

    def ks(controller, slow):
        class Clock:
            off_reason, rounds = controller.off_reason, 0

            def choose(self, outlook):
                return controller.choose(outlook)

            def observe(self, outlook, proposed, accepted, *_):
                self.rounds += 1
                seconds = 0.001 * (1 + slow * proposed) * (1 + slow * (self.rounds % 7))
                controller.observe(outlook, proposed, accepted, seconds, proposed + 1)

        return play(model, [1, 2], 248, LookupDraft(), Clock()).stats.speculation.k_history

    live = [[0.001 * c for c in CHEAP] for _ in range(2)]
    for make in (lambda: Auto(CHEAP), lambda: Auto(CostCurve(live[0]), steady=True)):
        assert ks(make(), 0) == ks(make(), 0.9) and any(ks(make(), 0))
    assert ks(Auto(CostCurve(live[0])), 0) != ks(Auto(CostCurve(live[1])), 0.9)  # what the clocks say is heard


# ---- several requests in one pass ------------------------------------------------------------------------------------


def crew(rates, costs, **options):
    """Controllers that know these acceptances per token."""
    autos = [Auto(costs, **options) for _ in rates]
    for auto, rate in zip(autos, rates, strict=True):
        for counter in auto.counters:
            counter.hits, counter.trials = rate * 1e7, 1e7
    return autos


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
    costs = CostCurve([1.0 + 0.1 * n for n in range(16)])
    outlook = (0, 8)
    for rate in (0.3, 0.6, 0.9):
        alone = crew([rate], costs, steady=True)[0].choose(outlook)
        (steady,) = crew([rate], costs, steady=True)
        for neighbours in ([0.9] * 3, [0.1] * 7):
            ks = plan([*crew(neighbours, costs), steady], [outlook] * (len(neighbours) + 1))
            assert ks[-1] == alone
    for _ in range(50):
        costs.observe(9, 20.0)
    assert crew([0.6], costs, steady=True)[0].choose(outlook) == plan(crew([0.6], list(costs.measured)), [outlook])[0]


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


# ---- time limit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: Fixed(4), lambda: Auto([c / 1000 for c in CHEAP]), lambda: Fixed(4, timeout=0.5)]
)
def test_a_verification_that_takes_too_long_is_followed_by_rounds_without_drafts(make):
    controller, outlook = make(), (9, 8)

    def rounds_without(seconds):
        k = controller.choose(outlook)
        assert k
        controller.observe(outlook, k, k, seconds, k + 1)
        count = 0
        while not controller.choose(outlook):
            controller.observe(outlook, 0, 0, 0.001, 1)
            count += 1
        return count

    assert [rounds_without(0.01) for _ in range(3)] == [0, 0, 0] and controller.off_reason() is None
    waits = [rounds_without(5.0) for _ in range(6)]
    assert waits == [8, 16, 32, 64, 128, 256]
    assert "a verification took 5.00 s, the limit is" in controller.off_reason()
    assert rounds_without(0.01) == 0 and controller.off_reason() is None and rounds_without(5.0) == 8


def test_what_is_over_the_limit():
    def reason(controller, seconds, proposed=4):
        controller.observe((0, 8), 4, 4, 0.3, 5)  # what is usual
        controller.observe((0, 8), proposed, proposed, seconds, proposed + 1)
        return controller.off_reason()

    slow_model = [0.3] * 9
    assert reason(Auto(slow_model), 2.9) is None and "limit is 3.00 s" in reason(Auto(slow_model), 3.1)
    assert reason(Fixed(4), 2.9) is None and "limit is 3.00 s" in reason(Fixed(4), 3.1)
    assert reason(Auto([0.001] * 9), 0.9) is None and "limit is 1.00 s" in reason(Auto([0.001] * 9), 1.1)
    assert "limit is 0.40 s" in reason(Auto(slow_model, timeout=0.4), 0.5)
    assert reason(Fixed(4), 3.1, proposed=0) is None  # without drafts there is nothing to leave out


def test_in_a_batch_only_the_late_ones_rest():
    late, other = Fixed(3, timeout=0.1), Fixed(3)
    for controller in (late, other):
        controller.observe((0, 8), 3, 3, 0.2, 8)
    assert plan([late, other], [(0, 8)] * 2) == [0, 3]


def test_a_slow_verification_in_the_loop_degrades_to_plain_decoding():
    text = [n * n % 11 for n in range(80)]
    model = scripted(lambda prefix: text[len(prefix)], 11)
    forward = model.forward

    def slowly(tokens, cache, *, last):
        time.sleep(0.05 if last > 1 and len(tokens) < 10 else 0)
        return forward(tokens, cache, last=last)

    model.forward = slowly
    request = play(model, text[:2], 50, oracle(model), Fixed(4, timeout=0.02))
    counts = request.stats.speculation
    assert request.ids == text[:52]
    assert counts.k_history[:9] == [4] + [0] * 8 and counts.k_history[9:26] == [4] + [0] * 16
    assert counts.off_reason.startswith("a verification took 0.0") and counts.off_reason.endswith("limit is 0.02 s")


# ---- short answers ---------------------------------------------------------------------------------------------------


def test_short_answers_are_not_worth_a_draft():
    costs = [0.01 * c for c in CHEAP]
    assert [worth_drafting(n, costs) for n in (0, 1, 2, 3, 64, 5000)] == [False, False, True, True, True, True]
    lengths = [n for n in range(400) if worth_drafting(n, costs, draft_cost=0.001, start=0.1)]
    assert lengths == list(range(lengths[0], 400)) and 8 < lengths[0] < 40  # a model has to be loaded
    assert not any(worth_drafting(n, [0.01 * c for c in LINEAR]) for n in range(100))
    assert not any(worth_drafting(n, costs, draft_cost=0.02) for n in range(100))
    assert [worth_drafting(n, BLAS) for n in (2, 3, 100)] == [False, True, True]  # two drafts, but not one


def test_a_draft_model_is_not_loaded_for_a_few_tokens():
    assert [worth_loading(n) for n in (1, 5, 10)] == [False] * 3 and worth_loading(40) and worth_loading(128)


@pytest.mark.parametrize("tokens, more, draft", [("4", (), "none"), ("64", (), "model"), ("4", ("--k", "2"), "model")])
def test_the_command_line_loads_it_only_where_it_can_pay(monkeypatch, tmp_path, capsys, tokens, more, draft):
    path, seen = tmp_path / "draft.gguf", []
    path.touch()

    def load(target, draft="auto", **options):
        seen.append("model" if draft == str(path) else draft)
        model = scripted(lambda prefix: len(prefix) % 3, 4)
        return Pair(lambda: (model, ToyTokenizer("abcd"), None), draft="none")

    monkeypatch.setattr(specloop.pair, "load", load)
    code = cli.run(["generate", "ab", "--draft", str(path), "--max-new-tokens", tokens, "--json", *more])
    assert seen == [draft]
    if draft == "none":
        reason = json.loads(capsys.readouterr().out)["speculation"]["off_reason"]
        assert code == 0 and reason == "the draft was not loaded: at most 4 tokens do not win back the time"


def test_a_model_and_a_lookup_have_counters_of_their_own():
    """As in a chain of both: strength 0 is the model's."""
    auto = Auto(CHEAP, draft_cost=0.2)
    for _ in range(60):
        for outlook, good in (((0, 8), False), ((3, 8), True)):
            k = auto.choose(outlook)
            auto.observe(outlook, k, k if good else 0)
    auto.skipped = 0
    assert auto.choose((3, 8)) == 8 and auto.choose((0, 8)) == 0
    dear = Auto(CHEAP, draft_cost=2.0)  # the lookup costs nothing
    assert dear.choose((9, 8)) > 0 and dear.choose((0, 8)) == 0


def test_worth_drafting_is_the_best_of_all_ways():
    """Two tokens, one draft, right 9 times of 10: 1.7 passes, or 1.9 + 0.1."""
    assert worth_drafting(2, [1.0, 1.7]) and not worth_drafting(2, [1.0, 1.9])
    assert worth_drafting(2, [1.0, 1.7], start=0.1) and not worth_drafting(2, [1.0, 1.7], start=0.2)
    assert worth_drafting(2, [1.0, 1.7], draft_cost=0.1) and not worth_drafting(2, [1.0, 1.7], draft_cost=0.2)


# ---- half repetitive, half random ------------------------------------------------------------------------------------


class Noted(Auto):
    """Remembers (emitted ids before the round, K)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rounds, self.at = [], 0

    def observe(self, outlook, proposed, accepted, *cost):
        super().observe(outlook, proposed, accepted)
        self.rounds.append((self.at, proposed))
        self.at += accepted + 1


@pytest.mark.parametrize("kinds", [500, 40])  # in the second, short matches are everywhere, and wrong
@pytest.mark.parametrize("order", [("repeats", "noise"), ("noise", "repeats")])
@pytest.mark.parametrize("costs", [CHEAP, [1.0, 1.1, 1.2, 1.3, 1.9, 2.0, 2.1, 2.2, 2.4]])
def test_k_follows_the_text_within_ten_rounds(order, costs, kinds):
    """A text of two halves, the lookup draft and the loop: K is large in one and hardly ever above 0 in the other."""
    rng, half = random.Random(11), 240
    phrase = [rng.randrange(500) for _ in range(12)]
    halves = {"repeats": phrase * 20, "noise": [rng.randrange(kinds) for _ in range(half)]}
    text, controller = halves[order[0]] + halves[order[1]], Noted(costs)
    model = scripted(lambda prefix: text[len(prefix) - 1], 500)
    play(model, [1], 2 * half, LookupDraft(), controller)
    for start, name in zip((0, half), order, strict=True):
        # Nothing can be found before the phrase comes a second time.
        lead = len(phrase) if name == "repeats" else 0
        ks = [k for at, k in controller.rounds if start + lead <= at < start + half][10:]
        assert len(ks) > 5
        if name == "repeats":
            assert min(ks[:-1]) >= 3 and sum(ks) >= 0.8 * 8 * len(ks), ks
        else:
            assert ks.count(0) >= 0.7 * len(ks), ks
            tokens = sum(1 for at, _ in controller.rounds if start <= at < start + half)  # one a round, or more
            assert tokens >= 0.97 * sum(costs[k] for at, k in controller.rounds if start <= at < start + half)


# ---- in the loop -----------------------------------------------------------------------------------------------------


def decoded(model, draft, tokens=120):
    request = play(model, [1, 2], tokens, draft, Auto(CHEAP))
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
    request = play(model, [1, 2], 38, oracle(model), Spy([1.0] * 9))
    assert request.ids == [1, 2, 1, 1, 9] and seen == []


# ---- costs -----------------------------------------------------------------------------------------------------------


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
