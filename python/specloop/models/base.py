"""What the decode loop needs of a model and of its key-value cache, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Cache(Protocol):
    """Keys and values of one request: positions ``0 .. length - 1``."""

    length: int
    capacity: int

    def truncate(self, length: int) -> None:
        """Forgets every position from ``length`` on (``0 <= length <= self.length``); what is kept does not change."""


class Model(Protocol):
    """A causal language model."""

    name: str
    vocab_size: int
    context: int  # most positions that the model can see
    eos_ids: frozenset[int]

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for at most ``capacity`` positions."""

    def forward(self, tokens: Sequence[int], cache: Cache, *, last: int) -> Tensor:
        """Appends ``tokens`` to the cache and returns the logits of the last ``last`` of them, f32 ``[last, V]``.

        ``0 <= last <= len(tokens)``; 0 fills the cache only and skips the head. A row's logits depend on the ids up to
        that row alone: not on how many rows came in one call, nor on how the ids were cut into calls. The tensor is
        valid until the next call.
        """


class Part(NamedTuple):
    """One request's share of a pass."""

    cache: Cache
    tokens: list[int]
    last: int
    parents: list[int] | None = None


def forward_parts(target, parts):
    """The rows of each part, one after the other."""
    own = getattr(target, "forward_parts", None)
    if own is not None:
        return own(parts)
    import torch

    if len(parts) == 1:
        return target.forward(parts[0].tokens, parts[0].cache, last=parts[0].last)
    return torch.cat([target.forward(part.tokens, part.cache, last=part.last).clone() for part in parts])
