"""Everything that can go wrong with a draft is caught here: it costs a round's drafts, never the text.

After ``MOST_FAULTS`` faults the draft is off for ``FIRST_PAUSE`` rounds. Then it may try again: one more fault doubles
the pause, a proposal without one makes all well again. A draft whose call does not return in time is left alone until
it does. Each fault is noted with its reason.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Collection, Sequence

from .drafts.base import SLOW_SECONDS, Draft, Proposal
from .drafts.check import checked
from .worker import Worker

log = logging.getLogger("specloop")

MOST_FAULTS = 3
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # rounds
BEGIN_SECONDS = 10.0  # as SLOW_SECONDS, for reading a prompt


class GuardedDraft:
    """A draft as the decode loop uses it: never raises, never proposes what can't be verified. None = no draft.

    One thread uses it; ``let_go`` may be called from any.
    """

    def __init__(self, draft: Draft | None, vocab_size: int, eos_ids: Collection[int] = ()):
        self.draft = draft
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.faults: list[str] = []
        self.seconds = 0.0
        self._lost = True  # the draft's state has to be built from the committed ids
        self._gone: str | None = None
        self._strikes = 0  # faults since the draft was last known to be well
        self._pause, self._wait = FIRST_PAUSE, 0  # rounds: the next pause; what is left of this one
        self._resting: str | None = None  # why, if not because of faults
        self._timely = getattr(draft, "timely", False)
        self._worker: Worker | None = None
        self._warned = False

    def let_go(self, why: str, name: str | None = None) -> None:
        """Frees the draft: from the next round on there is none. ``name``: only if it is that one, or, of several
        (drafts/chain.py), that one alone.
        """
        draft = self.draft
        if name is not None and hasattr(draft, "without"):
            if draft.without(name) is not None:
                return
        elif name not in (None, getattr(draft, "name", None)):
            return
        self._gone, self.draft = why, None

    def rest(self, rounds: int, why: str) -> None:
        """No drafts for so many rounds."""
        self._wait, self._resting = max(self._wait, rounds + 1), why

    @property
    def off_reason(self) -> str | None:
        if self._gone is not None:
            return self._gone
        if self._wait and self._resting:
            return self._resting
        if self._strikes >= MOST_FAULTS:  # until it is known to be well
            return f"the draft failed {len(self.faults)} times; last: {self.faults[-1]}"
        return f"the draft is still busy; {self.faults[-1]}" if self._busy else None

    @property
    def _busy(self):
        return self._worker is not None and self._worker.busy

    def round(self) -> None:
        """A round of the decode loop begins."""
        self._wait = max(0, self._wait - 1)
        if not self._wait:
            self._resting = None

    def outlook(self, ids: Sequence[int]) -> tuple[int, int]:
        """The draft's outlook after the committed ``ids``; (0, 0) if there is no draft, or it is off or busy."""
        if self._wait or self._busy:
            return 0, 0
        return self._guard(self._outlook, ids) or (0, 0)

    def propose(self, k: int) -> Proposal:
        """A chain of at most k ids, nothing after an end-of-sequence id, or a tree that is at most k deep."""
        if k and not self._wait and not self._busy:
            return self._guard(self._propose, k) or Proposal([])
        return Proposal([])

    def append(self, ids: Sequence[int]) -> None:
        if not self._lost:
            self._guard(self._append, ids)

    def _append(self, draft, ids):
        self._call(draft.append, ids)

    def _outlook(self, draft, ids):
        if self._lost:
            self._call(draft.begin, list(ids), within=BEGIN_SECONDS)  # a copy: the loop's own grows
            self._lost = False
        strength, limit = self._call(draft.outlook)
        return max(0, int(strength)), max(0, int(limit))

    def _propose(self, draft, k):
        found = checked(self._call(_proposal, draft, k), k, self.vocab_size, self.eos_ids)
        if found.fault is not None:
            self._fault(found.fault)
        elif found.tokens and self._strikes >= MOST_FAULTS:
            self._strikes, self._pause = 0, FIRST_PAUSE
        return found

    def _call(self, function, *arguments, within=None):
        if self._timely:
            return function(*arguments)
        if self._worker is None:
            self._worker = Worker("specloop draft")
            weakref.finalize(self, self._worker.end)
        return self._worker.call(function, arguments, SLOW_SECONDS if within is None else within)

    def _guard(self, call, argument):
        draft, start = self.draft, time.perf_counter()
        if draft is None:
            return None
        try:
            return call(draft, argument)
        except Exception as error:
            self._fault(_describe(error))
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def _fault(self, why):
        self.faults.append(why)
        self._lost = True
        self._strikes += 1
        if self._strikes < MOST_FAULTS:
            return
        self._wait = max(self._wait, self._pause + 1)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if not self._warned:
            self._warned = True
            log.warning("speculation off: %s", self.off_reason)


def _proposal(draft, k):
    """What the draft proposes, as a Proposal; of a list no more than shows that it is too long."""
    found = draft.propose(k)
    if not isinstance(found, Proposal):
        found = Proposal(list(itertools.islice(found, k + 1)))
    found.source = found.source or getattr(draft, "name", "")
    return found


def _describe(error):
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # it can't even say what it is
        return type(error).__name__
