"""The lossy rule keeps its promise: the share of greedy tokens, in every text and every window, whatever is drafted."""

import itertools
import math
import random

import pytest
import torch

from scripted import FunctionDraft, Scripted, argmax, law, oracle, request_for
from specdec_kernels import native, use_backend, verify
from specloop.acceptance import judge
from specloop.decode import decode
from specloop.drafts.base import Proposal
from specloop.errors import OptionError
from specloop.threshold import LEAST, STRICT, Threshold

BACKENDS = ["reference"] + (["cpu"] if native.cpu is not None else [])


def keeps(agreed, window, set_point):
    """Whether the share holds in each beginning of the text and in each window."""
    bad = [not a for a in agreed]
    starts = all(sum(bad[:n]) <= (1 - set_point) * n + 1e-9 for n in range(1, len(bad) + 1))
    windows = (bad[i : i + window] for i in range(len(bad) - window + 1))
    return starts and all(sum(w) <= (1 - set_point) * window + 1e-9 for w in windows)


# ---- the account -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window, set_point", list(itertools.product((1, 2, 3, 4, 7), (0.3, 0.5, 0.75, 1.0))))
@pytest.mark.parametrize("size", [1, 3])
def test_credit_is_exactly_what_the_share_leaves(window, set_point, size):
    """All wishes of nine tokens, in rounds of ``size``: what is allowed keeps the share, what is not would break it."""
    for wishes in itertools.product((False, True), repeat=9):
        account, text = Threshold(window=window, set_point=set_point), []
        for at in range(0, 9, size):
            pending = []
            for wish in wishes[at : at + size]:
                broken = not keeps([*text, *pending, False], window, set_point)
                allowed = account.allows(pending)
                if allowed:
                    assert not broken or not keeps([*text, *pending, True], window, set_point)
                # A window that is not full yet counts as one that will be: stricter than the text so far.
                elif not broken:
                    assert (1 - set_point) * window + 1e-9 < [*text, *pending][1 - window :].count(
                        False
                    ) + 1 or window == 1
                pending.append(not (wish and allowed))
            account.observe(pending, [0.0] * len(pending))
            text += pending
        assert keeps(text, window, set_point)
        assert account.agreement == pytest.approx(sum(text) / 9)


def test_defaults_lend_one_token_in_fifty():
    account, text = Threshold(), []
    for _ in range(1000):
        miss = account.allows(())
        account.observe([not miss], [0.0])
        text.append(not miss)
    assert keeps(text, 64, 0.98)
    misses = [i for i, agreed in enumerate(text) if not agreed]
    assert misses[0] == 49 and {b - a for a, b in itertools.pairwise(misses)} == {64}


def test_a_debt_is_paid_before_anything_is_lent():
    account = Threshold(window=4, set_point=0.75)
    account.observe([True] * 8, [0.0] * 8)
    assert account.allows(()) and account.theta < STRICT
    account.observe([False] * 5, [1.0] * 5)  # drawn at a temperature
    rounds = 0
    while not account.allows(()):
        assert account.theta == STRICT
        account.observe([True], [0.0])
        rounds += 1
    assert account.misses == 5 and rounds == 10  # 6 of 24


def test_theta_falls_while_nothing_is_good_enough_and_rises_when_something_was():
    account = Threshold(0.4, window=10, set_point=0.9)
    assert account.theta == STRICT and account.path == []
    account.observe([True] * 20, [0.0] * 20)
    assert account.theta == pytest.approx(0.4) and account.path == [STRICT]
    account.observe([True], [0.0])
    assert account.theta < 0.4 and account.path == [STRICT, pytest.approx(0.4)]
    before = account.theta
    account.observe([True, False], [0.0, 1.0], lent=1)
    assert account.theta == STRICT and account.path[2] == before and account.lent == 1
    account.observe([True] * 20, [0.0] * 20)
    assert before < account.theta <= STRICT
    for _ in range(500):
        account.observe([True], [0.0])
    assert account.theta == LEAST and account.mean_gap == pytest.approx(1 / account.tokens)
    assert Threshold(7.0).theta == STRICT and Threshold(1e-9)._level == LEAST


def test_nothing_was_emitted():
    assert (Threshold().agreement, Threshold().mean_gap) == (None, None)


@pytest.mark.parametrize(
    "name, options",
    [("theta", {"start": value}) for value in (0, -1.0, math.nan, math.inf, "x", True)]
    + [("theta_window", {"window": value}) for value in (0, -3, 1.5, True, None)]
    + [("agreement", {"set_point": value}) for value in (0, 1.01, math.nan, "x", True)],
)
def test_bad_options(name, options):
    with pytest.raises(OptionError, match=f"{name}: expected"):
        Threshold(**options)


# ---- theta without credit --------------------------------------------------------------------------------------------


def hard_rows(g, vocab):
    """Rows in which the two best are equal, nearly equal, or share all of the mass."""
    for kind in range(75):
        row = torch.randn(vocab, generator=g) * 10 ** (kind % 3 - 1)
        a, b = torch.randperm(vocab, generator=g)[:2].tolist()
        if kind % 5 < 4:
            row -= 60.0 * (kind % 2)
            row[a] = row[b] = 5.0 + torch.rand(1, generator=g).item()
        if kind % 5 in (1, 2):
            row[b] = torch.nextafter(row[a], torch.tensor(math.inf if kind % 5 == 1 else -math.inf))
        yield row, (a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_without_credit_nothing_but_the_argmax_passes(backend, temperature):
    passed = 0
    for vocab in (2, 5, 130):
        for row, candidates in hard_rows(torch.Generator().manual_seed(vocab), vocab):
            for token in candidates:
                with use_backend(backend):
                    verdict = verify(
                        torch.stack([row, row]), torch.tensor([token]), torch.tensor([0, 1], dtype=torch.int32),
                        temperature=temperature, seed=torch.tensor([3]), position=torch.tensor([9]), max_drafts=1,
                        rule="threshold", theta=STRICT,
                    )  # fmt: skip
                if verdict.num_accepted.item():
                    passed += 1
                    assert token == int(row.argmax()), (row, token)
    assert passed > 20


# ---- in the loop -----------------------------------------------------------------------------------------------------

VOCAB = 7


def two_good(prefix):
    """The best and the second best have 46 % and 42 %; which ones depends on the prefix."""
    best = (sum(prefix[-3:]) * 5 + len(prefix)) % VOCAB
    second = (best + 1 + len(prefix) % (VOCAB - 1)) % VOCAB
    p = [0.12 / (VOCAB - 2)] * VOCAB
    p[best], p[second] = 0.46, 0.42
    return [math.log(x) for x in p]


def second_best(logits):
    return FunctionDraft(lambda prefix, j: sorted(range(VOCAB), key=logits(prefix).__getitem__)[-2])


def run(draft, k, tokens=300, threshold=None, rule="threshold", logits=two_good, **sampling):
    model = Scripted(logits, VOCAB)
    threshold = Threshold() if threshold is None and rule == "threshold" else threshold
    options = {"rule": rule, "threshold": threshold, "sampling": sampling, "max_fallbacks": 1000}
    request = request_for(model, [1, 2], tokens, draft, k=k, **options)
    list(decode(model, [request]))
    return request


def teacher_forced(ids, logits=two_good):
    """Whether each emitted id is the target's first choice after the ids before it, and the mean gap."""
    agreed = [ids[n] == argmax(logits(ids[:n])) for n in range(2, len(ids))]
    logs = [[math.log(p) for p in law(logits(ids[:n]))] for n in range(2, len(ids))]
    gaps = [max(log) - log[token] for log, token in zip(logs, ids[2:], strict=True)]
    return agreed, sum(gaps) / len(gaps)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("window, set_point", [(64, 0.98), (16, 0.9), (5, 0.5), (64, 1.0)])
def test_a_draft_that_is_always_second_best(k, window, set_point):
    """The worst that can come: every proposal is just good enough for theta, and wrong."""
    request = run(second_best(two_good), k, threshold=Threshold(0.3, window, set_point))
    threshold = request.threshold
    agreed, gap = teacher_forced(request.ids)
    assert keeps(agreed, window, set_point) and threshold.tokens == len(agreed) == 300
    assert threshold.agreement == pytest.approx(sum(agreed) / 300) and threshold.mean_gap == pytest.approx(
        gap, abs=1e-6
    )
    assert agreed.count(False) == threshold.misses == threshold.lent
    wanted = {0.98: 4, 0.9: 12, 0.5: 40, 1.0: 0}[set_point]
    assert (threshold.lent >= wanted) if wanted else (threshold.lent == 0)
    assert len(threshold.path) == request.stats.speculation.rounds
    assert set(threshold.path) == {STRICT} if set_point == 1 else min(threshold.path) < STRICT


def test_random_adversaries():
    """Drafts that are right, second best or wrong, by chance, in rounds of any length."""
    rng = random.Random(2)
    for _ in range(8):
        rates = rng.random(), rng.random()

        def guess(prefix, j, rates=rates):
            ranked = sorted(range(VOCAB), key=two_good(prefix).__getitem__)
            return ranked[-1 if rng.random() < rates[0] else -2 if rng.random() < rates[1] else 0]

        window, set_point = rng.choice((1, 5, 20, 64)), rng.choice((0.5, 0.8, 0.95, 0.98))
        request = run(FunctionDraft(guess), rng.randrange(1, 9), 120, Threshold(rng.random(), window, set_point))
        agreed, _ = teacher_forced(request.ids)
        assert keeps(agreed, window, set_point)


def test_a_weak_second_best_is_not_lent():
    def clear(prefix):
        row = two_good(prefix)
        row[argmax(row)] += 4.0  # 42 % become 2 %
        return row

    request = run(second_best(clear), 3, logits=clear)
    assert request.threshold.lent == 0 and request.threshold.agreement == 1.0
    assert request.threshold.path[-1] == LEAST  # there was credit, and nothing to spend it on


def test_without_credit_it_is_the_lossless_rule():
    for temperature in (0.0, 0.7):
        for draft in (second_best(two_good), oracle(Scripted(two_good, VOCAB))):
            options = {"temperature": temperature, "seed": 5}
            lossy = run(draft, 3, 60, Threshold(set_point=1.0), **options)
            lossless = run(draft, 3, 60, rule="token", **options)
            assert lossy.ids == lossless.ids
            assert lossy.stats.speculation.k_history == lossless.stats.speculation.k_history


def test_at_a_temperature_it_lends_only_while_the_draws_leave_credit():
    cold = run(second_best(two_good), 4, threshold=Threshold(0.3, 5, 0.5), temperature=0.4, seed=1)
    agreed, _ = teacher_forced(cold.ids)
    assert cold.threshold.lent > 0 and cold.threshold.misses == agreed.count(False)
    hot = run(second_best(two_good), 4, temperature=1.0, seed=1)
    assert hot.threshold.agreement < 0.9 and hot.threshold.lent == 0  # half of the draws are not the argmax
    assert set(hot.threshold.path) == {STRICT}


def test_faster_than_lossless_where_drafts_are_second_best():
    options = {"threshold": Threshold(0.3, 5, 0.5)}
    lossy, lossless = run(second_best(two_good), 3, **options), run(second_best(two_good), 3, rule="token")
    assert lossy.stats.speculation.rounds < 0.9 * lossless.stats.speculation.rounds


def test_a_text_that_ends_within_a_round_counts_what_it_has():
    model = Scripted(two_good, VOCAB)
    threshold = Threshold(0.3, 5, 0.5)
    seen = []

    def stop(token):
        seen.append(token)
        return len(seen) == 11

    draft = second_best(two_good)
    request = request_for(model, [1, 2], 40, draft, k=8, rule="threshold", threshold=threshold, stop=stop)
    list(decode(model, [request]))
    agreed, _ = teacher_forced(request.ids)
    assert threshold.tokens == len(agreed) == 11 and threshold.misses == agreed.count(False) == threshold.lent


# ---- one round -------------------------------------------------------------------------------------------------------


def ready():
    """An account with plenty of credit."""
    threshold = Threshold(0.15, 20, 0.2)
    threshold.observe([True] * 50, [0.0] * 50)
    return threshold


def request_of(ids, threshold, **sampling):
    model = Scripted(two_good, VOCAB)
    return request_for(model, ids, 40, rule="threshold", threshold=threshold, sampling=sampling)


def test_a_tree_is_followed_where_it_was_lent():
    ids = [1, 2, 3]
    ranked = lambda prefix: sorted(range(VOCAB), key=two_good(prefix).__getitem__)
    third, second = ranked(ids)[-3], ranked(ids)[-2]
    best_below = ranked([*ids, second])[-1]
    #   third (refused)      second (lent)  ->  a poor one, the best one  ->  one more
    tokens = [third, second, ranked([*ids, third])[-1], ranked([*ids, second])[0], best_below]
    parents = [-1, -1, 0, 1, 1]
    tokens.append(ranked([*ids, second, best_below])[-1])
    parents.append(4)
    paths = [[third], [second], [third, tokens[2]], [second, tokens[3]], [second, best_below]]
    paths.append([second, best_below, tokens[5]])
    rows = torch.tensor([two_good(ids), *(two_good([*ids, *path]) for path in paths)])
    request = request_of(ids, ready())
    (verdict,) = judge(rows, [request], [Proposal(tokens, parents)])
    assert verdict.path == [1, 4, 5] and verdict.accepted == 3 and verdict.lent == [0]
    assert verdict.tokens == [second, best_below, tokens[5], ranked([*ids, *paths[-1]])[-1]]
    assert verdict.agreed == [False, True, True, True]
    request = request_of(ids, Threshold(set_point=1.0))
    (verdict,) = judge(rows, [request], [Proposal(tokens, parents)])
    assert verdict.path == [] and verdict.tokens == [ranked(ids)[-1]] and verdict.lent == []


def by_hand(rows, tokens, draft_rows, threshold, seed, position):
    """(emitted tokens, how many were lent): lossless rounds, between them drafts by the threshold alone."""
    emitted, lent, at = [], 0, 0
    while True:
        n = len(tokens) - at
        logits = {} if draft_rows is None or not n else {"draft_logits": draft_rows[at:]}
        found = verify(
            rows[at:], torch.tensor(tokens[at:], dtype=torch.int64), torch.tensor([0, n], dtype=torch.int32),
            temperature=1.0, seed=torch.tensor([seed]), position=torch.tensor([position + at]), max_drafts=n, **logits,
        )  # fmt: skip
        accepted = found.num_accepted.item()
        emitted += found.tokens[0, : accepted + 1].tolist()
        at += accepted
        if at == len(tokens):
            return emitted, lent
        p = rows[at].softmax(0)[tokens[at]]
        q = 1.0 if draft_rows is None else draft_rows[at].softmax(0)[tokens[at]]
        agreed = [int(rows[i].argmax()) == token for i, token in enumerate(emitted[:at])]
        if not threshold.allows(agreed) or p / q <= threshold.theta:
            return emitted, lent
        emitted[-1], lent, at = tokens[at], lent + 1, at + 1


@pytest.mark.parametrize("drawn", [False, True])
def test_what_follows_a_lent_draft_is_judged_as_a_round_of_its_own(drawn):
    """Its random numbers are those of the next position, its draft rows its own."""
    g, total = torch.Generator().manual_seed(4), 0
    for seed in range(40):
        rows, draft_rows = torch.randn(5, VOCAB, generator=g), torch.randn(4, VOCAB, generator=g) if drawn else None
        tokens = rows[:4].topk(3).indices[:, seed % 3].tolist()
        request = request_of([1, 2, 3], ready(), temperature=1.0, seed=seed)
        request.logprobs = []
        (verdict,) = judge(rows.clone(), [request], [Proposal(tokens, None, draft_rows)])
        expected, lent = by_hand(rows, tokens, draft_rows, ready(), seed, 3)
        assert verdict.tokens == expected and len(verdict.lent) == lent
        logs = [float(rows[i].log_softmax(0)[token]) for i, token in enumerate(expected)]
        assert verdict.logprobs == pytest.approx(logs, abs=1e-5)
        total += lent
    assert total > 5


def test_requests_with_other_rules_share_the_round():
    rows = torch.tensor([two_good([1, 2]), two_good([1, 2, 3])])
    second = sorted(range(VOCAB), key=two_good([1, 2]).__getitem__)[-2]
    rows[1] = torch.tensor(two_good([1, 2, second]))
    lossy, strict = request_of([1, 2], ready()), request_of([1, 2], Threshold())
    lossless = request_for(Scripted(two_good, VOCAB), [1, 2], 9)
    crew = [lossless, lossy, strict]
    verdicts = judge(rows.repeat(3, 1), crew, [Proposal([second])] * 3)
    assert [v.accepted for v in verdicts] == [0, 1, 0] and [v.lent for v in verdicts] == [[], [0], []]


def test_log_probabilities_are_given_to_who_asked():
    """Requests of one round; what is lent is judged by itself."""
    rows = torch.tensor([two_good([1, 2]), two_good([1, 2, 3])])
    second = sorted(range(VOCAB), key=two_good([1, 2]).__getitem__)[-2]
    rows[1] = torch.tensor(two_good([1, 2, second]))
    asks, silent = request_of([1, 2], ready()), request_of([1, 2], ready())
    asks.logprobs = []
    for crew in ([asks, silent], [silent, asks], [silent], [asks]):
        verdicts = judge(rows.repeat(len(crew), 1), crew, [Proposal([second])] * len(crew))
        for request, verdict in zip(crew, verdicts, strict=True):
            assert verdict.accepted == 1 and verdict.lent == [0]
            if request is silent:
                assert verdict.logprobs is None
            else:
                want = [row[token] for row, token in zip(rows.log_softmax(-1), verdict.tokens, strict=True)]
                assert verdict.logprobs == pytest.approx([float(x) for x in want], abs=1e-5)
