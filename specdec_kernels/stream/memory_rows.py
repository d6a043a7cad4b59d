"""Rows of a matrix whose parts are all in memory: the same bits as from the file (rows.py), without reading it."""

import itertools

import torch

from ..int8_weight import Int8Weight
from ..native import not_recordable
from ..validate import output, tensor


class MemoryRows:
    """``parts``: Int8Weight or float matrices, one below the other."""

    def __init__(self, parts):
        self._parts = parts
        self._starts = list(itertools.accumulate((part.shape[0] for part in parts), initial=0))

    def write(self, ids, out):
        """out[i] = row ids[i] in f32."""
        if len(self._parts) == 1 and isinstance(self._parts[0], Int8Weight):  # which checks the same
            _rows(self._parts[0], ids, out)
            return
        not_recordable("which part of the rows is read depends on the ids")
        tensor("ids", ids, (torch.int64,), ndim=1)
        output("out", out, torch.float32, (ids.shape[0], self._parts[0].shape[1]), out.device)
        numbers, n = ids.tolist(), self._starts[-1]
        wrong = [i for i in numbers if not 0 <= i < n]
        if wrong:
            raise ValueError(f"ids: expected row numbers in 0..{n - 1}, got {wrong[0]}")
        for part, start, stop in zip(self._parts, self._starts, self._starts[1:], strict=False):
            places = [place for place, i in enumerate(numbers) if start <= i < stop]
            if len(places) == len(numbers):
                _rows(part, ids - start, out)
                return
            if places:
                places = torch.tensor(places, device=out.device)
                values = out.new_empty(len(places), out.shape[1])
                _rows(part, ids[places] - start, values)
                out[places] = values


def _rows(part, ids, out):
    if isinstance(part, Int8Weight):
        part.rows(ids, out=out)
    else:
        out.copy_(part[ids])
