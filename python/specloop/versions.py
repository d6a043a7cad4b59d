"""Versions of a model, and how they are exchanged while requests run on them.

A version is exchanged between two passes: its place's lock is held in every pass, and in the exchange. The requests'
caches go with the old version. The decode loop finds an empty cache then and fills it from the committed ids, which
are the single truth; so nothing of the old version has any influence on what the new one says next.
"""

from __future__ import annotations

import threading
import weakref

from .costs import CostCurve
from .drafts.vocabulary import check_same
from .errors import OptionError, PairClosed


class Turns:
    """A lock for ``with``. Who waits for it gets it before the one that gave it back: with a plain lock a request that
    takes it again within microseconds keeps others, and an exchange, waiting for as long as it likes.
    """

    def __init__(self):
        self._door, self._room = threading.Lock(), threading.Lock()

    def __enter__(self):
        with self._door:  # held by the one that is next
            self._room.acquire()

    def __exit__(self, *error):
        self._room.release()


class Version:
    """A loaded model with what belongs to it. ``name``: what was asked for."""

    def __init__(self, model, tokenizer, chat_template, name=None):
        self.model, self.tokenizer, self.chat_template, self.name = model, tokenizer, chat_template, name
        self.costs: CostCurve | None = None  # seconds of a pass over 1, 2, ... rows, once they are known
        self.ids = None  # of a draft: see drafts/vocabulary.py

    def close(self):
        """Gives back memory, files and threads."""
        close = getattr(self.model, "close", None)
        if close is not None:
            close()


class Place:
    """Where the version in use is. ``lock`` is held in every pass: a model's scratch memory serves one at a time."""

    def __init__(self):
        self.lock = Turns()
        self.version: Version | None = None
        self.generation = 0  # how often it was exchanged
        self._seats, self._seats_lock = weakref.WeakSet(), threading.Lock()

    @property
    def eos_ids(self):
        return self.get().model.eos_ids

    def forward_parts(self, parts):
        """A pass for requests that have seats here; the caller holds the lock."""
        if len(parts) == 1:
            return parts[0].cache.forward(parts[0].tokens, parts[0].cache, last=parts[0].last)
        import torch

        return torch.cat([part.cache.forward(part.tokens, part.cache, last=part.last).clone() for part in parts])

    def room(self, capacity) -> int:
        """How many more requests of so many ids have room for their caches."""
        return 16

    def seat(self, capacity, account=None) -> Seat:
        seat = Seat(self, capacity, account)
        with self._seats_lock:
            self._seats.add(seat)
        return seat

    def seats(self) -> list[Seat]:
        with self._seats_lock:
            return list(self._seats)

    def get(self) -> Version:
        version = self.version
        if version is None:
            raise PairClosed("the pair is closed")
        return version

    def put(self, version: Version | None) -> Version | None:
        """Puts another version here (None = nothing any more) and returns the one before. The caller holds the lock."""
        for seat in self.seats():
            seat.leave()
        before, self.version = self.version, version
        self.generation += 1
        return before


class Seat:
    """One request's model and cache (models/base.py: both) in a place, whatever version is there.

    After an exchange ``length`` is 0. ``account`` (optional) is asked before a cache is made and serves failed
    allocations (pressure.py).
    """

    def __init__(self, place, capacity, account=None):
        self._place, self._capacity, self._account, self._cache = place, capacity, account, None
        self.lock = place.lock
        self.eos_ids = self._version.model.eos_ids
        self.streamed_bytes = streamed_bytes(self._version.model) and 0  # read for this request's passes
        self.released: list[dict] = []  # see pressure.py
        self._resident: int | None = None

    @property
    def _version(self):
        return self._place.get()

    @property
    def generation(self):
        return self._place.generation

    @property
    def length(self):
        cache = self._cache
        return 0 if cache is None else cache.length

    @property
    def capacity(self):
        """Most tokens; 0 where nothing is in place."""
        version = self._place.version
        return 0 if version is None else min(self._capacity, version.model.context)

    @property
    def resident_bytes(self) -> int | None:
        """Of the model's weights, in memory when this was used last."""
        version = self._place.version
        return self._resident if version is None or self._cache is None else getattr(version.model, "nbytes", None)

    @property
    def is_empty(self):
        """Whether there is no cache: it is made in the first pass."""
        return self._cache is None

    @property
    def nbytes(self):
        """Of the cache."""
        return getattr(self._cache, "nbytes", 0)

    def truncate(self, length):
        cache = self._cache
        if cache is not None:
            cache.truncate(min(length, cache.length))

    def forward(self, tokens, cache, *, last):
        """As a Model's; the caller holds the lock. Raises PairClosed, and OutOfMemory if nothing helps."""
        assert cache is self
        model = self._version.model
        self.eos_ids = model.eos_ids
        before = streamed_bytes(model)
        try:
            if self._account is None:
                return self._forward(model, tokens, last)
            return self._account.serve(lambda: self._forward(model, tokens, last), self)
        finally:
            if before is not None:
                self.streamed_bytes = (self.streamed_bytes or 0) + streamed_bytes(model) - before

    def _forward(self, model, tokens, last):
        if self._cache is None:
            capacity = self.capacity
            if self._account is not None:
                self._account.expect(self, model, capacity)
            self._cache = model.new_cache(capacity)
        return model.forward(tokens, self._cache, last=last)

    def leave(self):
        """Lets go of the cache: in the end, or because the version goes."""
        if self._cache is not None:
            self._resident = self.resident_bytes
            self._cache = None


def streamed_bytes(model) -> int | None:
    """What the model's passes have read from a file so far; None for one that does not say."""
    weights = getattr(model, "weights", None)
    return getattr(weights, "streamed_bytes", None)


def check_successor(version, before, context):
    """Raises OptionError if requests that run on ``before`` could not go on with ``version``."""
    check_same("target", version, before)
    has, needs = (min(v.model.context, context or v.model.context) for v in (version, before))
    if has < needs:
        raise OptionError(f"target: expected a model with a context of at least {needs} tokens, got one of {has}")
