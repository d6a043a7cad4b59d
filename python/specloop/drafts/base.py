"""What the decode loop needs of a draft, and what a draft gives.

A draft sees committed ids only, so it has nothing to roll back: what the target refused was never appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

SLOW_SECONDS = 1.0  # a proposal that takes longer is a fault


@dataclass(slots=True)
class Proposal:
    """Ids that may come next: a chain, or a tree.

    ``logits``: what the tokens of a chain were drawn from, by ``specdec_kernels.sample`` with stream 0, the round's
    position, the token's index in the chain and the request's own temperature and filters. Without them the tokens are
    point masses: chosen, not drawn. A tree's nodes are always chosen.
    """

    tokens: list[int]
    parents: list[int] | None = None  # of a tree: each node's parent, or -1 where it comes first; None = a chain
    logits: Tensor | None = None  # [n, V] raw, f32; [n, Vd] with ``ids``
    ids: Tensor | None = None  # [Vd] int32 ascending: the target's ids that the columns stand for
    fault: str | None = None  # why it is shorter than it should be
    source: str = ""  # the drafter's name

    def __len__(self):
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Of a tree; a chain's is its length."""
        if self.parents is None:
            return len(self.tokens)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)

    def first(self, n: int, fault: str | None = None) -> Proposal:
        """The first ``n`` tokens of a chain."""
        logits = None if self.logits is None or not n else self.logits[:n]
        ids = None if logits is None else self.ids
        return Proposal(self.tokens[:n], None, logits, ids, fault or self.fault, self.source)


class Draft(Protocol):
    """Guesses what comes after the committed ids of one request.

    ``timely``, if there and true: no call takes long, or it watches the clock itself. The calls of other drafts are
    made in a thread of their own, which is left behind when they hang (faults.py).
    """

    name: str

    def begin(self, ids: Sequence[int]) -> None:
        """Forgets the last request and starts from these committed ids."""

    def append(self, ids: Sequence[int]) -> None:
        """The target committed ``ids``."""

    def outlook(self) -> tuple[int, int]:
        """``(strength, limit)`` of the proposal that would come now, known before it is made.

        ``limit``: how many tokens it has (0 = none); of a tree, how deep it is. ``strength``: how far it can be
        trusted, as a small integer that grows by one with each accepted token (a lookup: the length of the match). The
        controller keeps its acceptance counters by it; a draft that knows no strength returns 0 and gets one counter
        per position.
        """

    def propose(self, k: int) -> Sequence[int] | Proposal:
        """At most ``k`` ids that may come next (a list is a chain of point masses), or a tree at most so deep."""
