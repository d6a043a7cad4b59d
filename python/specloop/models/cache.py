"""The key-value cache of one request: pages of the model's pool (pool.py), in order."""

import torch

from .pool import PAGE
from .tree import Tree


class KVCache:
    """Keys and values of one request. Rolling back only moves ``length``; the pages go back when the cache goes.

    ``table``: the page table, int32 [pages of a whole context], -1 behind the last page. ``features``: bf16 [capacity,
    ``feature_size``], of which those below ``length`` are there; None for a size of None.
    """

    def __init__(self, pool, pages, capacity, width, device, feature_size=None):
        self.pool, self.pages, self.capacity, self.length = pool, pages, capacity, 0
        self._unreached = len(pages)  # behind the longest that it was
        self._width, self._device = width, device
        self._tree = None  # of the last pass
        self.table, self.features = self.table_of(pages), None
        if feature_size is not None:
            with torch.inference_mode(False):  # whatever mode the caller is in
                self.features = torch.empty(capacity, feature_size, dtype=torch.bfloat16, device=device)

    def __del__(self):
        self.forget_tree()
        self.pool.give(self.pages, self._unreached)

    def table_of(self, pages):
        return torch.tensor(pages + [-1] * (self._width - len(pages)), dtype=torch.int32, device=self._device)

    def slots(self, start, stop):
        return slots(self.pages, range(start, stop))

    def truncate(self, length):
        if not 0 <= length <= self.length:
            raise ValueError(f"length: expected 0 to {self.length}, got {length}")
        self.forget_tree()
        self.length = length

    def advance(self, tokens):
        """Says that so many more are in it."""
        self.length += tokens
        reached = len(self.pages) - self._unreached
        if self.length > reached * PAGE:
            more = -(-self.length // PAGE) - reached
            self._unreached -= more
            self.pool.reach(more)

    def grow_tree(self, chain, parents):
        """The tree that follows the next ``chain`` ids: pages for its paths. Raises MemoryError."""
        self.forget_tree()
        self._tree = Tree(self, chain, parents)
        return self._tree

    def keep_features(self, chain, nodes=None):
        """Features of the ids that come next, float32 [n, size], and of the nodes of the tree behind them."""
        self.features[self.length : self.length + len(chain)].copy_(chain)
        if self._tree is not None:
            self._tree.features = nodes.to(torch.bfloat16)

    def accept(self, path):
        """After a pass with a tree: its nodes ``path``, from the root down, are part of the text now.

        The others are forgotten. Keeps nothing if the last pass was none with a tree (base.one_by_one). Raises
        ValueError if the tree has no such path.
        """
        if self._tree is None:
            return
        self.pages, taken = self._tree.pages_with(path)
        if taken:
            self.table = self.table_of(self.pages)
        if path and self._tree.features is not None:
            self.features[self.length : self.length + len(path)] = self._tree.features[list(path)]
        self.advance(len(path))
        self.forget_tree()

    def forget_tree(self):
        if self._tree is not None:
            self.pool.give(self._tree.spare, len(self._tree.spare))
            self._tree = None

    @property
    def nbytes(self):
        """Of its pages, full or not, and of its features."""
        pages = len(self.pages) + (len(self._tree.spare) if self._tree else 0)
        return pages * self.pool.page_nbytes + (0 if self.features is None else self.features.nbytes)


def slots(pages, positions):
    """Indexes of positions in the pool: page * PAGE + offset."""
    return [pages[p // PAGE] * PAGE + p % PAGE for p in positions]
