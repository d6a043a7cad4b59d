"""Many strings in one piece of memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class Strings(Sequence):
    """An array of strings, held as one piece of memory: a tenth of what a vocabulary's list of str would take."""

    def __init__(self, packed, ends):
        self.packed, self.ends = packed, ends  # UTF-8 of all, and where each one ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        packed, ends = bytearray(), array("q")
        for string in strings:
            packed += string.encode()
            ends.append(len(packed))
        return cls(bytes(packed), ends)

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        if index < 0:
            index += len(self)
        start = self.ends[index - 1] if index > 0 else 0
        return self.packed[start : self.ends[index]].decode()

    def __iter__(self):
        packed, start = self.packed, 0
        for end in self.ends:
            yield packed[start:end].decode()
            start = end

    def __eq__(self, other):
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None

    def __repr__(self):
        return repr(self[:])
