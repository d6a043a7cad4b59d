"""Tensors fenced by pages that may not be touched: one byte read or written too far ends the test run with SIGSEGV."""

import ctypes
import mmap

import torch

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NONE, _READ_WRITE = 0, 3
_PRIVATE_ANONYMOUS = 0x02 | 0x20
_NORESERVE = 0x4000


class _Pages:
    """Zeroed pages between two forbidden ones; only those that are touched take memory."""

    def __init__(self, size):
        self.size = -(-max(size, 1) // PAGE) * PAGE
        self.base = _libc.mmap(None, self.size + 2 * PAGE, _NONE, _PRIVATE_ANONYMOUS | _NORESERVE, -1, 0)
        assert self.base not in (None, ctypes.c_void_p(-1).value), f"mmap failed: errno {ctypes.get_errno()}"
        self.start = self.base + PAGE
        assert _libc.mprotect(self.start, self.size, _READ_WRITE) == 0

    def __del__(self):
        _libc.munmap(self.base, self.size + 2 * PAGE)


def guarded(shape, dtype, *, row_stride=None, at="end"):
    """A zeroed tensor whose last byte lies before a forbidden page (``at="end"``) or whose first byte behind one.

    ``row_stride``: elements from row to row (the last dimension is a row); None = contiguous.
    """
    count = 1
    for size in shape[:-1]:
        count *= size
    step = shape[-1] if row_stride is None else row_stride
    elements = (count - 1) * step + shape[-1] if count and shape[-1] else 0
    if elements == 0:
        return torch.zeros(shape, dtype=dtype)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    size = elements * itemsize
    pages = _Pages(size)
    address = pages.start + (pages.size - size if at == "end" else 0)
    buffer = (ctypes.c_char * size).from_address(address)
    buffer.pages = pages  # the tensor keeps the buffer, the buffer keeps the pages
    flat = torch.frombuffer(buffer, dtype=dtype)
    strides = []
    for n in reversed(shape[:-1]):
        strides.insert(0, step)
        step *= n
    return flat.as_strided(shape, (*strides, 1))


def guarded_like(value, *, at="end"):
    """A fenced contiguous copy of ``value``."""
    return guarded(tuple(value.shape), value.dtype, at=at).copy_(value)
