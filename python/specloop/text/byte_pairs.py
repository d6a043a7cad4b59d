"""Byte-pair encoding of words over a vocabulary that lies in packed arrays.

A word starts as its characters. Of all neighbours that the list of merges has, the pair that comes first in the list
(leftmost, if it is there more than once) becomes one token, until no pair is left (Sennrich et al. 2016,
arXiv 1508.07909). Here pairs wait in a heap, so a word of n characters takes O(n log n).

The ``tokenizers`` library does the same with hash tables, which take 11 MB for 49,000 tokens in each process. This
takes 2 MB: the tokens' text as it lies in the file, and the merges as sorted numbers.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ..errors import show
from ..formats.strings import Strings

_ID = (1 << 32) - 1


class BytePairs:
    """``tokens``: of all ids; ``ids``: the id of each token that a text may consist of; ``merges``: "left right", in
    order of precedence, and if one is there twice the later counts. ``whole_words``: a word that is a token is that
    token, whatever the merges say. Raises ValueError for a merge that is malformed.
    """

    def __init__(self, tokens: Sequence[str], ids: dict[str, int], merges: Sequence[str], *, whole_words=False):
        self._tokens = tokens if isinstance(tokens, Strings) else Strings.of(tokens)
        self._characters = {token: id for token, id in ids.items() if len(token) == 1}
        pairs, merged = array("q"), array("q")
        for rank, merge in enumerate(merges):
            left, right, both = _merge(merge, ids, rank)
            pairs.append(left << 32 | right)
            merged.append(rank << 32 | both)
        order = sorted(range(len(pairs)), key=pairs.__getitem__)  # stable: the later of equals comes later
        self._pairs = array("q", [pairs[i] for i in order])
        self._merged = array("q", [merged[i] for i in order])
        self._words = array("i", [ids[token] for token in sorted(ids)] if whole_words else [])  # ids, by their tokens

    def id_to_token(self, id: int) -> str:
        return self._tokens[id]

    def encode(self, word: str) -> tuple[int, ...]:
        """The word's ids. Characters that are no token are left out."""
        at = bisect_left(self._words, word, key=self.id_to_token)
        if at < len(self._words) and self.id_to_token(self._words[at]) == word:
            return (self._words[at],)
        ids: list[int | None] = [id for id in map(self._characters.get, word) if id is not None]
        n = len(ids)
        ids.append(None)  # behind the last, and where a token went into the one before it: nothing
        before, after = list(range(-1, n)), list(range(1, n + 2))
        heap: list[tuple] = []

        def offer(i):
            """Puts the pair that begins at ``i`` into the heap, if it can be merged."""
            left, right = ids[i], ids[after[i]]
            if right is not None:
                merged = self._merge_of(left << 32 | right)
                if merged is not None:
                    heapq.heappush(heap, (merged, i, left, right))

        for i in range(n - 1):
            offer(i)
        while heap:
            merged, i, left, right = heapq.heappop(heap)
            j = after[i]
            if ids[i] != left or ids[j] != right:
                continue  # one of the two has become part of another token
            ids[i], ids[j] = merged & _ID, None
            after[i] = after[j]
            before[after[j]] = i
            if i:
                offer(before[i])
            offer(i)
        return tuple(id for id in ids if id is not None)

    def _merge_of(self, pair: int) -> int | None:
        """Rank << 32 | id of what the pair becomes: of two merges the smaller number comes first."""
        at = bisect_right(self._pairs, pair) - 1
        return self._merged[at] if at >= 0 and self._pairs[at] == pair else None


def _merge(merge: str, ids: dict[str, int], rank: int) -> tuple[int, int, int]:
    """Ids of the two tokens of a merge and of the one that it makes."""
    left, space, right = merge.partition(" ")
    if not space or " " in right:
        raise ValueError(f"number {rank} is not two tokens with a space between: {show(merge)}")
    try:
        return ids[left], ids[right], ids[left + right]
    except KeyError as error:
        raise ValueError(f"number {rank}: {show(error.args[0])} is not a token") from None
