"""A chain of guesses in compiled code: the pass of a small decoder over one row, again and again.

A draft model's pass takes a few hundred microseconds, and what Python does between two of them half as long. So a pass
is recorded (recording.py) together with what comes before it, the token that was picked taking its place in the
buffers, and with what comes behind it, the next token being picked from the logits: then a guess is one call.
"""

import math

import torch

from . import native, validate
from .recording import record

MOST = 2**31 - 1  # of top_k


class Guesses:
    """Passes over one row on buffers that never move, on a CPU.

    Args:
        run: makes the pass: from ``id`` and its place to ``logits``, with operations of this library alone.
        logits: f32 [1, V']. ``columns``: so many of them may be picked. ``ids``: int32 [columns], the ids that they
            stand for; None = they are ids.
        id, position, slot: int64 [1]; length: int32 [1], of the cache with the row in it; table: int32 [1, P], its
            pages, of ``page`` tokens each: the numbers that the pass reads.
        rotary: f32 [context, R], cosines and sines by position; turned: f32 [1, R], those of the row.
        state, feature: f32 [1, d], for a model that reads its own last hidden state, rounded to bfloat16, beside the
            id: where the pass leaves it, and where it reads it. None = it reads none.

    A chain begins with a pass that was made elsewhere, over any rows: ``begin``, ``pick``, and then ``follow`` and
    ``pick`` by turns.
    """

    def __init__(
        self, run, *, logits, columns, ids, id, position, slot, length, table, page, rotary, turned, state=None,
        feature=None,
    ):  # fmt: skip
        one = lambda name, tensor, dtype: validate.vector(name, tensor, (dtype,), 1, torch.device("cpu"))
        one("id", id, torch.int64), one("position", position, torch.int64), one("slot", slot, torch.int64)
        one("length", length, torch.int32)
        row = lambda name, tensor, dtype=torch.float32: _row(name, tensor, dtype)
        row("logits", logits), row("table", table, torch.int32), row("turned", turned)
        if not 1 <= columns <= logits.shape[1]:
            raise ValueError(f"columns: expected 1 to {logits.shape[1]}, got {columns}")
        if ids is not None:
            validate.vector("ids", ids, (torch.int32,), columns, logits.device)
        validate.tensor("rotary", rotary, (torch.float32,), 2, logits.device)
        if rotary.shape[1] != turned.shape[1] or not rotary.is_contiguous():
            raise ValueError(f"rotary: expected contiguous rows of {turned.shape[1]}, got {list(rotary.shape)}")
        wide = [0 if tensor is None else row(name, tensor) for name, tensor in (("state", state), ("feature", feature))]
        if wide[0] != wide[1]:
            raise ValueError(f"feature: expected {wide[0]} values, as many as state has, got {wide[1]}")
        self.hidden, self.columns = 0 if state is None else state.shape[1], columns
        address = lambda tensor: 0 if tensor is None else tensor.data_ptr()
        self._native = native.cpu.Guesses(
            address(logits), columns, address(ids), address(id), address(position), address(slot), address(length),
            address(table), table.shape[1], page, address(rotary), address(turned), *rotary.shape, address(state),
            address(feature), self.hidden,
        )  # fmt: skip
        self.logits, self._run, self._recording, self._threads = logits, run, None, native.threads()
        self._chain, self._room, self._picked = None, None, True  # no chain yet
        self._kept = ids, id, position, slot, length, table, rotary, turned, state, feature

    @property
    def is_complete(self):
        """False once a pass had a step that can't be made again."""
        return self._recording is None or self._recording.complete

    def begin(
        self, last, capacity, features=None, *, rows=None, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0,
        position=0,
    ):  # fmt: skip
        """``logits`` are of position ``last``, whose feature is in ``features``, bf16 [capacity, d]; passes may go on
        to position ``capacity`` - 1. With a temperature above 0 tokens are drawn as by :func:`specdec_kernels.sample`
        with stream 0 and these numbers, and their logits copied to ``rows``, f32 [n, columns], one after the other.
        """
        if self.hidden:
            validate.tensor("features", features, (torch.bfloat16,), 2, torch.device("cpu"))
            if features.shape[1] != self.hidden or features.shape[0] < capacity or not features.is_contiguous():
                raise ValueError(f"features: expected [{capacity}, {self.hidden}], got {list(features.shape)}")
        if not 0 <= last < capacity:
            raise ValueError(f"last: expected 0 to {capacity - 1}, got {last}")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature: expected a number of at least 0, got {temperature}")
        self._room = None
        if temperature > 0:
            validate.tensor("rows", rows, (torch.float32,), 2, torch.device("cpu"))
            if rows.shape[1] != self.columns or not rows.is_contiguous():
                raise ValueError(f"rows: expected rows of {self.columns}, got {list(rows.shape)}")
            self._room = rows.shape[0]
        self._chain = features, rows
        self._native.begin(
            last, capacity, features.data_ptr() if self.hidden else 0, temperature, max(0, min(top_k, MOST)), top_p,
            min_p, seed & (1 << 64) - 1, position, rows.data_ptr() if self._room is not None else 0,
        )  # fmt: skip
        self._picked = False

    def end(self):
        """Lets go of what the chain was given."""
        self._native.begin(0, 0, 0, 0.0, 0, 1.0, 0.0, 0, 0, 0)
        self._chain, self._room, self._picked = None, None, True

    def pick(self):
        """The next token's column; -1 where the logits have a NaN, or no candidate."""
        if not self._picked:
            self._take_room()
            self._native.pick(self._threads)
            self._picked = True
        return self._native.column

    @property
    def probability(self):
        """Of the token that was picked, by the softmax of the raw logits; at temperature 0."""
        return self._native.probability

    def follow(self):
        """Makes the pass over the token that was picked, and picks the next one."""
        self._take_room()
        if self._recording is not None:
            self._recording.run()
            return
        native_, threads = self._native, self._threads
        with record() as recording:
            program = recording.program
            native_.feed(program), native_.feed()
            self._run()
            native_.keep(program), native_.keep()
            native_.pick(threads, program), native_.pick(threads)
        self._recording = recording

    def _take_room(self):
        if self._room is not None:
            self._room -= 1
            if self._room < 0:
                raise ValueError("rows: expected one for each token that is drawn")


def _row(name, tensor, dtype):
    """Refuses anything but [1, n] in one piece; returns n."""
    validate.tensor(name, tensor, (dtype,), 2, torch.device("cpu"))
    if tensor.shape[0] != 1 or tensor.stride(1) != 1:
        raise ValueError(f"{name}: expected one row in one piece, got {list(tensor.shape)}")
    return tensor.shape[1]
