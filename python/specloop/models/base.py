"""What the decode loop needs of a model and of its key-value cache, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
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
    # ``feature_size``, if there and not None: the width of the *features*. A position's feature is its hidden state
    # behind the last norm: the vector whose products with the head's rows are the logits of what comes next. Then
    # ``new_cache(capacity, features=True)`` gives a cache with ``features``, bf16 ``[capacity, feature_size]``, whose
    # rows below ``length`` are there after every pass and every ``accept``, also where no logits were wanted.

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for at most ``capacity`` positions."""

    def forward(self, tokens: Sequence[int], cache: Cache, *, last: int) -> Tensor:
        """Appends ``tokens`` to the cache and returns the logits of the last ``last`` of them, f32 ``[last, V]``.

        ``0 <= last <= len(tokens)``; 0 fills the cache only and skips the head. A row's logits depend on the ids up to
        that row alone: not on how many rows came in one call, nor on how the ids were cut into calls. The tensor is
        valid until the next call.
        """


class Part(NamedTuple):
    """One request's share of a pass: the arguments of ``forward``, or a tree of drafts.

    With ``parents`` the last ``len(parents)`` of the tokens are nodes of a tree, in an order in which parents come
    first: ``parents[j] < j`` is the node that node j follows, -1 the id before the nodes. ``last`` is then 1 + the
    number of nodes: the row of that id, and one per node, which sees the path to it.
    """

    cache: Cache
    tokens: Sequence[int]
    last: int
    parents: Sequence[int] | None = None


def forward_parts(model: Model, parts: Sequence[Part]) -> Tensor:
    """One pass for several requests: f32 logits ``[sum of last, V]``, the rows of each part in order.

    Each part's rows are those of ``forward`` bit for bit, and a node's are those of the path to it. The tensor is valid
    until the next call. After a tree the cache holds the ids before the nodes; ``accept`` takes over a path. A model
    with a ``forward_parts`` of its own makes one pass of it, any other one pass per part (``one_by_one``). No
    two parts may have the same cache. Raises what ``forward`` raises, and ValueError for a tree that is none.
    """
    own = getattr(model, "forward_parts", None)
    if own is not None:
        return own(parts)
    return one_by_one(model, parts)


def one_by_one(model: Model, parts: Sequence[Part]) -> Tensor:
    """The same with ``forward`` alone: a pass per part, and per node of a tree. The caches keep nothing of a tree."""
    if len(parts) == 1 and parts[0].parents is None:
        cache, tokens, last, _ = parts[0]
        return model.forward(tokens, cache, last=last)
    check_parts(parts)
    return torch.cat([rows for part in parts for rows in (_chain(model, part), *_nodes(model, part))])


def accept(cache: Cache, path: Sequence[int]) -> None:
    """After a pass with a tree: the nodes of ``path``, from the root down, become part of the text.

    What a cache does not keep of them, ``cache.length`` says, has to be fed again.
    """
    own = getattr(cache, "accept", None)
    if own is not None:
        own(path)


def check_parts(parts: Sequence[Part]) -> None:
    """Raises ValueError for what no model could serve."""
    if not parts:
        raise ValueError("parts: expected at least one")
    if len(parts) > 1 and len({id(part.cache) for part in parts}) < len(parts):
        raise ValueError("parts: expected a cache of its own for each")
    for cache, tokens, last, parents in parts:
        n, room = len(tokens), cache.capacity - cache.length
        if parents is None:
            if not 0 <= last <= n:
                raise ValueError(f"last: expected 0 to {n} (the number of tokens), got {last}")
            if n > room:
                raise ValueError(f"tokens: expected at most {room} (room in the cache), got {n}")
            continue
        if len(parents) >= n:
            raise ValueError(f"parents: expected fewer nodes than tokens, got {len(parents)} of {n}")
        if last != len(parents) + 1:
            raise ValueError(f"last: expected {len(parents) + 1} (1 + the number of nodes) for a tree, got {last}")
        if any(not -1 <= parent < j for j, parent in enumerate(parents)):
            raise ValueError(f"parents: expected numbers of earlier nodes, or -1, got {list(parents)}")
        longest = n - len(parents) + max((len(way) for way in paths_to(parents)), default=0)
        if longest > room:
            raise ValueError(f"tokens: expected paths of at most {room} (room in the cache), got {longest}")


def paths_to(parents: Sequence[int]) -> list[list[int]]:
    """For each node of a tree the nodes from its root down to itself."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    return paths


def _chain(model, part):
    """Rows of a chain, or of the id before a tree's nodes. Copies: forward's are valid until its next call."""
    nodes = 0 if part.parents is None else len(part.parents)
    return model.forward(part.tokens[: len(part.tokens) - nodes], part.cache, last=part.last - nodes).clone()


def _nodes(model, part):
    """The row of each node of a tree, made with the path to it alone in the cache, which forgets it again."""
    paths, start = paths_to(part.parents or ()), part.cache.length
    nodes = part.tokens[len(part.tokens) - len(paths) :]
    for path in paths:
        yield model.forward([nodes[i] for i in path], part.cache, last=1).clone()
        part.cache.truncate(start)
