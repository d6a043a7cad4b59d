"""Versions exchanged while requests run: what comes after depends on the committed ids and the new version alone."""

import gc
import threading
import time
import weakref

import pytest

from specloop.errors import OptionError, PairClosed
from specloop.pair import Pair
from specloop.versions import Turns
from tiny_llama import CONFIG
from versions import PROMPT, alone, pair_of, parts

A, B = 1, 2
DRAFTS = ["none", "lookup", "model"]


def pair_with(draft, seed=A, k=3):
    return pair_of(seed, draft=parts(A) if draft == "model" else draft, k=k)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("taken", [0, 1, 4, 7])
def test_a_stream_goes_on_with_the_new_version(draft, taken):
    with pair_with(draft) as pair:
        stream = pair.stream(PROMPT, max_new_tokens=40)
        before = [next(stream).token for _ in range(taken)]
        pair.swap(target=parts(B))
        tokens = before + [event.token for event in stream]
        assert pair.generation == 1 and stream.result.stats.swaps == (taken > 0)
    old = alone(A, PROMPT, 40)
    rest = 0 if draft == "none" else 3  # tokens of the round, verified already
    assert any(
        tokens[:n] == old[:n] and tokens[n:] == alone(B, PROMPT + old[:n], 40 - n)
        for n in range(taken, taken + rest * (taken > 0) + 1)
    ), (tokens, old)


def test_a_swap_in_the_prompt():
    """The passes over the prompt are as good a place as any."""
    prompt = [(7 * i) % CONFIG.vocab for i in range(200)]
    with pair_with("none") as pair:
        model, lengths = pair.model, []
        forward = model.forward

        def watched(tokens, cache, *, last):
            lengths.append(cache.length)
            if len(lengths) == 1:
                swap.start()
            return forward(tokens, cache, last=last)

        swap = threading.Thread(target=pair.swap, kwargs={"target": parts(B)})
        model.forward = watched
        stream = pair.stream(prompt, max_new_tokens=8)
        tokens = [next(stream).token]
        swap.join()
        tokens += [event.token for event in stream]
    assert any(tokens == alone(A, prompt, n) + alone(B, prompt + alone(A, prompt, n), 8 - n) for n in (0, 1))


@pytest.mark.parametrize("draft", DRAFTS)
def test_requests_after_a_swap_are_those_of_a_fresh_load(draft):
    """Nothing of the old version stays: no keys, no captured passes, no draft state (report 63)."""
    with pair_with(draft) as pair:
        assert pair.generate(PROMPT, max_new_tokens=30).tokens == alone(A, PROMPT, 30)
        pair.swap(target=parts(B))
        assert pair.generate(PROMPT, max_new_tokens=30).tokens == alone(B, PROMPT, 30) != alone(A, PROMPT, 30)
        pair.swap(target=parts(A))
        assert pair.generate(PROMPT, max_new_tokens=30).tokens == alone(A, PROMPT, 30)


def test_generate_is_always_the_text_of_one_version():
    """It begins again when the target is exchanged: here soon after its sixth pass."""
    loaded, passes = threading.Event(), []

    def load():
        found = parts(B)()
        loaded.set()
        return found

    with pair_with("none") as pair:
        forward = pair.model.forward

        def swapping(tokens, cache, *, last):
            passes.append(len(tokens))
            if len(passes) == 6:
                swap.start()
                assert loaded.wait(30)
            if len(passes) >= 6:
                time.sleep(0.02)  # until the exchange waits for the end of a pass
            return forward(tokens, cache, last=last)

        swap = threading.Thread(target=pair.swap, kwargs={"target": load})
        pair.model.forward = swapping
        result = pair.generate(PROMPT, max_new_tokens=30)
        swap.join()
        assert result.tokens == alone(B, PROMPT, 30) and result.finish_reason == "length"
        assert 6 <= len(passes) <= 30


def test_an_exchange_does_not_wait_for_long():
    """A request takes the lock again right after it gave it back; whoever waits gets it first all the same."""
    turns, done, took = Turns(), threading.Event(), []

    def greedy():
        while not done.is_set():
            with turns:
                took.append(time.perf_counter())
                time.sleep(0.002)

    thread = threading.Thread(target=greedy)
    thread.start()
    try:
        for _ in range(60):
            time.sleep(0.003)
            start = time.perf_counter()
            with turns:
                between = [t for t in took if t > start]
            assert len(between) <= 2
    finally:
        done.set()
        thread.join()


# ---- what is refused -------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def broken():
    raise Broken("half-way")


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"target": broken}, Broken, "half-way"),
        ({"target": parts(B, fingerprint="other")}, OptionError, "target: expected a model with the vocabulary of"),
        ({"target": parts(B, context=128)}, OptionError, "context of at least 256 tokens, got one of 128"),
        ({"draft": parts(B, fingerprint="other")}, OptionError, "draft: expected a model with the vocabulary of"),
        ({"target": parts(B), "draft": broken}, Broken, "half-way"),
        ({"target": parts(B), "draft": parts(B, fingerprint="other")}, OptionError, "^draft: "),
        ({"draft": "no/such/file"}, OptionError, "^draft: "),
        ({"draft": 7}, OptionError, "^draft: "),
        ({}, TypeError, "target or a draft"),
    ],
)
def test_a_failing_swap_changes_nothing(change, error, message):
    with pair_with("lookup") as pair:
        model, stream = pair.model, pair.stream(PROMPT, max_new_tokens=20)
        first = [next(stream).token for _ in range(3)]
        with pytest.raises(error, match=message):
            pair.swap(**change)
        assert pair.model is model and pair.draft == "lookup" and pair.generation == 0
        assert first + [event.token for event in stream] == alone(A, PROMPT, 20)
        assert stream.result.stats.swaps == 0


def test_what_a_failed_swap_loaded_is_gone():
    made, loaded = [], threading.Event()

    def spied(**options):
        def load():
            found = parts(B, **options)()
            made.append(weakref.ref(found[0]))
            loaded.set()
            return found

        return load

    def failing_later():
        assert loaded.wait(30)
        broken()

    with pair_with("none") as pair:
        with pytest.raises(OptionError) as caught:
            pair.swap(target=spied(fingerprint="other"))
        loaded.clear()
        with pytest.raises(Broken):
            pair.swap(target=spied(), draft=failing_later)
        assert len(made) == 2 and [ref() for ref in made] == [None, None], caught


def test_the_draft_of_a_swap_must_fit_the_new_target():
    with pair_with("none") as pair:
        pair.swap(target=parts(B), draft=parts(B))
        assert pair.draft == "model" and pair.generate(PROMPT, max_new_tokens=20).tokens == alone(B, PROMPT, 20)


# ---- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", DRAFTS)
@pytest.mark.parametrize("after", DRAFTS)
def test_no_exchange_of_a_draft_changes_a_token(before, after):
    with pair_with(before) as pair:
        stream = pair.stream(PROMPT, max_new_tokens=30)
        tokens = [next(stream).token for _ in range(5)]
        rounds = stream.result.stats.speculation.rounds
        pair.swap(draft=parts(A) if after == "model" else after)
        assert tokens + [event.token for event in stream] == alone(A, PROMPT, 30)
        counts = stream.result.stats.speculation
        if after == "model":  # the target itself: whatever it proposes is right
            assert counts.proposed and counts.acceptance_rate > 0.5 and counts.rounds < rounds + 12
        if after == "none":
            assert not any(counts.k_history[rounds + 1 :]) and counts.off_reason == "no draft"
        assert counts.faults == []


def test_a_request_with_a_draft_of_its_own_keeps_it():
    with pair_with("lookup") as pair:
        stream = pair.stream(PROMPT, max_new_tokens=20, draft="none")
        next(stream)
        pair.swap(draft=parts(A))
        assert len(list(stream)) == 19 and stream.result.stats.speculation.proposed == 0
        assert pair.generate(PROMPT, max_new_tokens=20).stats.speculation.acceptance_rate == 1.0


# ---- nothing stays ---------------------------------------------------------------------------------------------------


def test_old_weights_go_at_once():
    """Also while a request that began with them is not being read (report 64)."""
    with pair_with("model") as pair:
        streams = [pair.stream(PROMPT, max_new_tokens=20) for _ in range(2)]
        for stream in streams:
            next(stream)
        old = weakref.ref(pair.model), weakref.ref(pair._draft.version.model)
        layer = weakref.ref(pair.model.weights.layers[0].qkv.codes)
        gc.disable()
        try:
            pair.swap(target=parts(B), draft="lookup")
            assert [ref() for ref in (*old, layer)] == [None, None, None]
        finally:
            gc.enable()
        assert all(len(list(stream)) == 19 for stream in streams)


def test_close():
    pair = pair_with("model")
    stream = pair.stream(PROMPT, max_new_tokens=20)
    first = [next(stream).token for _ in range(6)]
    old, threads = weakref.ref(pair.model), threading.active_count()
    pair.close()
    pair.close()
    assert old() is None and threading.active_count() <= threads
    with pytest.raises(PairClosed):
        list(stream)
    kept = stream.result.tokens
    assert kept[:6] == first and kept == alone(A, PROMPT, len(kept)) and stream.result.text
    for use in (lambda: pair.generate(PROMPT), lambda: pair.model, lambda: pair.swap(target=parts(B))):
        with pytest.raises(PairClosed):
            use()


def test_costs_are_never_measured_on_a_version_that_is_gone():
    """Whoever waits for the lock to measure them finds what is in place then, not what was when it came."""
    pair, raised = pair_with("none"), []

    def measure():
        with pytest.raises(PairClosed) as caught:
            _ = pair.costs
        raised.append(caught.value)

    pair.ready()
    thread = threading.Thread(target=measure)
    with pair._target.lock:
        thread.start()
        time.sleep(0.1)
        pair._target.put(None).close()
    thread.join()
    pair.close()
    assert len(raised) == 1


def test_close_after_an_exception_in_a_request():
    """Report 64: also then nothing is kept."""
    pair = pair_with("lookup")

    def failing(*args, **kwargs):
        raise ZeroDivisionError

    old, pair.model.forward = weakref.ref(pair.model), failing
    with pytest.raises(ZeroDivisionError):
        pair.generate(PROMPT)
    pair.close()
    assert old() is None


# ---- many ------------------------------------------------------------------------------------------------------------


def resident():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def test_fifty_swaps_under_load(swaps=50):
    """Every text is one version's; a stream's is one version's after another; no model is left over."""
    prompts = [PROMPT, [*PROMPT, 9, 10, 9], [3] * 40]
    wanted = {(i, seed): alone(seed, p, 24) for i, p in enumerate(prompts) for seed in (A, B)}
    models, done, failures, served = weakref.WeakSet(), threading.Event(), [], []

    def version(seed):
        def load():
            loaded = parts(seed)()
            models.add(loaded[0])
            return loaded

        return load

    def work(i):
        try:
            while not done.is_set():
                result = pair.generate(prompts[i], max_new_tokens=24)
                assert result.tokens in (wanted[i, A], wanted[i, B]), result.tokens
                stream = pair.stream(prompts[i], max_new_tokens=24)
                tokens = [event.token for event in stream]
                if stream.result.stats.swaps == 0:
                    assert tokens in (wanted[i, A], wanted[i, B]), tokens
                assert len(tokens) == 24
                served.append(i)
        except BaseException as error:
            failures.append(error)
            raise

    with Pair(version(A), draft=version(A), k=3) as pair:
        pair.ready()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        try:
            for n in range(swaps):
                change = {"target": version((B, A)[n % 2])}
                if n % 3 == 0:
                    change["draft"] = version(A) if n % 2 else "lookup"
                pair.swap(**change)
                patience = time.perf_counter() + 10
                while len(models) > 2 and time.perf_counter() < patience:
                    time.sleep(0.001)  # a request may be in the middle of a line that has the model in its hands
                assert len(models) <= 2
                if n == 2:
                    start = resident()
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not failures and len(set(served)) == len(prompts) and pair.generation == swaps
        assert resident() - start < 20e6
        assert pair.generate(PROMPT, max_new_tokens=24).tokens == wanted[0, (A, B)[swaps % 2]]
    assert len(models) == 0


def test_a_callback_is_told_of_the_tokens_that_come_back():
    with pair_with("lookup") as pair:
        events = []

        def callback(event):
            events.append(event)
            if len(events) == 4:
                pair.swap(target=parts(B))

        result = pair.generate(PROMPT, max_new_tokens=30, callback=callback)
        told = [event.token for event in events]
        assert result.tokens == told and result.stats.swaps == 1
        n = next(n for n in range(30) if told[n:] == alone(B, PROMPT + told[:n], 30 - n))
        assert 4 <= n <= 7 and told[:n] == alone(A, PROMPT, 30)[:n]
