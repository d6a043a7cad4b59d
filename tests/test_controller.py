"""How K follows cost and acceptance. Costs are given, so every figure here is exact."""

import itertools
import json
import random
import time

import pytest

import specloop.pair
from controllers import BLAS, CHEAP, LINEAR, crew, feed, play
from scripted import FunctionDraft, ToyTokenizer, anti, oracle, scripted
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
from specloop.costs import CostCurve
from specloop.drafts.lookup import LookupDraft
from specloop.pair import Pair


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
    assert ks.count(0) >= 285  # the others are probes


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
    for make in (lambda: Auto(CHEAP), lambda: Auto(CostCurve(live[0]), steady=CHEAP)):
        assert ks(make(), 0) == ks(make(), 0.9) and any(ks(make(), 0))
    assert ks(Auto(CostCurve(live[0])), 0) != ks(Auto(CostCurve(live[1])), 0.9)  # what the clocks say is heard


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
