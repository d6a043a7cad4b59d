"""Page-locked host memory, which a device copies from by itself.

torch's own pinned memory comes in powers of two: 2.3 GB lock 4. Here whole blocks lie one behind the other in memory
of exactly their size, which is registered in segments, since some systems refuse large ones. A copy stays within a
segment. Where registering is refused, everything is undone, and a small ring of page-locked pieces has to do (Ring).
"""

import ctypes
import os
import weakref

from .device import PinError
from .memory import PAGE, aligned_empty

SEGMENT = 256 << 20
PIECE, PIECES = 4 << 20, 4  # of a ring: a copy of 4 MB comes near the speed of the link


class Arena:
    """``nbytes`` of page-locked memory, handed out by ``empty``. Raises PinError, and then nothing is locked."""

    name = "pinned"
    later = True  # a copy reads its source when the device comes to it

    def __init__(self, device, nbytes, segment=SEGMENT):
        self._device, self._segment, self._at = device, segment, 0
        self._memory = aligned_empty(-(-nbytes // PAGE) * PAGE)
        self._base, self.locked, registered = self._memory.data_ptr(), 0, []
        try:
            for start in range(0, self._memory.nbytes, segment):
                size = min(segment, self._memory.nbytes - start)
                if device.register(self._base + start, size):
                    registered.append(self._base + start)
                self.locked += size
        except PinError:
            _unregister(device, registered, self._memory, os.getpid())
            device.clear_error()
            raise
        self._shut = weakref.finalize(self, _unregister, device, registered, self._memory, os.getpid())

    def empty(self, nbytes):
        """uint8 [nbytes] on a page."""
        memory = self._memory[self._at : self._at + nbytes]
        if memory.nbytes < nbytes:
            raise ValueError(f"nbytes: expected at most {memory.nbytes}, what is left, got {nbytes}")
        self._at += -(-nbytes // PAGE) * PAGE
        return memory

    def takes(self, memory):
        return self._base <= memory.data_ptr() < self._base + self._memory.nbytes

    def copy(self, target, source, stream):
        """Queues a copy of ``source``, a piece of this memory that stays as it is until the copy is done."""
        at, done = source.data_ptr() - self._base, 0
        while done < source.nbytes:
            size = min(source.nbytes - done, self._segment - (at + done) % self._segment)
            self._device.copy(target[done : done + size], source[done : done + size], stream)
            done += size

    def close(self):
        """Unlocks the memory. Nothing may be copying from it."""
        self._shut()
        self.locked = 0


def _unregister(device, addresses, memory, pid):
    """``memory`` is an argument so that it is there for as long as it is registered."""
    for address in addresses if os.getpid() == pid else ():  # a forked child has no device
        device.unregister(address)


class Ring:
    """Page-locked pieces through which ordinary memory goes to a device. Raises PinError. One thread's."""

    name, later = "ring", False

    def __init__(self, device, piece=PIECE, pieces=PIECES):
        self._device, self._arena = device, Arena(device, piece * pieces)
        self._pieces = [self._arena.empty(piece) for _ in range(pieces)]
        self._copied, self._next = [None] * pieces, 0  # per piece: the event behind the copy from it

    @property
    def locked(self):
        return self._arena.locked

    def takes(self, memory):
        return True

    def copy(self, target, source, stream):
        """Copies ``source``, which is free when this returns. Waits until pieces are free."""
        size = self._pieces[0].nbytes
        for start in range(0, source.nbytes, size):
            i = self._next
            self._next = (i + 1) % len(self._pieces)
            if self._copied[i] is not None:
                self._device.finish(self._copied[i])
            part = source[start : start + size]
            # Not torch's copy: in this thread it would start threads of its own.
            ctypes.memmove(self._pieces[i].data_ptr(), part.data_ptr(), part.nbytes)
            self._arena.copy(target[start : start + part.nbytes], self._pieces[i][: part.nbytes], stream)
            self._copied[i] = self._device.record(stream)

    def close(self):
        self._arena.close()


class Pageable:
    """Ordinary memory without any help: the driver copies it piece by piece, and the thread waits."""

    name, later, locked = "pageable", False, 0

    def __init__(self, device):
        self.copy = device.copy

    def takes(self, memory):
        return True

    def close(self):
        pass
