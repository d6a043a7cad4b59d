"""Disks that misbehave: functions to pass as ``pread``, and files to read."""

import ctypes
import errno
import mmap
import os
import random
import threading
import time
from typing import NamedTuple

import pytest
import torch

from specdec_kernels.stream import Reader, StreamError
from specdec_kernels.stream.files import pread


class OpenFile:
    """A file as a reader wants it: path, fd, size, check_unchanged()."""

    def __init__(self, path):
        self.path, self.fd = str(path), os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size

    def check_unchanged(self):
        pass

    def __del__(self):
        os.close(self.fd)


class Range(NamedTuple):
    file: int
    offset: int
    nbytes: int
    at: int


def write_bytes(path, nbytes, seed=0):
    """A file of random bytes; also returns them, as a tensor."""
    data = random.Random(seed).randbytes(nbytes)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def cached_bytes(file):
    """How many bytes of an open file are in the page cache (mincore)."""
    memory = mmap.mmap(file.fd, file.size, prot=mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
    pages = (ctypes.c_ubyte * -(-file.size // mmap.PAGESIZE))()
    anchor = (ctypes.c_char * 1).from_buffer(memory)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(file.size), pages) == 0
    finally:
        del anchor
        memory.close()
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


class Disk:
    """``pread`` with faults, which are drawn from a seed:

    short : most bytes that a read gives, at random from 1 on
    errors : {number of the read: errno}, counted from 0
    delay : seconds that each read takes longer, at random up to it
    ends : where every file ends
    """

    def __init__(self, *, short=None, errors=None, delay=0.0, ends=None, seed=0):
        self.short, self.errors, self.delay, self.ends = short, errors or {}, delay, ends
        self.reads = []  # (fd, offset, bytes)
        self._random, self._lock = random.Random(seed), threading.Lock()

    def __call__(self, fd, view, offset):
        with self._lock:
            number = self.errors.get(len(self.reads), 0)
            count = len(view) if self.short is None else min(len(view), self._random.randint(1, self.short))
            pause = self._random.uniform(0, self.delay)
            self.reads.append((fd, offset, count))
        if pause:
            time.sleep(pause)
        if number:
            raise OSError(number, os.strerror(number))
        if self.ends is not None:
            count = max(0, min(count, self.ends - offset))
        got = pread(fd, view, offset)  # whole: a direct read of part of a page would be refused
        count = min(got, count)
        view[count:got] = b"\xee" * (got - count)
        return count


def refuses_direct(number=errno.EINVAL):
    """A file system that opens files for direct reading and then does not read them."""

    def read(fd, view, offset):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return pread(fd, view, offset)

    return read


class Gate:
    """``pread`` that waits until it is opened; ``entered``: reads that came so far."""

    def __init__(self):
        self.entered, self._open, self._lock = 0, threading.Event(), threading.Lock()

    def open(self):
        self._open.set()

    def __call__(self, fd, view, offset):
        with self._lock:
            self.entered += 1
        self._open.wait(20)
        return pread(fd, view, offset)


def working(engine, folder):
    """The engine's name, for a test that needs it; skips where it does not work. "buffered" always does."""
    write_bytes(folder / "probe", 4096)
    try:
        Reader([OpenFile(folder / "probe")], engine=engine).close()
    except StreamError as error:
        assert engine != "buffered"
        pytest.skip(str(error))
    return engine


def model(folder):
    """A file of 5,000,003 bytes, and them."""
    data = write_bytes(folder / "model", 5_000_003)
    return OpenFile(folder / "model"), data


def whole(data, nbytes=None):
    return [Range(0, 0, data.numel() if nbytes is None else nbytes, 0)]


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def open_fds():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
