"""Everything that can go wrong with a draft is caught here: it costs a round's drafts, never the text."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from .drafts.base import Draft

MOST_FAULTS = 3  # then drafting is off for the rest of the request
SLOW_SECONDS = 1.0  # a proposal that takes this long is a fault, too


class GuardedDraft:
    """A draft as the decode loop uses it: never raises, never proposes an id that is out of range. None = no draft.

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

    def let_go(self, why: str) -> None:
        """Frees the draft: from the next round on there is none."""
        self._gone, self.draft = why, None

    @property
    def off_reason(self) -> str | None:
        if self._gone is not None:
            return self._gone
        if len(self.faults) < MOST_FAULTS:
            return None
        return f"the draft failed {len(self.faults)} times; last: {self.faults[-1]}"

    def outlook(self, ids: Sequence[int]) -> tuple[int, int]:
        """The draft's outlook after the committed ``ids``; (0, 0) if there is no draft or it failed."""
        if len(self.faults) >= MOST_FAULTS:
            return 0, 0
        return self._guard(self._outlook, ids) or (0, 0)

    def propose(self, k: int) -> list[int]:
        """At most k ids in range, nothing after an end-of-sequence id."""
        return self._guard(self._propose, k) or [] if k else []

    def append(self, ids: Sequence[int]) -> None:
        if not self._lost:
            self._guard(self._append, ids)

    def _append(self, draft, ids):
        draft.append(ids)

    def _outlook(self, draft, ids):
        if self._lost:
            draft.begin(ids)
            self._lost = False
        strength, limit = draft.outlook()
        return int(strength), int(limit)

    def _propose(self, draft, k):
        start = time.perf_counter()
        proposal = [int(token) for token in draft.propose(k)]
        if time.perf_counter() - start > SLOW_SECONDS:
            raise TimeoutError(f"a proposal took more than {SLOW_SECONDS:.0f} s")
        if len(proposal) > k:
            raise ValueError(f"{len(proposal)} tokens proposed, {k} asked for")
        for i, token in enumerate(proposal):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} proposed, the vocabulary has {self.vocab_size}")
            if token in self.eos_ids:
                return proposal[: i + 1]
        return proposal

    def _guard(self, call, argument):
        draft, start = self.draft, time.perf_counter()
        if draft is None:
            return None
        try:
            return call(draft, argument)
        except Exception as error:
            self.faults.append(f"{type(error).__name__}: {error}")
            self._lost = True
            return None
        finally:
            self.seconds += time.perf_counter() - start
