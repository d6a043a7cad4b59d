"""Many requests through batches in which everything goes wrong now and then. Texts stay, memory stays, nothing hangs.

Drafts raise, hang, run out of memory, propose nonsense or NaN; the target runs out of memory; callers cancel requests
or leave the batch. A text that came to its end is the one without any of that, any other the beginning of it.
"""

import contextlib
import faulthandler
import gc
import random
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from loops import PROMPTS, TOKENS, Knowing, drafting, greedy, pair_on
from specloop.batch import play
from specloop.drafts.base import Proposal
from specloop.drafts.lookup import LookupDraft
from specloop.errors import OutOfMemory
from specloop.live import resident_memory
from specloop.session import Session

DEADLINE = 180.0  # seconds; the default test takes two
SLOW = 0.05  # seconds that a draft may take here


def within(seconds, work):
    """``work()`` in a thread of its own; fails if it takes longer, with the stacks of all threads."""
    outcome = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback(file=sys.__stderr__)
        pytest.fail(f"not done after {seconds:.0f} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class Troubled(Knowing):
    """Right two times out of three, and in trouble one time out of four."""

    timely = False  # its calls are watched

    def __init__(self, target, vocab_size, rng, happened):
        super().__init__(target, vocab_size, lambda position: position % 3)
        self.rng, self.happened = rng, happened

    def trouble(self, *kinds, chance):
        kind = self.rng.choice(kinds) if self.rng.random() < chance else None
        if kind is not None:
            self.happened[kind] = self.happened.get(kind, 0) + 1
        if kind == "raises":
            raise RuntimeError("boom")
        if kind == "no memory":
            raise MemoryError
        if kind == "hangs":
            time.sleep(4 * SLOW)
        return kind

    def append(self, ids):
        self.trouble("raises", "no memory", chance=0.02)
        super().append(ids)

    def outlook(self):
        self.trouble("raises", chance=0.02)
        return super().outlook()

    def propose(self, k):
        kind = self.trouble("raises", "no memory", "nan", "nonsense", "too many", chance=0.25)
        if kind is None:
            kind = self.trouble("hangs", chance=0.004)
        tokens = super().propose(k)
        if kind == "nan":
            logits = torch.zeros(len(tokens), self.vocab_size)
            logits[self.rng.randrange(len(tokens))] = float("nan") if tokens else 0.0
            return Proposal(tokens, logits=logits)
        return {"nonsense": ["x", None], "too many": tokens * 40}.get(kind, tokens)


@contextlib.contextmanager
def failing_target(pair, rng, happened, monkeypatch, chance=0.01):
    """Now and then a pass finds no memory, and nothing that could be given back."""
    inner = pair.place.forward_parts

    def forward_parts(parts):
        if rng.random() < chance * len(parts):
            happened["target without memory"] = happened.get("target without memory", 0) + 1
            raise OutOfMemory("no room")
        return inner(parts)

    with monkeypatch.context() as patch:
        patch.setattr(pair.place, "forward_parts", forward_parts)
        yield


def soak(target, requests, monkeypatch, seed=0, at_each=lambda done: None):
    """Plays so many requests in batches of up to 25, and compares. Returns what happened, by name."""
    pair, rng, happened = pair_on(target), random.Random(seed), {}
    monkeypatch.setattr("specloop.faults.SLOW_SECONDS", SLOW)
    kinds = [lambda: Troubled(target, pair.model.vocab_size, rng, happened)] * 4 + [
        lambda: LookupDraft(1),
        lambda: None,
    ]
    make = lambda: rng.choice(kinds)()
    done, batch = 0, 0
    with drafting(make, monkeypatch), failing_target(pair, rng, happened, monkeypatch):
        while done < requests:
            sessions = [one(pair, rng) for _ in range(min(rng.randrange(1, 26), requests - done))]
            leaves = rng.randrange(1, 60) if batch % 7 == 3 else None
            with contextlib.closing(play(pair, sessions, size=rng.choice([None, 1, 2, 5]))) as tokens:
                for n, (session, token, from_draft) in enumerate(tokens):
                    session.event(token, from_draft)
                    if n == leaves:
                        happened["left"] = happened.get("left", 0) + 1
                        break
            for session in sessions:
                judge(target, session, leaves is not None, happened)
            assert all(seat.nbytes == 0 for seat in pair.place.seats())
            done, batch = done + len(sessions), batch + 1
            at_each(done)
    return happened


def one(pair, rng):
    n = rng.randrange(len(PROMPTS))
    options = {"max_new_tokens": TOKENS[n], "k": rng.choice([0, 2, 3, 5, 8, "auto"]), "temperature": 0.0}
    checked, follows = pair._checked(options)
    at = SimpleNamespace(cancel=None, calls=0)
    if rng.random() < 0.1:
        at.cancel = rng.randrange(20)

    def cancelled():
        at.calls += 1
        return at.cancel is not None and at.calls > at.cancel

    session = Session(pair, list(PROMPTS[n]), checked, cancelled, follows=follows)
    session.prompt = PROMPTS[n]
    return session


def judge(target, session, left, happened):
    result, reason = session.result, session.request.finish_reason
    wanted = list(greedy(target, session.prompt))
    failure = session.failure
    how = "failed" if failure is not None else reason or "never began"
    happened[how] = happened.get(how, 0) + 1
    assert result.tokens == wanted[: len(result.tokens)]
    if how in ("length", "stop"):
        assert len(result.tokens) == session._options.max_new_tokens or result.tokens[-1] == wanted[-1]
    else:
        assert how in ("failed", "cancelled") or left
        assert failure is None or isinstance(failure, OutOfMemory)
    counts = result.stats.speculation
    assert counts.tokens == len(result.tokens) and counts.committed <= counts.accepted <= counts.evaluated


EVERYTHING = {"raises", "no memory", "nan", "nonsense", "too many", "cancelled", "length"}


@pytest.mark.parametrize("target", ["scripted", "int8"])
def test_some_requests(target, monkeypatch):
    happened = within(DEADLINE, lambda: soak(target, 120, monkeypatch))
    assert set(happened) > EVERYTHING and happened["length"] > 60, happened


@pytest.mark.slow
@pytest.mark.parametrize("target", ["scripted", "int8", "f32"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_five_hundred_requests(target, seed, monkeypatch):
    sizes, threads = [], []

    def look(done):
        if done >= 150:
            gc.collect()
            sizes.append(resident_memory())
            threads.append(threading.active_count())

    happened = within(10 * DEADLINE, lambda: soak(target, 500, monkeypatch, seed, look))
    assert set(happened) > EVERYTHING | {"hangs", "target without memory", "left", "failed"}, happened
    assert happened["length"] > 300, happened
    if sizes[0] is not None:
        assert max(sizes) < 1.02 * sizes[0], (sizes[0], max(sizes))
    assert threads[-1] <= max(threads[:5]) + 3, threads


def test_memory_stays_flat(monkeypatch):
    """Two hundred short requests: no more memory after the last than after the twentieth."""
    pair, sizes = pair_on("int8"), {}
    if resident_memory() is None:
        pytest.skip("the system does not say how much memory a process has")
    with drafting(lambda: Knowing("int8", pair.model.vocab_size, lambda i: i % 3), monkeypatch):
        for n in range(200):
            pair.generate(list(PROMPTS[n % 5]), max_new_tokens=8, k=3)
            if n in (19, 199):
                gc.collect()
                sizes[n] = resident_memory()
    assert sizes[199] < 1.01 * sizes[19]
