"""Versions of a model, and how they are exchanged while requests run on them.

A version is exchanged between two passes: its place's lock is held in every pass, and in the exchange. The requests'
caches go with the old version. The decode loop finds an empty cache then and fills it from the committed ids, which
are the single truth; so nothing of the old version has any influence on what the new one says next.
"""

from __future__ import annotations

import sys
import threading
import weakref

from .costs import CostCurve
from .drafts.vocabulary import check_same
from .errors import OptionError, PairClosed
from .models.base import Part, accept, forward_parts, one_by_one


class Turns:
    """A lock for ``with``. Who waits for it gets it before the one that gave it back: with a plain lock a request that
    takes it again within microseconds keeps others, and an exchange, waiting for as long as it likes. Who has it and
    asks again, from a function that is called in a pass, would wait for good: RuntimeError.
    """

    def __init__(self):
        self._door, self._room = threading.Lock(), threading.Lock()
        self._holder: int | None = None

    def __enter__(self):
        if self._holder == threading.get_ident():
            raise RuntimeError("the pair can't be used within a pass of its own: by a function that is called in one")
        with self._door:  # held by the one that is next
            self._room.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *error):
        self._holder = None
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
    """Where the version in use is. ``lock`` is held in every pass: a model's scratch memory serves one at a time.

    ``account`` (pressure.py; None if there is none) is asked before a cache is made, and serves failed allocations.
    """

    def __init__(self):
        self._account = lambda: None
        self.lock = Turns()
        self.version: Version | None = None
        self.generation = 0  # how often it was exchanged
        self._seats, self._seats_lock = weakref.WeakSet(), threading.Lock()

    def room(self, capacity) -> int:
        """How many more requests of so many ids have room for their caches. From any thread."""
        account = self.account
        return sys.maxsize if account is None else account.room(capacity)

    def seat(self, capacity, features=False) -> Seat:
        seat = Seat(self, capacity, features)
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

    @property
    def account(self):
        return self._account()

    @account.setter
    def account(self, account):
        self._account = weakref.ref(account)  # which has this place

    @property
    def eos_ids(self):
        return self.get().model.eos_ids

    def forward_parts(self, parts):
        """One pass for several requests, parts whose caches are seats of this place: as :func:`base.forward_parts`.

        The caller holds the lock. Raises PairClosed, and OutOfMemory if nothing helps; then no seat has changed.
        """
        model, seats = self.get().model, [part.cache for part in parts]
        account, before = self.account, streamed_bytes(model)

        def work():
            own = [part._replace(cache=part.cache.cache_of(model)) for part in parts]
            if len(own) == 1 and own[0].parents is None:
                return model.forward(own[0].tokens, own[0].cache, last=own[0].last)
            enough = account is None or account.fits(model, own)
            return (forward_parts if enough else one_by_one)(model, own)

        try:
            return work() if account is None else account.serve(work, seats)
        finally:
            if before is not None:  # what was read served them all
                share, rest = divmod(streamed_bytes(model) - before, len(seats))
                for i, seat in enumerate(seats):
                    seat.streamed_bytes = (seat.streamed_bytes or 0) + share + (i < rest)


class Seat:
    """One request's model and cache (models/base.py: both) in a place, whatever version is there.

    After an exchange ``length`` is 0. ``wants_features``: whether the cache, when it is made, is one that keeps them
    (models/base.py); they are kept by a model that has some.
    """

    def __init__(self, place, capacity, wants_features=False):
        self.place, self._capacity, self._cache = place, capacity, None
        self.wants_features, self._given = wants_features, None
        self.lock = place.lock
        self.eos_ids = self._version.model.eos_ids
        self.streamed_bytes = streamed_bytes(self._version.model) and 0  # read for this request's passes
        self.released: list[dict] = []  # see pressure.py
        self._resident: int | None = None

    @property
    def _version(self):
        return self.place.get()

    @property
    def generation(self):
        return self.place.generation

    @property
    def length(self):
        cache = self._cache
        return 0 if cache is None else cache.length

    @property
    def capacity(self):
        """Most tokens; 0 where nothing is in place."""
        version = self.place.version
        return 0 if version is None else min(self._capacity, version.model.context)

    @property
    def resident_bytes(self) -> int | None:
        """Of the model's weights, in memory when this was used last."""
        version = self.place.version
        return self._resident if version is None or self._cache is None else getattr(version.model, "nbytes", None)

    @property
    def features(self):
        """(the cache's features, of how many ids): bf16 [capacity, size] and its length; (None, 0) without."""
        cache = self._cache  # which another thread may take away
        features = getattr(cache, "features", None)
        return (None, 0) if features is None else (features, cache.length)

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

    def lend(self, features, reach):
        """What a feature head reads in the passes that follow (models/feature_head.py); (None, 0) in the end."""
        self._given = features, reach
        if self._cache is not None:
            self._cache.given = self._given

    def accept(self, path):
        """As :func:`specloop.models.base.accept`; nothing after an exchange."""
        if self._cache is not None:
            accept(self._cache, path)

    def forward(self, tokens, cache, *, last):
        """As a Model's; the caller holds the lock. Raises as :meth:`Place.forward_parts`."""
        assert cache is self
        return self.place.forward_parts([Part(self, tokens, last)])

    def guesses(self, ids, columns):
        """(As models.llama.Llama.guesses, the cache's features) for the cache as the last pass left it; None where the
        model has no such way. The caller holds the lock.
        """
        make, cache = getattr(self._version.model, "guesses", None), self._cache
        found = None if make is None or cache is None else make(cache, ids, columns)
        return None if found is None else (found, cache.features)

    def advance(self, tokens):
        """Says that so many more are in the cache."""
        self._cache.advance(tokens)

    def cache_of(self, model):
        """This request's cache of the model in place, made if there is none."""
        self.eos_ids = model.eos_ids
        if self._cache is None:
            capacity = self.capacity
            account = self.place.account
            if account is not None:
                account.expect(self, model, capacity)
            self._cache = model.new_cache(capacity, **self.form_of(model))
            if self._given is not None:
                self._cache.given = self._given
        return self._cache

    def form_of(self, model) -> dict:
        """What its cache is to be like, for ``model.new_cache`` and ``model.cache_nbytes``."""
        return {"features": True} if self.wants_features and getattr(model, "feature_size", None) else {}

    def keep_features(self):
        """From now on its cache has features. One without is given up, to be filled anew from the committed ids."""
        self.wants_features = True
        if self._cache is not None and self.features[0] is None:
            self.leave()

    def drop_features(self) -> int:
        """From now on it has none. Returns the bytes; the caller holds the lock."""
        features, self.wants_features = self.features[0], False
        if features is None:
            return 0
        self._cache.features = None
        return features.nbytes

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
