"""A block: what a pass needs at one point, in one piece of memory. It is read as a whole and used in place."""

from typing import NamedTuple

import torch

from ..int8_weight import Int8Weight
from ..validate import tensor

ALIGNMENT = 4096  # of blocks in a file and in memory: what reading past the page cache asks for
PART_ALIGNMENT = 64  # of parts in a block: a cache line


def up(n, multiple):
    return -(-n // multiple) * multiple


class Range(NamedTuple):
    """``nbytes`` bytes of ``pack.files[file]`` from ``offset`` on, which belong at ``at`` in the block's memory."""

    file: int
    offset: int
    nbytes: int
    at: int


class Piece(NamedTuple):
    """A tensor in the block's memory."""

    at: int
    dtype: torch.dtype
    shape: tuple

    @property
    def nbytes(self):
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory):
        return memory[self.at : self.at + self.nbytes].view(self.dtype).view(self.shape)


class Part(NamedTuple):
    """One weight of a block. ``shape``: logical; an int8 matrix consists of two pieces, codes and scale."""

    name: str
    kind: str  # "tensor" or "int8"
    shape: tuple
    pieces: tuple
    group_size: int | None = None
    rotated: bool = False

    @property
    def dtype(self):
        """Of the stored values: torch.int8 for an int8 matrix."""
        return torch.int8 if self.kind == "int8" else self.pieces[0].dtype

    @property
    def nbytes(self):
        return sum(piece.nbytes for piece in self.pieces)

    def view(self, memory):
        if self.kind == "tensor":
            return self.pieces[0].view(memory)
        codes, scale = (piece.view(memory) for piece in self.pieces)
        return Int8Weight(*self.shape, self.group_size, codes, scale, self.rotated)


class Block:
    """``nbytes`` is a multiple of 4096; ``ranges`` say what to read; ``crc32`` is that of all bytes, or None."""

    def __init__(self, index, name, nbytes, ranges, parts, crc32=None):
        self.index, self.name, self.nbytes = index, name, nbytes
        self.ranges, self.parts, self.crc32 = tuple(ranges), {part.name: part for part in parts}, crc32

    def views(self, memory):
        """The parts by name, a Tensor or an Int8Weight each, in memory that holds the block: nothing is copied.

        ``memory`` is uint8, one-dimensional, contiguous, at least ``nbytes`` long, on any device.
        """
        tensor("memory", memory, (torch.uint8,), ndim=1)
        if memory.numel() < self.nbytes or not memory.is_contiguous():
            raise ValueError(f"memory: expected {self.nbytes} contiguous bytes, got {memory.numel()}")
        if memory.data_ptr() % PART_ALIGNMENT:
            raise ValueError(f"memory: expected an address on {PART_ALIGNMENT} bytes, got {memory.data_ptr():#x}")
        if memory.storage_offset() % PART_ALIGNMENT:
            raise ValueError(f"memory: expected to start at a multiple of {PART_ALIGNMENT} in its storage")
        return {name: part.view(memory) for name, part in self.parts.items()}

    def __repr__(self):
        return f"Block({self.index}, {self.name!r}, {self.nbytes} bytes, parts: {', '.join(self.parts)})"
