"""What is given back when memory runs short, before a request is given up.

When an allocation fails, or a cache is about to exceed the budget, these steps are taken one by one, and after each the
work that failed is tried again:

1. spare KV pages: kept warm for the next request
2. lookup indexes of running requests, which go on without drafts; later requests make their own
3. prefetch: slots that blocks are read into ahead of their use, down to one
4. resident blocks of a model that streams: they are read in every pass from then on
5. the draft model; the pair has none from then on

None of them changes a token. Each is noted in the statistics of the request that needed it (``memory.released``). When
nothing is left the request raises OutOfMemory (an allocation failed) or BudgetError (the budget would be exceeded);
what it had emitted stays.
"""

from __future__ import annotations

import errno
import re
import sys
import threading
import weakref

from .drafts.lookup import BYTES_PER_ID
from .errors import BudgetError, OutOfMemory

# In order: name -> the model's method, where it is the target that gives something back.
STEPS = {
    "kv pages": "drop_spare",
    "lookup index": None,
    "prefetch": "drop_slot",
    "resident blocks": "drop_block",
    "draft": None,
}
ROWS = 9  # of logits that a round of one request needs, rarely more
GONE = "its memory was needed"
_MESSAGES = re.compile(r"out of memory|(can't|cannot|unable to) allocate|not enough memory|bad_alloc", re.IGNORECASE)


def is_out_of_memory(error) -> bool:
    """Whether the error says that an allocation failed: Python's, torch's on any device, or the system's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error))))


class Pressure:
    """The steps over a target's and a draft's place (versions.py). ``draft_gone``: a weak reference to a function that
    is called when the draft model was given up.

    All but ``watch``, ``room`` and what a draft asks for is called with the target's lock held.
    """

    def __init__(self, target, draft, draft_gone):
        self._target, self._draft, self._draft_gone = target, draft, draft_gone
        self._guards, self._guards_lock = weakref.WeakSet(), threading.Lock()
        self.promised = 0  # bytes of the budget for what is being loaded

    def watch(self, guarded) -> None:
        """A running request's draft, which may have an index."""
        with self._guards_lock:
            self._guards.add(guarded)

    def serve(self, work, seats):
        """``work()`` for some seats, tried again after each step while it fails for want of memory.

        At the draft's place it is tried once: a failure costs a round's drafts, and nothing is given back for them.
        """
        if seats[0].place is not self._target:
            return work()
        lengths = [seat.length for seat in seats]
        while True:
            failure = None
            try:
                return work()
            except (MemoryError, RuntimeError, OSError) as error:
                if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
                    raise
                failure = str(error) or type(error).__name__
            # Outside of the handler: an error holds on to its frames, and these to what was allocated already.
            for seat, length in zip(seats, lengths, strict=True):
                seat.truncate(length)
            if not self.release(seats):
                steps = ", ".join(dict.fromkeys(step["step"] for seat in seats for step in seat.released)) or "nothing"
                raise OutOfMemory(f"{_line(failure)}; given back before: {steps}")

    def expect(self, seat, model, capacity) -> None:
        """Makes room in the budget for the cache that ``seat`` is about to get; for a draft's there has to be room.

        Raises BudgetError if there is none.
        """
        target = self._target.get().model
        budget = getattr(target, "budget", None)
        if budget is None:
            return
        pages = model.cache_nbytes(capacity)
        while True:
            needed = model.cache_nbytes(capacity, **seat.form_of(model))  # fewer once the draft that wants more is gone
            more = needed - min(pages, model.spare_nbytes)  # a new cache takes over spare pages
            used = self.used(target)
            if used + more <= budget:
                return
            if seat.place is not self._target or not self.release([seat]):
                raise BudgetError(
                    f"memory_budget: a cache for {capacity} tokens takes {needed} bytes, and of {budget} bytes "
                    f"{max(0, budget - used)} are left; end other requests, or choose a smaller context"
                )

    def room(self, capacity) -> int:
        """How many more requests of so many tokens have room for their caches, a draft model's with the target's, for
        their lookup indexes and for the logits of their rounds: in the budget, or in the memory that is free.
        """
        model, draft = self._target.version and self._target.version.model, self._draft_model()
        if model is None or not hasattr(model, "room"):
            return sys.maxsize

        def besides(tokens):
            """What a request comes to take besides the target's cache."""
            pages = draft.cache_nbytes(tokens) if hasattr(draft, "cache_nbytes") else 0
            if reads_features(draft):
                pages += model.cache_nbytes(tokens, features=True) - model.cache_nbytes(tokens)
            return pages + BYTES_PER_ID * (tokens + 1) + ROWS * model.vocab_size * 4

        if model.budget is None:
            return model.room(capacity, besides(capacity))
        later = sum(besides(seat.capacity) for seat in self._target.seats() if not seat.is_empty)
        there = sum(seat.nbytes for seat in self._draft.seats()) + self._indexes()
        free = self._left(model) - max(0, later - there)
        return max(0, free) // (model.cache_nbytes(capacity) + besides(capacity))

    def fits(self, model, parts) -> bool:
        """Whether the budget has room for what the trees among the parts need while they are judged."""
        if getattr(model, "budget", None) is None:
            return True
        return sum(model.tree_nbytes(part) for part in parts if part.parents) <= self._left(model)

    def _left(self, model):
        """Of the budget, for pages: spare ones are taken first."""
        spare = sum(m.spare_nbytes for m in (model, self._draft_model()) if m is not None)
        return max(0, model.budget - self.used(model) + spare)

    def _draft_model(self):
        version = self._draft.version
        return None if version is None else version.model

    def share(self, least) -> int:
        """Promises ``least`` bytes of the budget, and half of what is free beyond, to a model that is to be loaded.

        The other half is for requests that begin meanwhile. Where ``least`` is not free, room is made for it, but no
        step is taken that running requests would miss. Raises BudgetError.
        """
        model = self._target.get().model
        while (free := model.budget - self.used(model)) < least:
            if not self._shrink():
                raise BudgetError(
                    f"memory_budget: another model needs {least} bytes at least beside the one that is running, and of "
                    f"{model.budget} bytes {max(0, free)} are left; close the pair and load anew"
                )
        self.promised = least + (free - least) // 2
        return self.promised

    def settle(self) -> None:
        """The loading is over: the target takes all that the budget leaves to it, which may be less than at first."""
        model, promised, self.promised = self._target.get().model, self.promised, 0
        if promised:
            model.grow()
            while self.used(model) > model.budget and self._shrink():
                pass

    def _shrink(self):
        """A step that slows passes down, if at all. Whether there was one."""
        return any(self._step(name) for name in ("kv pages", "prefetch", "resident blocks"))

    def used(self, model) -> int:
        """Bytes that the budget counts, now."""
        caches = sum(seat.nbytes for place in (self._target, self._draft) for seat in place.seats())
        models = sum(m.memory_nbytes for m in (model, self._draft_model()) if m is not None)
        return self.promised + models + caches + self._indexes()

    def _indexes(self):
        return sum(index_nbytes(guard.draft) for guard in self._guarded())

    def release(self, seats) -> int:
        """Takes the first step that frees something and returns the bytes; 0 if there is nothing left to free.

        It is noted at the seats, which needed it.
        """
        for name in STEPS:
            freed = self._step(name)
            if freed:
                for seat in seats:
                    if seat.released and seat.released[-1]["step"] == name:
                        seat.released[-1]["bytes"] += freed
                    else:
                        seat.released.append({"step": name, "bytes": freed})
                return freed
        return 0

    def _step(self, name):
        """Takes the step once and returns the bytes that it freed."""
        if name == "lookup index":
            return self._drop_lookups()
        if name == "draft":
            return self._drop_draft()
        step = getattr(self._target.get().model, STEPS[name], None)
        return 0 if step is None else step()

    def _guarded(self):
        with self._guards_lock:
            return list(self._guards)

    def _drop_lookups(self):
        freed = 0
        for guard in self._guarded():
            size = index_nbytes(guard.draft)
            if size:
                guard.let_go(GONE, "lookup")
                freed += size
        return freed

    def _drop_draft(self):
        with self._draft.lock:
            caches = sum(seat.nbytes for seat in self._draft.seats())
            version = self._draft.put(None)
        if version is None:
            return 0
        for guard in self._guarded():
            for name in ("model", "feature"):
                guard.let_go(GONE, name)
        caches += sum(seat.drop_features() for seat in self._target.seats())
        freed = caches + (getattr(version.model, "memory_nbytes", None) or 1)
        version.close()
        told = self._draft_gone()
        if told is not None:
            told()
        return freed


def reads_features(model) -> bool:
    """Whether a draft model goes by hidden states that the target's caches have to keep."""
    return getattr(model, "reads_features", False)


def index_nbytes(draft) -> int:
    """Of a lookup's index."""
    return getattr(draft, "index_nbytes", 0)


def _line(text):
    return " ".join(text.split())[:200]
