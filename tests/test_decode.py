"""The loop on scripted models: every token, count and cache length is known beforehand."""

import math
import time

import pytest

from scripted import FunctionDraft, Scripted, anti, argmax, flaky, oracle, reading, request_for, scripted
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft
from specloop.errors import ModelFault
from specloop.faults import GuardedDraft

KS = [0, 1, 2, 3, 5, 8]


def run(model, prompt, tokens, *, draft=None, k=0, controller=None, take=None, **options):
    """(emitted ids, request) of one decoded text; stops asking after ``take`` ids."""
    request = request_for(model, prompt, tokens, draft, controller, k=k, **options)
    cache, emitted = request.cache, []
    stream = decode(model, [request])
    for _, token, _ in stream:
        emitted.append(token)
        assert request.ids[len(prompt) :] == emitted
        if len(emitted) == take:
            break
    stream.close()
    assert request.ids == [*prompt, *emitted]
    assert cache.ids == request.ids[:-1][: len(cache.ids)]
    if emitted:
        assert cache.length == len(request.ids) - 1
    return emitted, request


def by_position():
    return scripted(lambda prefix: (len(prefix) * 3 + 1) % 7, 7)


def by_content():
    return scripted(lambda prefix: (sum(prefix) * 5 + len(prefix) + prefix[-1]) % 11, 11)


def plain(model, prompt, tokens):
    """Greedy decoding without any of the code under test."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(argmax(model.logits(ids)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("make", [by_position, by_content])
@pytest.mark.parametrize("kind", [oracle, anti, lambda m: flaky(m, 3), lambda m: LookupDraft(1), lambda m: None])
def test_greedy_text_is_that_of_plain_decoding(make, kind, k):
    model = make()
    emitted, request = run(model, [1, 2, 3], 64, draft=kind(model), k=k)
    assert emitted == plain(model, [1, 2, 3], 64)
    assert request.finish_reason == "length"


@pytest.mark.parametrize("k", KS[1:])
def test_an_oracle_is_always_accepted(k):
    model = by_content()
    _, request = run(model, [1], 300, draft=oracle(model), k=k)
    counts = request.stats.speculation
    assert counts.accepted == counts.evaluated == counts.proposed
    assert model.passes[:-1] == [k + 1] * (len(model.passes) - 1)
    assert counts.rounds == math.ceil(300 / (k + 1))


@pytest.mark.parametrize("k", KS[1:])
def test_an_anti_oracle_never_is(k):
    model = by_content()
    _, request = run(model, [1], 50, draft=anti(model), k=k, max_fallbacks=1000)
    counts = request.stats.speculation
    assert counts.accepted == 0 and counts.rounds == 50
    assert counts.evaluated == 49  # one per round; the last round has room for one token and no draft
    assert counts.as_dict()["acceptance_rate"] == 0.0


@pytest.mark.parametrize("period", [2, 5, 7])
def test_a_flaky_draft_is_accepted_exactly_where_it_is_right(period):
    model = by_content()
    k, tokens, prompt = 3, 60, [1]
    _, request = run(model, prompt, tokens, draft=flaky(model, period), k=k)
    length, rounds, accepted = len(prompt), 0, 0
    while length < len(prompt) + tokens:
        room = min(k, len(prompt) + tokens - length - 1)
        good = next((j for j in range(room) if (length + j) % period == 0), room)
        rounds, accepted, length = rounds + 1, accepted + good, length + good + 1
    assert (request.stats.speculation.rounds, request.stats.speculation.accepted) == (rounds, accepted)


def test_a_cache_that_forgets_instead_of_rolling_back_would_show():
    """The test bench itself: this fault must be caught by the checks above."""
    model = by_content()

    class Amnesia(type(model.new_cache(1))):
        def truncate(self, length):
            if length < self.length:
                self.ids[:] = [0] * length

    model.new_cache = Amnesia
    with pytest.raises(AssertionError):
        run(model, [1, 2, 3], 20, draft=anti(model), k=2)


# ---- the end of a text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", KS)
def test_eos_inside_an_accepted_block_ends_the_text(k):
    model = reading([3, 4, 9, 5, 6, 7], vocab_size=10, eos_ids=[9])
    emitted, request = run(model, [1], 20, draft=FunctionDraft(lambda prefix, j: argmax(model.logits(prefix))), k=k)
    assert emitted == [3, 4, 9] and request.finish_reason == "stop"


def test_counts_end_with_the_text():
    model = reading([3, 4, 9, 5, 6, 7], vocab_size=10, eos_ids=[9])
    draft = oracle(model)
    draft_without_eos_cut = GuardedDraft(draft, model.vocab_size)
    emitted, request = run(model, [1], 20, draft=draft_without_eos_cut, k=5)
    counts = request.stats.speculation
    assert emitted == [3, 4, 9]
    assert (counts.accepted, counts.committed, counts.tokens, counts.rounds) == (5, 3, 3, 1)
    assert counts.as_dict()["tokens_per_pass"] == 3


def test_drafting_stops_at_the_drafts_own_eos_and_the_text_goes_on():
    model = reading([3, 4, 5, 6, 7, 8], vocab_size=10, eos_ids=[9])
    says_eos_second = FunctionDraft(lambda prefix, j: 9 if j == 1 else argmax(model.logits(prefix)))
    emitted, request = run(model, [1], 6, draft=says_eos_second, k=4)
    assert emitted == [3, 4, 5, 6, 7, 8] and request.finish_reason == "length"
    assert max(request.stats.speculation.k_history) == 2


@pytest.mark.parametrize("k", KS)
def test_a_stop_inside_a_block(k):
    model = by_content()
    want = plain(model, [1], 30)
    seen = []

    def stop(token):
        seen.append(token)
        return len(seen) == 5

    emitted, request = run(model, [1], 30, draft=oracle(model), k=k, stop=stop)
    assert emitted == want[:5] == seen and request.finish_reason == "stop"


@pytest.mark.parametrize("tokens", range(6))
@pytest.mark.parametrize("k", KS)
def test_the_limit_is_exact(k, tokens):
    model = by_content()
    emitted, request = run(model, [1, 2, 1, 2, 1], tokens, draft=oracle(model), k=k)
    assert emitted == plain(model, [1, 2, 1, 2, 1], tokens) and request.finish_reason == "length"
    if not tokens:
        assert model.passes == [] and request.stats.speculation.rounds == 0


@pytest.mark.parametrize("k", KS)
def test_the_context_is_used_to_its_end_and_not_beyond(k):
    model = scripted(lambda prefix: (prefix[-1] + 1) % 5, 5, context=63)  # positions beyond fail in the model
    emitted, request = run(model, [0], 63, draft=oracle(model), k=k)
    assert len(request.ids) == 64 and request.finish_reason == "length" and len(emitted) == 63


# ---- cancel ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 1, 2, 3, 4, 5, 9])
def test_cancel_leaves_what_was_emitted(when):
    model = by_content()
    count = [0]

    def count_up(token):
        count[0] += 1
        return False

    emitted, request = run(
        model, [1, 2], 30, draft=oracle(model), k=3, stop=count_up, cancelled=lambda: count[0] >= when
    )
    assert emitted == plain(model, [1, 2], when) and request.finish_reason == "cancelled"


@pytest.mark.parametrize("take", [1, 2, 3, 4, 5])
def test_a_caller_who_leaves_mid_block_cancels(take):
    model = by_content()
    emitted, request = run(model, [1, 2], 30, draft=oracle(model), k=3, take=take)
    assert len(emitted) == take and request.finish_reason == "cancelled"
    assert request.stats.speculation.tokens == take


@pytest.mark.parametrize("moment", ["outlook", "propose", "forward"])
def test_cancel_during_any_step_ends_within_the_round(moment):
    model = by_content()
    draft, flag = oracle(model), []
    target = model if moment == "forward" else draft
    inner = getattr(target, moment)

    def outer(*args, **kwargs):
        if len(draft.ids) > 6:
            flag.append(True)
        return inner(*args, **kwargs)

    setattr(target, moment, outer)
    emitted, request = run(model, [1, 2], 40, draft=draft, k=3, cancelled=lambda: bool(flag))
    assert request.finish_reason == "cancelled" and 5 <= len(emitted) <= 9
    assert emitted == plain(model, [1, 2], len(emitted))


# ---- faults ----------------------------------------------------------------------------------------------------------


class Breaks:
    """An oracle that does ``fault()`` in its n-th proposals."""

    name = "breaks"

    def __init__(self, model, at, fault, method="propose"):
        self.inner, self.at, self.fault, self.calls = oracle(model), set(at), fault, 0
        self.method, self.begun = method, 0

    def _maybe(self, method):
        if method == self.method:
            self.calls += 1
            if self.calls in self.at:
                return self.fault()
        return None

    def begin(self, ids):
        self.begun += 1
        self.inner.begin(ids)

    def append(self, ids):
        self._maybe("append")
        self.inner.append(ids)

    def outlook(self):
        self._maybe("outlook")
        return self.inner.outlook()

    def propose(self, k):
        return self._maybe("propose") or self.inner.propose(k)


def fail(error):
    def raise_it():
        raise error

    return raise_it


FAULTS = {
    "raises": fail(RuntimeError("boom")),
    "no memory": fail(MemoryError()),
    "out of range": lambda: [3, 11],
    "negative": lambda: [-1],
    "too many": lambda: [1] * 50,
    "not ids": lambda: ["x"],
    "NaN": lambda: [math.nan],
    "no list": lambda: 7,
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_fault_costs_one_rounds_drafts(name, k):
    model = by_content()
    draft = Breaks(model, {2}, FAULTS[name])
    emitted, request = run(model, [1, 2], 40, draft=draft, k=k)
    counts = request.stats.speculation
    assert emitted == plain(model, [1, 2], 40)
    assert counts.k_history[1] == 0 and counts.k_history[2] > 0
    assert counts.accepted == counts.evaluated > 0  # rebuilt from the committed ids, it is an oracle again
    assert len(counts.faults) == 1 and counts.off_reason is None and draft.begun == 2


@pytest.mark.parametrize("method", ["propose", "append", "outlook"])
def test_after_three_faults_drafting_is_off_and_says_why(method):
    model = by_content()
    draft = Breaks(model, {2, 3, 4}, fail(RuntimeError("boom")), method)
    emitted, request = run(model, [1, 2], 20, draft=draft, k=2)
    counts = request.stats.speculation
    assert emitted == plain(model, [1, 2], 20)
    assert "failed 3 times" in counts.off_reason and "boom" in counts.off_reason
    assert set(counts.k_history[5:]) == {0}


def test_a_slow_draft_is_a_fault(monkeypatch):
    import specloop.faults

    monkeypatch.setattr(specloop.faults, "SLOW_SECONDS", 0.02)
    model = by_content()
    draft = Breaks(model, {2}, lambda: time.sleep(0.3))
    emitted, request = run(model, [1, 2], 20, draft=draft, k=2)
    assert emitted == plain(model, [1, 2], 20)
    assert "TimeoutError" in request.stats.speculation.faults[0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logits_without_a_candidate_end_the_request_clearly(bad):
    good = by_content()
    model = Scripted(lambda prefix: [bad] * 11 if len(prefix) == 6 else good.logits(prefix), 11)
    request = request_for(model, [1, 2], 28, oracle(good), k=5)
    emitted = [token for _, token, _ in decode(model, [request])]
    assert isinstance(request.failure, ModelFault) and "position 6" in str(request.failure)
    assert emitted == plain(good, [1, 2], 4)
    assert model.caches[0].ids == request.ids[:-1]


# ---- speculation at work ---------------------------------------------------------------------------------------------


def test_lookup_speeds_up_a_text_that_repeats():
    model = scripted(lambda prefix: len(prefix) * 7 % 13, 13)  # period 13
    emitted, request = run(model, [0], 130, draft=LookupDraft(), k=8)
    assert emitted == plain(model, [0], 130)
    assert request.stats.speculation.rounds < 40


def test_prompt_in_pieces_is_the_prompt(monkeypatch):
    import specloop.decode

    monkeypatch.setattr(specloop.decode, "PREFILL_CHUNK", 4)
    prompt = [1, 5, 2, 7, 3, 0, 4, 9, 10]
    emitted, _ = run(by_content(), prompt, 10, k=0)
    assert emitted == plain(by_content(), prompt, 10)


def test_the_round_is_named_by_the_number_of_committed_ids(monkeypatch):
    import specloop.acceptance

    model, seen, inner = by_content(), [], specloop.acceptance.verify

    def spy(*args, position, seed, **kwargs):
        seen.append((position.tolist(), seed.tolist()))
        return inner(*args, position=position, seed=seed, **kwargs)

    monkeypatch.setattr(specloop.acceptance, "verify", spy)
    run(model, [1, 2, 3], 10, draft=oracle(model), k=2, sampling={"seed": -5})
    assert seen == [([3], [-5]), ([6], [-5]), ([9], [-5]), ([12], [-5])]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("k", KS)
def test_a_seed_repeats_and_another_differs(k, temperature):
    def text(seed):
        model = Scripted(lambda prefix: [math.sin(3 * t + len(prefix) + prefix[-1]) for t in range(16)], 16)
        return run(model, [1], 32, draft=LookupDraft(1), k=k, sampling={"temperature": temperature, "seed": seed})[0]

    assert text(1) == text(1) != text(2)


def test_two_requests_take_turns_on_one_model():
    model = by_content()
    streams, requests = [], []
    for prompt in ([1, 2], [3, 4, 5]):
        requests.append(request_for(model, prompt, 20, oracle(model), k=3))
        streams.append(decode(model, [requests[-1]]))
    for _ in range(20):
        for stream in streams:
            next(stream)
    assert requests[0].ids[2:] == plain(model, [1, 2], 20)
    assert requests[1].ids[3:] == plain(model, [3, 4, 5], 20)


def test_ids_say_whether_the_draft_had_them():
    model = by_content()
    request = request_for(model, [1], 12, oracle(model), k=3)
    origin = [mark for _, _, mark in decode(model, [request])]
    assert origin == [True, True, True, False] * 3


def test_rows_are_only_asked_for_where_they_are_needed():
    model = by_content()
    run(model, [1] * 9, 3, k=0)
    assert model.passes == [1, 1, 1]  # the prompt's own rows never reach the head
