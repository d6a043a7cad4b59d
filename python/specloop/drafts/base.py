"""What the decode loop needs of a draft.

A draft sees committed ids only, so it has nothing to roll back: what the target refused was never appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Draft(Protocol):
    """Guesses what comes after the committed ids of one request. Proposals are point masses: no distribution."""

    name: str

    def begin(self, ids: Sequence[int]) -> None:
        """Forgets the last request and starts from these committed ids."""

    def append(self, ids: Sequence[int]) -> None:
        """The target committed ``ids``."""

    def outlook(self) -> tuple[int, int]:
        """``(strength, limit)`` of the proposal that would come now, known before it is made.

        ``limit``: how many tokens it has (0 = none). ``strength``: how far it can be trusted, as a small integer that
        grows by one with each accepted token (a lookup: the length of the match). The controller keeps its acceptance
        counters by it; a draft that knows no strength returns 0 and gets one counter per position.
        """

    def propose(self, k: int) -> list[int]:
        """At most ``k`` ids that may come next."""
