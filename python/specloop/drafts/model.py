"""A model as a draft: the greedy chain of a smaller model with the target's vocabulary.

Its cache holds a prefix of the committed ids and behind them what it guessed. What was committed since decides how much
of that stays: the longest common prefix. So an accepted guess is never computed twice, and whatever happens to the
cache (a fault, another version of the model) costs time only: what is missing is filled from the committed ids.
"""

from __future__ import annotations

from collections.abc import Sequence

CHUNK = 256  # ids per pass while reading what is missing


class ModelDraft:
    """``seat``: the draft model with a cache (versions.Seat). ``vocab_size``: of the target; ids beyond it are padding
    in one model or the other and are never proposed. ``max_tokens``: most per proposal.
    """

    name = "model"
    timely = True

    def __init__(self, seat, vocab_size: int, max_tokens: int = 8):
        self.seat, self.vocab_size, self.max_tokens = seat, vocab_size, max_tokens
        self._ids: list[int] = []  # committed
        self._held: list[int] = []  # what the cache holds, unless it was lost
        self._agreed = 0  # so many of these are committed

    def begin(self, ids: Sequence[int]) -> None:
        """Also reads the ids, all but the last: a long prompt takes time, which no proposal should."""
        self._ids, self._held, self._agreed = list(ids), [], 0
        if ids and self.outlook()[1]:
            with self.seat.lock:
                self._catch_up()

    def append(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)

    def outlook(self) -> tuple[int, int]:
        """No strength; as many tokens as its context has room for."""
        return 0, max(0, min(self.max_tokens, self.seat.capacity + 1 - len(self._ids)))

    def propose(self, k: int) -> list[int]:
        found, fed = [], self._ids[-1]
        with self.seat.lock:
            k = min(k, self.outlook()[1])  # asked again: in the meantime another version may have come, or none
            if k:
                self._catch_up()
            for _ in range(k):
                logits = self._feed([fed], last=1)
                fed = int(logits[0, : self.vocab_size].argmax())
                found.append(fed)
        return found

    def _catch_up(self):
        """Makes the cache hold all committed ids but the last."""
        ids, held = self._ids, self._held
        del held[self.seat.length :]  # the cache may have been lost
        same, most = min(self._agreed, len(held)), min(len(held), len(ids) - 1)
        while same < most and held[same] == ids[same]:
            same += 1
        del held[same:]
        self.seat.truncate(same)
        while same < len(ids) - 1:
            self._feed(ids[same : min(same + CHUNK, len(ids) - 1)], last=0)
            same = len(held)
        self._agreed = same

    def _feed(self, tokens, last):
        logits = self.seat.forward(tokens, self.seat, last=last)
        self._held += tokens
        return logits
