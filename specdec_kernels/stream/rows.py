"""Single rows of a matrix, read from the file: an embedding need not be in memory to be looked up."""

import itertools

import torch

from ..int8_weight import PANEL, Int8Weight
from ..validate import output, tensor

CHUNK = 64  # panels or rows that are read before they are expanded


class Rows:
    """The rows of a matrix that consists of parts, one below the other."""

    def __init__(self, name, parts, read):
        """``parts``: pairs (block, part); ``read(block, at, memory)`` fills memory from the block's byte at on."""
        self.name, self.parts, self.read = name, parts, read
        self.starts = list(itertools.accumulate((part.shape[0] for _, part in parts), initial=0))
        self.shape = (self.starts[-1], parts[0][1].shape[1])

    def write(self, ids, out):
        """out[i] = row ids[i] in f32; returns how many bytes were read."""
        tensor("ids", ids, (torch.int64,), ndim=1)
        numbers = ids.tolist()
        n, k = self.shape
        wrong = [i for i in numbers if not 0 <= i < n]
        if wrong:
            raise ValueError(f"ids: expected row numbers in 0..{n - 1} of {self.name}, got {wrong[0]}")
        output("out", out, torch.float32, (len(numbers), k), out.device)
        done = 0
        for (block, part), start, stop in zip(self.parts, self.starts, self.starts[1:], strict=False):
            places = [place for place, i in enumerate(numbers) if start <= i < stop]
            if places:
                one = self._int8 if part.kind == "int8" else self._floats
                values = torch.empty(len(places), k)
                done += one(block, part, [numbers[place] - start for place in places], values)
                out[torch.tensor(places, device=out.device)] = values.to(out.device)
        return done

    def _int8(self, block, part, ids, values):
        """By panels: sixteen rows lie together. A row's values depend on its panel alone, so a few panels do."""
        codes, scale = part.pieces
        steps, groups = codes.shape[1], scale.shape[1]
        memory = [torch.empty(CHUNK, steps * 64, dtype=torch.uint8), torch.empty(CHUNK, groups * 64, dtype=torch.uint8)]
        read = 0
        for at, chunk in _chunks(ids, lambda i: i // PANEL):
            for place, panel in enumerate(chunk):
                for piece, rows in zip((codes, scale), memory, strict=True):
                    self.read(block, piece.at + panel * rows.shape[1], rows[place])
                    read += rows.shape[1]
            count = len(chunk)
            matrix = Int8Weight(
                count * PANEL,
                part.shape[1],
                part.group_size,
                memory[0][:count].view(count, steps, 16, 4),
                memory[1][:count].view(torch.float32).view(count, groups, 16),
                part.rotated,
            )
            here = torch.tensor([chunk[i // PANEL] * PANEL + i % PANEL for i in ids[at]])
            values[at] = matrix.rows(here)
        return read

    def _floats(self, block, part, ids, values):
        piece = part.pieces[0]
        size = part.shape[1] * piece.dtype.itemsize
        memory = torch.empty(CHUNK, size, dtype=torch.uint8)
        read = 0
        for at, chunk in _chunks(ids, lambda i: i):
            for place, row in enumerate(chunk):
                self.read(block, piece.at + row * size, memory[place])
                read += size
            values[at] = memory.view(piece.dtype)[[chunk[i] for i in ids[at]]].float()
        return read


def _chunks(ids, unit):
    """Runs of ids that need at most CHUNK different units: (slice, {unit: its place})."""
    start, places = 0, {}
    for stop, i in enumerate(ids):
        if unit(i) not in places:
            if len(places) == CHUNK:
                yield slice(start, stop), places
                start, places = stop, {}
            places[unit(i)] = len(places)
    if places:
        yield slice(start, len(ids)), places
