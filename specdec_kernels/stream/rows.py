"""Single rows of a matrix, read from the file: an embedding need not be in memory to be looked up."""

import itertools

import torch

from .. import native
from ..int8_weight import PANEL, Int8Weight
from ..validate import output, tensor
from .buffers import view_of

CHUNK = 64  # panels or rows that are read before they are expanded


class Rows:
    """The rows of a matrix that consists of parts, one below the other."""

    def __init__(self, name, parts, read):
        """``parts``: pairs (block, part); ``read(block, at, view)`` fills a view from the block's byte ``at`` on."""
        self.name, self.parts, self.read = name, parts, read
        self.starts = list(itertools.accumulate((part.shape[0] for _, part in parts), initial=0))
        self.shape = (self.starts[-1], parts[0][1].shape[1])

    def write(self, ids, out):
        """out[i] = row ids[i] in f32; returns how many bytes were read."""
        native.not_recordable("rows were read from a file")
        tensor("ids", ids, (torch.int64,), ndim=1)
        tensor("out", out, (torch.float32,))
        output("out", out, torch.float32, (ids.shape[0], self.shape[1]), out.device)
        numbers = ids.tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < self.shape[0]:
            wrong = next(i for i in numbers if not 0 <= i < self.shape[0])
            raise ValueError(f"ids: expected row numbers in 0..{self.shape[0] - 1} of {self.name}, got {wrong}")
        if len(self.parts) == 1 and out.device.type == "cpu":
            return self._part(*self.parts[0], numbers, out)
        done = 0
        for (block, part), start, stop in zip(self.parts, self.starts, self.starts[1:], strict=False):
            places = [place for place, i in enumerate(numbers) if start <= i < stop]
            if places:
                values = torch.empty(len(places), self.shape[1])
                done += self._part(block, part, [numbers[place] - start for place in places], values)
                out[torch.tensor(places, device=out.device)] = values.to(out.device)
        return done

    def _part(self, block, part, ids, values):
        return (self._int8 if part.kind == "int8" else self._floats)(block, part, ids, values)

    def _int8(self, block, part, ids, values):
        """By panels: sixteen rows lie together. A row's values depend on its panel alone, so a few panels do."""
        codes, scale = part.pieces
        steps, groups = codes.shape[1], scale.shape[1]
        read = 0
        for start, stop, panels in _chunks([i // PANEL for i in ids]):
            count = len(panels)
            some = torch.empty(count, steps, 16, 4, dtype=torch.uint8), torch.empty(count, groups, 16)
            for piece, memory in zip(part.pieces, some, strict=True):
                read += self._pieces(block, piece.at, panels, memory)
            matrix = Int8Weight(count * PANEL, part.shape[1], part.group_size, *some, part.rotated)
            here = torch.tensor([panels[i // PANEL] * PANEL + i % PANEL for i in ids[start:stop]])
            matrix.rows(here, out=values[start:stop])
        return read

    def _floats(self, block, part, ids, values):
        (piece,) = part.pieces
        read = 0
        for start, stop, rows in _chunks(ids):
            memory = torch.empty(len(rows), part.shape[1], dtype=piece.dtype)
            read += self._pieces(block, piece.at, rows, memory)
            values[start:stop] = memory[[rows[i] for i in ids[start:stop]]]
        return read

    def _pieces(self, block, at, places, memory):
        """memory[places[i]] = element i of the array that begins ``at``, for all i in places."""
        size = memory.nbytes // memory.shape[0]
        view = view_of(memory)
        for i, place in places.items():
            self.read(block, at + i * size, view[place * size : (place + 1) * size])
        return memory.nbytes


def _chunks(keys):
    """Runs of keys with at most CHUNK different ones: (start, stop, {key: its place among them})."""
    start, places = 0, {}
    for stop, key in enumerate(keys):
        if key not in places:
            if len(places) == CHUNK:
                yield start, stop, places
                start, places = stop, {}
            places[key] = len(places)
    if places:
        yield start, len(keys), places
