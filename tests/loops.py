"""One runner for the loop in all its settings: any target, K, temperature and batch, shown at once or token by token.

A draft is a *kind*: it knows what greedy decoding says and is right or wrong, or fails, where its kind says so. What a
case has to state is its models and the right outcome.
"""

import contextlib
import functools
import itertools
import math
import random

from scripted import Scripted, ToyTokenizer, argmax
from specloop.drafts.base import Proposal
from specloop.drafts.lookup import LookupDraft
from specloop.faults import GuardedDraft
from specloop.pair import Pair
from versions import parts

KS = (0, 1, 2, 3, 5, 8)
TEMPERATURES = (0.0, 0.7, 1.0)
BATCHES = (1, 2, 5)
TARGETS = ("scripted", "int8", "f32")  # the last two: a tiny llama, with such a cache
SHOWN = ("whole", "stream")
PROMPTS = ((5, 9, 7, 7, 12), (9,), (1, 3, 4, 1, 3, 4, 1, 3), (6,) * 20, (10, 11))
TOKENS = (12, 21, 17, 7, 15)
SCRIPTED_SIZE = 13


@functools.cache
def pair_on(target):
    """A pair that lives as long as the tests; its text is long enough for every prompt."""
    if target != "scripted":
        return Pair(parts(1, kv=target), draft="lookup", k=3)

    def logits(prefix):  # smooth enough for T > 0, and repeats itself with a period of 9
        best = (len(prefix) // 9 * 5 + prefix[-1] * 3 + 1) % SCRIPTED_SIZE
        return [3.0 * (token == best) + math.sin(token + len(prefix)) for token in range(SCRIPTED_SIZE)]

    model = Scripted(logits, SCRIPTED_SIZE)
    pieces = [chr(97 + i) for i in range(SCRIPTED_SIZE)]
    return Pair(lambda: (model, ToyTokenizer(pieces), None), draft="lookup", k=3)


@functools.cache
def greedy(target, prompt):
    """What plain decoding says, without the loop: one row at a time, every time from the beginning of a new cache."""
    model, ids = pair_on(target).model, list(prompt)
    while len(ids) < len(prompt) + max(TOKENS):
        cache = model.new_cache(len(ids))
        ids.append(argmax(model.forward(ids, cache, last=1)[0].tolist()))
        if ids[-1] in model.eos_ids:
            break
    return tuple(ids[len(prompt) :])


class Knowing:
    """Knows the greedy text of the prompts. Tells it where ``right(position)``; raises where ``fails(call)``."""

    name, timely = "knowing", True

    def __init__(self, target, vocab_size, right, fails=lambda call: False):
        self.target, self.vocab_size, self.right, self.fails = target, vocab_size, right, fails
        self.calls, self.ids, self.script = 0, [], ()

    def begin(self, ids):
        self.ids = list(ids)
        prompt = max((p for p in PROMPTS if tuple(ids[: len(p)]) == p), key=len)
        self.script = prompt + greedy(self.target, prompt)

    def append(self, ids):
        self.ids.extend(ids)

    def outlook(self):
        return 0, max(0, len(self.script) - len(self.ids))

    def propose(self, k):
        self.calls += 1
        if self.fails(self.calls):
            raise RuntimeError(f"call {self.calls}")
        at = len(self.ids)
        known = enumerate(self.script[at : at + k], at)
        return [token if self.right(i) else (token + 1) % self.vocab_size for i, token in known]


class Branching(Knowing):
    """Two guesses at every place, of which the second is right where it is right at all, and goes on."""

    def propose(self, k):
        tokens, parents, above, v = [], [], -1, self.vocab_size
        for i, token in enumerate(self.script[len(self.ids) : len(self.ids) + k], len(self.ids)):
            tokens += [(token + 1) % v, token if self.right(i) else (token + 2) % v]
            parents += [above, above]
            above = len(tokens) - 1
        return Proposal(tokens, parents)


KINDS = {
    "oracle": lambda target, v: Knowing(target, v, lambda i: True),
    "anti": lambda target, v: Knowing(target, v, lambda i: False),
    "flaky": lambda target, v: Knowing(target, v, lambda i: i % 3),
    "faulty": lambda target, v: Knowing(target, v, lambda i: i % 5, lambda call: call % 4 == 2),
    "lookup": lambda target, v: LookupDraft(1),
    "tree": lambda target, v: Branching(target, v, lambda i: i % 4),
}


@contextlib.contextmanager
def drafting(make, monkeypatch):
    """Requests get their draft from ``make()``, whatever they ask for."""

    def make_draft(pair, options, limit, follows, seat=None):
        draft = None if options.k == 0 or options.draft == "none" else make()
        guarded = GuardedDraft(draft, pair.model.vocab_size, pair.model.eos_ids)
        pair.pressure.watch(guarded)
        return guarded

    with monkeypatch.context() as patch:
        patch.setattr("specloop.session.make_draft", make_draft)
        yield


def play(pair, prompts, tokens, shown, **options):
    """The results of the prompts, together; every event is compared with them on the way."""
    each = [{"max_new_tokens": n, "seed": 3 + i} for i, n in enumerate(tokens)]
    prompts, events = [list(prompt) for prompt in prompts], []
    if shown == "whole":
        return pair.generate_batch(prompts, each=each, **options)
    if len(prompts) == 1:
        stream = pair.stream(prompts[0], **each[0], **options)
        events, results = list(stream), None
        results = [stream.result]
    else:
        results = pair.generate_batch(prompts, each=each, callback=events.append, **options)
    for i, result in enumerate(results):
        mine = [event for event in events if event.index == i]
        assert [e.token for e in mine if e.token is not None] == result.tokens
        assert "".join(e.text for e in mine) == result.text
        assert [e.finish_reason for e in mine if e.finish_reason] == [result.finish_reason]
        assert sum(e.from_draft for e in mine) == result.stats.speculation.committed
    return results


def run(target, kind, k, temperature, batch, shown, monkeypatch, **options):
    """The first ``batch`` prompts with drafts of a kind. What holds in every setting is checked here."""
    pair = pair_on(target)
    with drafting(lambda: KINDS[kind](target, pair.model.vocab_size), monkeypatch):
        results = play(pair, PROMPTS[:batch], TOKENS[:batch], shown, temperature=temperature, k=k, **options)
    for result, most in zip(results, TOKENS, strict=False):
        counts = result.stats.speculation
        assert result.stats.completion_tokens == len(result.tokens) == counts.tokens <= most
        assert counts.committed <= counts.accepted <= counts.evaluated <= counts.proposed
        assert sum(counts.k_history) == counts.proposed and max(counts.k_history, default=0) <= k * (
            1 + (kind == "tree")
        )
        assert counts.rounds == len(counts.k_history) and sum(counts.accepted_history) == counts.accepted
        assert all(0 <= token < pair.model.vocab_size for token in result.tokens)
        assert result.finish_reason == ("stop" if result.tokens[-1] in pair.model.eos_ids else "length")
    assert all(seat.nbytes == 0 for seat in pair.place.seats())
    return results


GRID = tuple(itertools.product(TARGETS, KS, TEMPERATURES, BATCHES, SHOWN))


def sample_of_the_grid(seed=0):
    """A few settings of ``GRID``, in which every two values of different axes come together."""
    rest = list(GRID)
    random.Random(seed).shuffle(rest)
    missing = {pair for setting in GRID for pair in itertools.combinations(enumerate(setting), 2)}
    chosen = []
    while missing:  # the one that has most of what is missing
        best = max(rest, key=lambda setting: len(missing.intersection(itertools.combinations(enumerate(setting), 2))))
        chosen.append(best)
        rest.remove(best)
        missing.difference_update(itertools.combinations(enumerate(best), 2))
    return chosen
