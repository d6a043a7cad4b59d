"""The two ways of making one guess after another: any model's, by rows of logits, and in compiled code.

Both pick the same tokens. ``pick()`` gives the next one's column, -1 where the logits have a NaN or no candidate;
``probability``, the softmax of the raw logits there; ``follow(found)`` makes the pass over what was found so far;
``passes`` counts the ids that this has put into the cache beyond what the draft knows of; ``end()`` is called behind
the last pick.
"""

from __future__ import annotations

import math


class ByRows:
    """``row``: logits behind the committed ids; ``next_row(found)``: behind these guesses, too. ``draw(row, i)``: the
    column of guess number ``i``; None = the likeliest.
    """

    passes = 0

    def __init__(self, row, next_row, draw):
        self._row, self._next, self._draw, self._made = row, next_row, draw, 0

    def pick(self):
        self._column = _best(self._row) if self._draw is None else self._draw(self._row, self._made)
        self._made += 1
        return self._column

    @property
    def probability(self):
        sure = float(self._row.float().softmax(-1)[self._column])
        return 1.0 if math.isnan(sure) else sure  # a row with +inf

    def follow(self, found):
        self._row = self._next(found)

    def end(self):
        pass


class Compiled:
    """``guesses``: a specdec_kernels.guesses.Guesses whose chain has begun."""

    def __init__(self, guesses):
        self._guesses, self.pick, self.passes = guesses, guesses.pick, 0

    @property
    def probability(self):
        return self._guesses.probability

    def follow(self, found):
        self._guesses.follow()
        self.passes += 1

    def end(self):
        self._guesses.end()


def _best(row):
    """The likeliest column; -1 if the row has a NaN, or nothing above -inf."""
    best = int(row.argmax())
    return best if float(row[best]) > -math.inf else -1  # which a NaN is not
