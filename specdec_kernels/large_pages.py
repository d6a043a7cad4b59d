"""Memory in large pages for what is read front to back, again and again.

A pass over the weights touches every page of them once, and finding a page of 4 KB costs more than reading it when its
entry is in no cache: one thread reads 1.5 times as fast from pages of 2 MB (Zen 4 in a virtual machine). Linux gives
them to whoever asks (``madvise``, the usual setting). Weights smaller than such a page have to lie together to profit.
"""

import contextlib
import mmap
import threading

import torch

LARGE = 2 << 20
CHUNK = 16 * LARGE
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # where there is none, the memory is plain


class LargePages:
    """Hands out pieces of memory that lie one after the other, in large pages where the system has them.

    A page counts as used when its first byte is written, so a started page costs up to 2 MB. The memory lives as long
    as a tensor in it, or this object, does. ``nbytes``: what is expected to be asked for in all, if that is known, each
    piece rounded up to 64 bytes: then nothing is left over at the end of a stretch.
    """

    def __init__(self, nbytes=CHUNK):
        self._memory, self._at, self._end = None, 0, 0
        self._stretch = max(nbytes, 1)
        self._one_at_a_time = threading.Lock()

    def empty(self, shape, dtype):
        """An uninitialised CPU tensor on a cache line, with a storage of its own."""
        if any(n < 0 for n in shape):
            raise ValueError(f"shape: expected sizes >= 0, got {list(shape)}")
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        with self._one_at_a_time:
            if self._at + size > self._end:
                self._map(max(size, self._stretch))
                self._stretch = CHUNK
            tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._at)
            self._at += (size + 63) // 64 * 64
        return tensor.view(shape)

    def _map(self, size):
        self._memory, self._at = map_large(size)
        self._end = self._at + size


def map_large(size):
    """(memory, start): a private mapping of ``size`` bytes from ``start`` on, in large pages if it has room for one."""
    slack = LARGE if size >= LARGE else 0
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, size + slack, **private)
    if not slack:
        return memory, 0
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE
    if _ADVICE is not None:
        with contextlib.suppress(OSError):  # a kernel without large pages
            memory.madvise(_ADVICE, start, size // LARGE * LARGE)
    return memory, start
