"""A draft that fails in any way costs rounds and never changes the text; when it is tried again, and who is told."""

import gc
import itertools
import math
import threading
import time

import pytest
import torch

import specloop.drafts.model
import specloop.faults
from loop_laws import PROMPT, distance, loop_law, model_draft, rows, wanted
from scripted import Scripted, argmax, oracle, request_for
from specloop.decode import decode
from specloop.drafts.base import Proposal
from specloop.drafts.chain import ChainDraft
from specloop.drafts.lookup import LookupDraft
from specloop.faults import GuardedDraft
from versions import PROMPT as TEXT
from versions import alone, pair_of, parts

VOCAB = 12


class Foreign:
    """A draft that is none of ours: ``propose`` is the function given."""

    name = "foreign"

    def __init__(self, propose):
        self.ids, self.begun, self._propose = [], 0, propose

    def begin(self, ids):
        self.ids, self.begun = list(ids), self.begun + 1

    def append(self, ids):
        self.ids += ids

    def outlook(self):
        return 0, 8

    def propose(self, k):
        return self._propose(self, k)


def target():
    return Scripted(rows(0, VOCAB), VOCAB)


def right(model):
    """What the target will say."""

    def propose(draft, k):
        ids = list(draft.ids)
        for _ in range(k):
            ids.append(argmax(model.logits(ids)))
        return ids[len(draft.ids) :]

    return propose


def text(model, tokens=60):
    request = request_for(model, [1, 2], tokens)
    list(decode(model, [request]))
    return request.ids


def run(draft, tokens=60, k=3, **options):
    model = target()
    request = request_for(model, [1, 2], tokens, draft, k=k, **options)
    list(decode(model, [request]))
    assert request.ids == text(model, tokens)
    return request.stats.speculation


def raising(error):
    def propose(draft, k):
        raise error

    return propose


# ---- back-off --------------------------------------------------------------------------------------------------------


def attempts(propose, rounds):
    """The rounds in which a draft was asked."""
    asked, now = [], 0

    def noting(draft, k):
        asked.append(now)
        return propose(draft, k)

    guarded = GuardedDraft(Foreign(noting), VOCAB)
    for now in range(rounds):  # noqa: B007
        guarded.round()
        if guarded.outlook([1])[1]:
            guarded.propose(2)
        else:
            assert guarded.off_reason is not None and guarded.propose(2).tokens == []
    return asked, guarded


def test_pauses_double_up_to_their_longest():
    asked, guarded = attempts(raising(RuntimeError("boom")), 1200)
    pauses = [b - a - 1 for a, b in itertools.pairwise(asked)]
    assert pauses == [0, 0, 16, 32, 64, 128, 256, 256, 256]
    assert guarded.off_reason == f"the draft failed {len(asked)} times; last: RuntimeError: boom"


def test_one_success_makes_it_well_again():
    calls = itertools.count()

    def propose(draft, k):
        if next(calls) in (3, 4, 8):  # the fourth and fifth attempts and the ninth succeed
            return [1]
        raise RuntimeError("boom")

    asked, guarded = attempts(propose, 110)
    pauses = [b - a - 1 for a, b in itertools.pairwise(asked)]
    assert pauses[:9] == [0, 0, 16, 0, 0, 0, 0, 16, 0]
    assert len(guarded.faults) == len(asked) - 3


def test_an_empty_proposal_is_no_success():
    calls = itertools.count()

    def propose(draft, k):
        if next(calls) == 3:
            return []
        raise RuntimeError("boom")

    asked, _ = attempts(propose, 60)
    assert [b - a - 1 for a, b in itertools.pairwise(asked)] == [0, 0, 16, 0, 32]


def test_the_statistics_and_the_log_say_why(caplog):
    calls = itertools.count()
    model = target()

    def propose(draft, k):
        if next(calls) in (2, 3, 4):
            raise MemoryError("no room")
        return right(model)(draft, k)

    counts = run(Foreign(propose), 120)
    assert counts.faults == ["MemoryError: no room"] * 3 and counts.fault_count == 3 and counts.off_reason is None
    assert [(e["round"], e["event"]) for e in counts.events] == [
        (3, "fault"), (4, "fault"), (5, "fault"), (5, "off"), (22, "on"),
    ]  # fmt: skip
    assert counts.k_history[4:21] == [0] * 17 and counts.k_history[21] == 3
    assert caplog.messages == ["speculation off: the draft failed 3 times; last: MemoryError: no room"]
    assert counts.acceptance_rate == 1.0


def test_one_warning_however_often_it_goes_off(caplog):
    run(Foreign(raising(RuntimeError("boom"))), 200)
    assert len(caplog.messages) == 1


# ---- kinds of faults -------------------------------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self):
        raise ZeroDivisionError


ROWS = torch.zeros(2, VOCAB)
KINDS = {
    "an exception": (raising(RuntimeError("boom")), "RuntimeError: boom"),
    "out of memory": (raising(MemoryError("no room")), "MemoryError: no room"),
    "an exception that can't be written": (raising(Mute()), "Mute"),
    "an exit": (raising(SystemExit(3)), "RuntimeError: SystemExit"),
    "an interrupt of its own": (raising(KeyboardInterrupt()), "RuntimeError: KeyboardInterrupt"),
    "out of range": (lambda d, k: [1, VOCAB], f"token id {VOCAB} proposed"),
    "negative": (lambda d, k: [-1], "token id -1 proposed"),
    "too many": (lambda d, k: [1] * (k + 1), "4 tokens proposed, 3 asked for"),
    "without an end": (lambda d, k: itertools.repeat(1), "4 tokens proposed, 3 asked for"),
    "floats": (lambda d, k: [1.0], "TypeError"),
    "NaN": (lambda d, k: [math.nan], "TypeError"),
    "words": (lambda d, k: "abc", "TypeError"),
    "nothing at all": (lambda d, k: None, "TypeError"),
    "rows of another width": (lambda d, k: Proposal([1, 2], logits=ROWS[:, :5]), "expected shape [2, 12]"),
    "a row too few": (
        lambda d, k: Proposal([1, 2], logits=ROWS[:1]),
        "expected shape [2, 12] with rows in one piece, got [1, 12]",
    ),
    "rows that are no tensor": (lambda d, k: Proposal([1], logits=[[0.0] * VOCAB]), "a tensor of floats"),
    "rows of integers": (lambda d, k: Proposal([1, 2], logits=ROWS.int()), "a tensor of floats"),
    "columns apart": (lambda d, k: Proposal([1, 2], logits=torch.zeros(VOCAB, 2).T), "rows in one piece"),
    "a map without rows": (lambda d, k: Proposal([1], ids=torch.tensor([1])), "without logits"),
    "a map of other integers": (lambda d, k: Proposal([1], logits=ROWS[:1], ids=torch.arange(VOCAB)), "int32"),
    "a map out of order": (
        lambda d, k: Proposal([1], logits=ROWS[:1, :2], ids=torch.tensor([2, 1], dtype=torch.int32)),
        "ascending",
    ),
    "a map out of range": (
        lambda d, k: Proposal([1], logits=ROWS[:1, :2], ids=torch.tensor([2, VOCAB], dtype=torch.int32)),
        "ascending ids in [0, 12)",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_costs_rounds_only(name):
    """At the second proposal; before and after it the draft is right."""
    fault, message = KINDS[name]
    calls, good = itertools.count(1), right(target())
    draft = Foreign(lambda d, k: fault(d, 3) if next(calls) == 2 else good(d, k))
    counts = run(draft)
    assert len(counts.faults) == 1 and message in counts.faults[0] and counts.off_reason is None
    assert counts.acceptance_rate == 1.0 and counts.k_history[:3] == [3, 0, 3] and draft.begun == 2


@pytest.mark.parametrize("outlook", [(0, math.nan), (0,), None, "ab", (0, -5), (-3, 10**9)], ids=str)
def test_any_outlook_is_survived(outlook):
    draft = Foreign(right(target()))
    draft.outlook = lambda: outlook
    counts = run(draft, 20)
    assert bool(counts.faults) == (outlook not in [(0, -5), (-3, 10**9)])


def test_a_draft_cannot_change_the_text_through_what_it_was_given():
    def propose(draft, k):
        draft.given.append(7)
        del draft.given[0]
        return []

    draft = Foreign(propose)
    draft.begin = lambda ids: setattr(draft, "given", ids)
    assert run(draft).proposed == 0


def test_what_a_draft_proposed_is_not_changed_afterwards():
    mine = [1, 2]
    guarded = GuardedDraft(Foreign(lambda d, k: Proposal(mine)), VOCAB)
    guarded.outlook([1])
    found = guarded.propose(2)
    mine[:] = [VOCAB] * 9
    assert found.tokens == [1, 2]


# ---- logits that are NaN ---------------------------------------------------------------------------------------------


def broken_at(n, value=math.nan, which=slice(None)):
    """A draft model whose row after ``n`` ids is broken."""

    def logits(prefix):
        row = torch.tensor(rows(0, VOCAB)(prefix))
        if len(prefix) == n:
            row[which] = value
        return row.tolist()

    return Scripted(logits, VOCAB)


@pytest.mark.parametrize("which", [slice(None), 3], ids=["all", "one"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def test_a_chain_ends_before_the_step_that_is_nan(sampling, which):
    """Report A12: at step 2 of 4."""
    draft = GuardedDraft(model_draft(broken_at(3, which=which), VOCAB, sampling), VOCAB)
    draft.outlook([1, 2])
    found = draft.propose(4)
    assert len(found) == 1 and len(draft.faults) == 1 and "token 2" in draft.faults[0] and "NaN" in draft.faults[0]
    assert (found.logits is None) == (not sampling) and draft.off_reason is None


def test_a_row_without_a_candidate_ends_a_chain_that_is_drawn():
    draft = GuardedDraft(model_draft(broken_at(3, -math.inf), VOCAB, {"temperature": 1.0}), VOCAB)
    draft.outlook([1, 2])
    assert len(draft.propose(4)) == 1 and "no candidate" in draft.faults[0]


def test_infinities_of_both_signs_are_no_fault():
    model = Scripted(lambda prefix: [-math.inf, math.inf, *[0.0] * (VOCAB - 2)], VOCAB)
    draft = GuardedDraft(model_draft(model, VOCAB, {"temperature": 1.0}), VOCAB)
    draft.outlook([1, 2])
    assert draft.propose(3).tokens == [1, 1, 1] and draft.faults == []


def test_a_tree_ends_before_the_node_that_is_nan():
    draft = GuardedDraft(model_draft(broken_at(3), VOCAB, tree=6), VOCAB)
    draft.outlook([1, 2])
    found = draft.propose(4)
    assert found.parents == [-1] and "NaN" in draft.faults[0]


def test_after_three_such_chains_drafting_pauses(caplog):
    counts = run(model_draft(Scripted(lambda prefix: [math.nan] * VOCAB, VOCAB), VOCAB), 20)
    assert "failed 3 times" in counts.off_reason and "NaN" in counts.off_reason and counts.proposed == 0
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_law_stays_when_chains_are_cut(rule):
    """Where a chain is cut depends on what was drawn before, never on what would have been."""

    def logits(prefix):
        return [math.nan] * 3 if sum(prefix) % 3 == 2 else rows(1, 3)(prefix)

    sampling, model = {"temperature": 1.0}, Scripted(rows(0, 3), 3)

    def make():
        draft = model_draft(Scripted(logits, 3), 3, sampling)
        propose = draft.propose

        def without_the_fault(k):  # which loop_law would not let pass
            found = propose(k)
            found.fault = None
            return found

        draft.propose = without_the_fault
        return draft

    assert distance(loop_law(model, make, 3, 3, sampling, rule=rule), wanted(model, 3, sampling)) < 1e-9


# ---- calls that take too long ----------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(specloop.faults, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(specloop.drafts.model, "SLOW_SECONDS", 0.05)


def test_a_call_that_hangs_is_left_behind(impatient):
    """Meanwhile there are no drafts and no other calls; once it has returned the draft begins anew."""
    released, calls, model = threading.Event(), itertools.count(1), target()

    def propose(draft, k):
        if next(calls) == 2:
            assert released.wait(20)
            return [0, 0, 0]  # too late to count
        return right(model)(draft, k)

    draft = Foreign(propose)
    request = request_for(model, [1, 2], 60, draft, k=3)
    started, slowest = time.perf_counter(), 0.0
    for n, _ in enumerate(decode(model, [request])):
        if n == 20:
            assert "still busy" in request.draft.off_reason and draft.begun == 1
            released.set()
            while request.draft._busy:
                time.sleep(0.001)
        slowest, started = max(slowest, time.perf_counter() - started), time.perf_counter()
    assert request.ids == text(model) and slowest < 5
    counts = request.stats.speculation
    assert counts.faults == ["TimeoutError: proposal took more than 0.05 s"] and counts.off_reason is None
    assert draft.begun == 2 and counts.acceptance_rate == 1.0 and counts.k_history[-3] == 3


def test_a_call_that_never_returns(impatient):
    never = threading.Event()
    try:
        counts = run(Foreign(lambda d, k: never.wait(60)), 20)
        assert counts.off_reason.startswith("the draft is still busy; TimeoutError: ") and counts.proposed == 0
        assert counts.fault_count == 1
    finally:
        never.set()


def test_cancel_while_the_draft_hangs(impatient):
    """Report I4: the request ends within the round."""
    never, cancelled = threading.Event(), threading.Event()

    def propose(draft, k):
        cancelled.set()
        never.wait(60)

    try:
        model = target()
        request = request_for(model, [1, 2], 60, Foreign(propose), k=3, cancelled=cancelled.is_set)
        list(decode(model, [request]))
        assert request.finish_reason == "cancelled" and len(request.ids) == 3
        assert request.cache.ids == request.ids[:-1]
    finally:
        never.set()


def test_threads_end_with_their_requests():
    before = threading.active_count()
    for _ in range(5):
        run(Foreign(right(target())), 8)
    gc.collect()
    deadline = time.perf_counter() + 5
    while threading.active_count() > before and time.perf_counter() < deadline:
        time.sleep(0.005)
    assert threading.active_count() <= before  # fewer if one of an earlier test has come back meanwhile


def test_our_own_drafts_need_no_thread():
    before = set(threading.enumerate())
    model = target()
    request = request_for(model, [1, 2], 20, ChainDraft([LookupDraft(), model_draft(model, VOCAB)]), k=3)
    for _ in decode(model, [request]):
        assert set(threading.enumerate()) <= before  # one of an earlier test may end meanwhile


def slow_target():
    """Its passes take 30 ms."""
    model = target()
    forward = model.forward

    def slowly(tokens, cache, *, last):
        time.sleep(0.03)
        return forward(tokens, cache, last=last)

    model.forward = slowly
    return model


@pytest.mark.parametrize("tree", [0, 12])
def test_a_slow_model_is_stopped_between_its_steps(impatient, tree):
    draft = GuardedDraft(model_draft(slow_target(), VOCAB, tree=tree), VOCAB)
    draft.outlook([1])
    found = draft.propose(8)
    assert 1 <= len(found) < 8 and "TimeoutError" in draft.faults[0] and "took more than 0.05 s" in draft.faults[0]


@pytest.mark.parametrize("tree", [0, 6])
def test_a_model_that_is_known_to_be_slow_has_the_time_it_needs(impatient, tree):
    draft = GuardedDraft(model_draft(slow_target(), VOCAB, tree=tree, cost=0.03), VOCAB)
    draft.outlook([1])
    assert len(draft.propose(6)) == 6 and draft.faults == []


def test_reading_a_long_prompt_is_not_a_slow_proposal(impatient):
    model = target()
    forward = model.forward

    def slowly(tokens, cache, *, last):
        time.sleep(0.0005 * len(tokens))
        return forward(tokens, cache, last=last)

    model.forward = slowly
    draft = GuardedDraft(model_draft(model, VOCAB), VOCAB)
    draft.outlook([1] * 300)
    assert len(draft.propose(3)) == 3 and draft.faults == []


# ---- in a pair -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError("no room")], ids=repr)
def test_a_pairs_draft_that_fails_for_a_while(monkeypatch, error):
    """Report I2: from the seventh round on, for three rounds; then it is back."""
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))  # the model has every turn
    with pair_of(1, draft=parts(1), k=3) as pair:
        pair.ready()
        model = pair._draft.version.model
        forward, calls = model.forward, itertools.count()

        def failing(*args, **options):
            if 20 <= next(calls) < 23:
                raise error
            return forward(*args, **options)

        model.forward = failing
        result = pair.generate(TEXT, max_new_tokens=120)
        counts = result.stats.speculation
        assert result.tokens == alone(1, TEXT, 120) and counts.fault_count == 3 and counts.off_reason is None
        assert {e["event"] for e in counts.events} == {"fault", "off", "on"}
        assert counts.k_history[-2] == 3 and pair._draft.version is not None


def test_oracles_of_the_bench_are_drafts_too():
    """The scripted drafts that other tests use go through the same guard."""
    model = target()
    counts = run(oracle(model))
    assert counts.acceptance_rate == 1.0 and PROMPT == [0, 1, 0]
