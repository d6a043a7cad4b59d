"""A pack that fits in memory, mapped: nothing is copied, and all processes that map it share one copy."""

import ctypes
from collections.abc import Mapping

import torch

from .. import native
from . import checks
from .errors import StreamError
from .pack import Pack


def map_pack(pack):
    """Maps the pack's file: a :class:`MappedPack`. Raises StreamError where mapping is not possible or not safe; read
    the blocks into memory then."""
    return MappedPack(checks.kind("pack", pack, Pack))


class MappedPack(Mapping):
    """Block index -> the block's views, on the CPU, in the mapped file.

    The memory is read-only: writing to a view ends the process. A file that is cut or damaged while it is mapped does
    not, but what was computed from it is wrong. So call ``check`` before a pass (nothing changed so far) and again
    after it, before its results are used.

    The file stays mapped as long as this object, or a view of it, lives; keep the pack open for ``check``.
    """

    def __init__(self, pack):
        if native.cpu is None:
            raise StreamError(f"{pack.path}: mapping a file needs the compiled module: {native.cpu_reason}")
        if len(pack.files) != 1 or any(len(block.ranges) != 1 for block in pack.blocks):
            raise StreamError(f"{pack.path}: only a pack of one file can be mapped, got blocks that are gathered")
        self.pack, (file,) = pack, pack.files
        pack.check_unchanged()
        try:
            self._mapping = native.cpu.Mapping(file.fd, file.size)
        except OSError as error:
            raise StreamError(f"{pack.path}: mapping {file.size} bytes failed: {error.strerror}") from error
        array = (ctypes.c_char * file.size).from_address(self._mapping.address)
        array.mapping = self._mapping  # a tensor keeps the array, the array keeps the mapping
        whole = torch.frombuffer(array, dtype=torch.uint8)
        places = [block.ranges[0] for block in pack.blocks]
        self._memory = [whole[place.offset : place.offset + place.nbytes] for place in places]
        self._views = [block.views(memory) for block, memory in zip(pack.blocks, self._memory, strict=True)]

    def check(self):
        """Raises StreamError if the file changed or if something that was read from it was not there."""
        native.cpu.guard_mappings()  # somebody may have put another handler in front
        self.pack.check_unchanged()
        if self._mapping.damaged:
            raise StreamError(f"{self.pack.path}: part of the mapped file could not be read; it was cut or is damaged")

    def memory(self, index):
        """All bytes of a block (uint8), as ``Pack.check_block`` takes them."""
        return self._memory[checks.index("index", index, len(self))]

    def load(self, index):
        """Brings a block into memory ahead of its first use; other Python threads go on meanwhile."""
        place = self.pack.blocks[checks.index("index", index, len(self))].ranges[0]
        self._mapping.load(place.offset, place.nbytes)

    def __getitem__(self, index):
        if not isinstance(index, int) or not 0 <= index < len(self._views):
            raise KeyError(index)
        return self._views[index]

    def __len__(self):
        return len(self._views)

    def __iter__(self):
        return iter(range(len(self._views)))

    def __repr__(self):
        return f"MappedPack({self.pack!r})"
