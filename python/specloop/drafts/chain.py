"""Several drafts one after the other: the first that has something to propose does.

A lookup costs nothing and is right where the text repeats itself; a model has an answer everywhere else. Each hears of
every committed id, so any of them can step in at any round.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Draft, Proposal


class ChainDraft:
    """``drafts``: best first. What a model proposes and what a lookup proposes differ in the Proposal (``logits``)."""

    name = "chain"

    def __init__(self, drafts: Sequence[Draft]):
        self.drafts = tuple(drafts)

    @property
    def timely(self) -> bool:
        return all(getattr(draft, "timely", False) for draft in self.drafts)

    @property
    def index_nbytes(self) -> int:
        return sum(getattr(draft, "index_nbytes", 0) for draft in self.drafts)

    def without(self, name: str) -> ChainDraft | None:
        """The others go on alone: itself without those of that name; None if nothing is left. From any thread."""
        self.drafts = tuple(draft for draft in self.drafts if draft.name != name)
        return self if self.drafts else None

    def begin(self, ids: Sequence[int]) -> None:
        for draft in self.drafts:
            draft.begin(ids)

    def append(self, ids: Sequence[int]) -> None:
        for draft in self.drafts:
            draft.append(ids)

    def outlook(self) -> tuple[int, int]:
        """Of the first that has something to propose. A model's strength is 0, a lookup's is more."""
        return next((outlook for draft in self.drafts if (outlook := draft.outlook())[1] > 0), (0, 0))

    def propose(self, k: int) -> Proposal:
        for draft in self.drafts:
            if draft.outlook()[1] <= 0:
                continue
            found = draft.propose(k)
            if not isinstance(found, Proposal):
                found = Proposal(list(found))
            if found.tokens or found.fault is not None:
                found.source = found.source or draft.name
                return found
        return Proposal([])
