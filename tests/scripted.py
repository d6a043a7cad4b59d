"""Models, drafts and a tokenizer without weights: small enough to predict every token, strict enough to catch a slip.

The cache keeps the ids themselves, so a row that was not rolled back, or rolled back too far, changes the text.
"""

import math

import torch

from specloop.controller import Fixed
from specloop.faults import GuardedDraft
from specloop.request import Request, Sampling


class ScriptedCache:
    def __init__(self, capacity):
        self.capacity, self.ids = capacity, []

    @property
    def length(self):
        return len(self.ids)

    def truncate(self, length):
        assert 0 <= length <= len(self.ids), f"truncate({length}) of {len(self.ids)} positions"
        del self.ids[length:]


class Scripted:
    """Logits are a function of the prefix that the *cache* holds."""

    def __init__(self, logits, vocab_size, eos_ids=(), context=4096):
        self.logits, self.vocab_size, self.eos_ids, self.context = logits, vocab_size, frozenset(eos_ids), context
        self.name = "scripted"
        self.passes = []  # rows of each pass that wanted logits
        self.caches = []

    def new_cache(self, capacity):
        self.caches.append(ScriptedCache(capacity))
        return self.caches[-1]

    def forward(self, tokens, cache, *, last):
        assert tokens and 0 <= last <= len(tokens)
        assert all(isinstance(token, int) and 0 <= token < self.vocab_size for token in tokens), tokens
        cache.ids.extend(tokens)
        assert cache.length <= min(cache.capacity, self.context), "positions beyond the end of the cache"
        if last:
            self.passes.append(last)
        rows = [self.logits(cache.ids[: cache.length - last + 1 + i]) for i in range(last)]
        return torch.tensor(rows, dtype=torch.float32).reshape(last, self.vocab_size)


def scripted(following, vocab_size, **options):
    """A target whose argmax after a prefix is ``following(prefix)``."""

    step = min(0.01, 3.0 / vocab_size)  # the others stay below

    def logits(prefix):
        best = following(prefix)
        return [4.0 if token == best else step * token for token in range(vocab_size)]

    return Scripted(logits, vocab_size, **options)


def reading(text, **options):
    """A target that says the ids of ``text`` after a one-id prompt, then zeros."""
    return scripted(lambda prefix: text[len(prefix) - 1] if len(prefix) <= len(text) else 0, **options)


def law(logits, temperature=1.0):
    """The probabilities of plain sampling."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


class FunctionDraft:
    """Proposes ``following(ids so far, j)`` as its j-th guess."""

    name = "function"

    def __init__(self, following, limit=8):
        self.following, self.limit, self.ids = following, limit, []

    def begin(self, ids):
        self.ids = list(ids)

    def append(self, ids):
        self.ids.extend(ids)

    def outlook(self):
        return 0, self.limit

    def propose(self, k):
        guesses = []
        for j in range(min(k, self.limit)):
            guesses.append(self.following(self.ids + guesses, j))
        return guesses


def argmax(row):
    return max(range(len(row)), key=row.__getitem__)


def oracle(model):
    """Always right."""
    return FunctionDraft(lambda prefix, j: argmax(model.logits(prefix)))


def anti(model):
    """Always wrong."""
    return FunctionDraft(lambda prefix, j: (argmax(model.logits(prefix)) + 1) % model.vocab_size)


def flaky(model, period):
    """Right except at every position that ``period`` divides."""
    return FunctionDraft(
        lambda prefix, j: (argmax(model.logits(prefix)) + (len(prefix) % period == 0)) % model.vocab_size
    )


def guarded(model, draft):
    return draft if isinstance(draft, GuardedDraft) else GuardedDraft(draft, model.vocab_size, model.eos_ids)


def request_for(model, prompt, tokens, draft=None, controller=None, *, k=0, sampling=None, **options):
    """A request for so many tokens, with a cache of the model's."""
    limit = len(prompt) + tokens
    cache = model.new_cache(max(limit - 1, 1))
    sampling = Sampling(**(sampling or {}))
    return Request(list(prompt), limit, cache, guarded(model, draft), controller or Fixed(k), sampling, **options)


class ToyTokenizer:
    """Id i is ``pieces[i]``, bytes; encoding takes the longest piece that fits."""

    def __init__(self, pieces, eos_ids=()):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.eos_ids = frozenset(eos_ids)
        self.bos_id, self.eos_id, self.control_tokens = None, None, ()

    def token_bytes(self, token, *, special=True):
        return self.pieces[token]

    def encode(self, text, *, special=True):
        rest, ids = text.encode(), []
        while rest:
            fitting = [i for i, piece in enumerate(self.pieces) if piece and rest.startswith(piece)]
            best = max(fitting, key=lambda i: len(self.pieces[i]), default=None)
            ids += [] if best is None else [best]  # what has no piece is dropped
            rest = rest[1 if best is None else len(self.pieces[best]) :]
        return ids
