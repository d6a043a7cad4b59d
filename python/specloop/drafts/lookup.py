"""Lookup draft: what followed the last time that the text ended like this?

A suffix automaton (Blumer et al. 1985) over prompt and output, extended by one state, or two, per committed id. A state
stands for all substrings that end at the same set of positions; its suffix link leads to the longest suffix that also
ends elsewhere. So after each id the link of the newest state *is* the longest suffix of the text that occurred before,
and no search is needed. Each state remembers where its strings ended last; appending an id walks up the links to write
that down.

That walk is what amortisation does not cover: "aaaa..." nests as deep as it is long. It stops after ``DEPTH`` links;
what lies above are short suffixes of a text that repeats in ``DEPTH`` nested ways, which then point to an earlier
occurrence than the last one. So an id costs O(DEPTH) at worst, a few microseconds as a rule.

Memory: at most 2 states per id, each with a small dict and three integers; 450 to 660 bytes per id were measured, so
about 1 MB for 2048 ids. All of it belongs to one request; nothing is shared with or left to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

DEPTH = 64
BYTES_PER_ID = 560


class LookupDraft:
    """Proposes the continuation of the most recent occurrence of the longest suffix that the text has seen before."""

    name = "lookup"
    timely = True

    def __init__(self, min_match: int = 2, max_tokens: int = 8):
        self.min_match = min_match
        self.max_tokens = max_tokens
        self.begin(())

    def begin(self, ids: Sequence[int]) -> None:
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # state -> {id: state}
        self._link = [-1]
        self._length = [0]  # of the state's longest string
        self._end = [-1]  # where the state's strings ended last
        self._newest = 0
        self.match_length = 0
        self.match_end = -1  # position of the last id of the earlier occurrence
        self.append(ids)

    @property
    def index_nbytes(self) -> int:
        """About so many bytes of memory."""
        return BYTES_PER_ID * len(self._text)

    def append(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._extend(token)

    def outlook(self) -> tuple[int, int]:
        """At most two tokens per id of the match; how many of them pay is the controller's business."""
        if self.match_length < self.min_match:
            return 0, 0
        return self.match_length, min(2 * self.match_length, self.max_tokens)

    def propose(self, k: int) -> list[int]:
        k = min(k, self.outlook()[1])
        start = self.match_end + 1
        found = self._text[start : start + k]
        while len(found) < k:  # the occurrence runs into the present: the text repeats itself, and so does the guess
            found.append(found[len(found) - (len(self._text) - start)])
        return found

    def _extend(self, token: int) -> None:
        following, link, length, end = self._next, self._link, self._length, self._end
        here = len(self._text)
        self._text.append(token)
        new = len(link)
        following.append({})
        link.append(0)
        length.append(here + 1)
        end.append(here)

        state = self._newest
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            target = following[state][token]
            if length[target] != length[state] + 1:
                target = self._split(state, token, target)
            link[new] = target
        self._newest = new

        state = link[new]
        self.match_length, self.match_end = length[state], end[state]
        for _ in range(DEPTH):
            if state <= 0:
                break
            end[state] = here
            state = link[state]

    def _split(self, state: int, token: int, target: int) -> int:
        """The strings of ``target`` up to ``state`` + ``token`` now end at one more place: they get their own state."""
        clone = len(self._link)
        self._next.append(dict(self._next[target]))
        self._link.append(self._link[target])
        self._length.append(self._length[state] + 1)
        self._end.append(self._end[target])
        self._link[target] = clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone
