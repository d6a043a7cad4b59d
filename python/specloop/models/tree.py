"""A tree of drafts in the pages of a cache.

Attention adds up a request's keys in the order of their positions, in blocks that begin at fixed ones. For a node's row
to have the bits that plain decoding gives it, the keys on the path to it have to lie as there: at their positions, and
none of another path between them. So every path from the root to a leaf gets a page table of its own. Full pages are
shared; the last, partly filled page is copied, and the ids of the pass are written to the pages of each path that they
are on. The first path has the cache's own pages. Accepting a path exchanges pages, no key moves.
"""

from .base import paths_to
from .pool import PAGE


class Tree:
    """The paths of a tree that follows the next ``chain`` ids of a cache.

    ``ways``: per node the paths that it is on; a row of the chain is on all of them. ``tables``, ``pages``: per path.
    ``spare``: pages that go back to the pool in the end. ``features``: of the nodes, where the cache keeps them.
    """

    def __init__(self, cache, chain, parents):
        start, pool = cache.length, cache.pool
        self._to, self._first = paths_to(parents), start // PAGE
        self.features = None
        leaves = leaves_of(parents)
        counts = further_pages(start, chain, parents)
        self.spare = pool.take(sum(counts))
        self.ways = [[i for i, leaf in enumerate(leaves) if node in self._to[leaf]] for node in range(len(parents))]
        self.pages, at = [cache.pages], 0
        for count in counts:
            self.pages.append(cache.pages[: self._first] + self.spare[at : at + count])
            at += count
        self.tables = [cache.table, *(cache.table_of(pages) for pages in self.pages[1:])]
        if start % PAGE and self.spare:
            pool.copy(cache.pages[self._first], [pages[self._first] for pages in self.pages[1:]])

    @property
    def depths(self):
        """Per node: 1 for those that follow the chain."""
        return [len(path) for path in self._to]

    def pages_with(self, path):
        """(the cache's pages with those of a path that begins with ``path`` in their place, whether they changed).

        Raises ValueError if there is no such path.
        """
        if path and (not 0 <= path[-1] < len(self._to) or self._to[path[-1]] != list(path)):
            raise ValueError(f"path: expected node numbers from the root down, got {list(path)}")
        way = self.ways[path[-1]][0] if path else 0
        own, taken = self.pages[0], self.pages[way][self._first :]
        if way == 0:
            return own, False
        replaced = own[self._first : self._first + len(taken)]
        self.spare = [page for page in self.spare if page not in taken] + replaced
        return own[: self._first] + taken + own[self._first + len(taken) :], True


def leaves_of(parents):
    return sorted(set(range(len(parents))) - set(parents))


def further_pages(start, chain, parents):
    """How many pages each path but the first takes, for a tree behind ``chain`` ids from position ``start`` on."""
    to = paths_to(parents)
    return [-(-(start + chain + len(to[leaf])) // PAGE) - start // PAGE for leaf in leaves_of(parents)[1:]]
