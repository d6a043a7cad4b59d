"""Reads ranges of files into memory, ahead of whoever uses them.

What is submitted is cut into pieces, and the pieces of everything wait in one queue: the disk has reads of the next
block while the last of this one are on their way. Three engines do the reading, tried in this order and told once to
the log ``specdec_kernels.stream``:

io_uring   the kernel's queue of reads, past the page cache (csrc/cpu/uring.h); containers often forbid it
direct     threads with ``preadv``, past the page cache; needs a file system that can
buffered   threads through the page cache, which drop behind them what they read

Reading past the page cache leaves it to others, saves a copy, and makes the memory used a constant.
"""

import logging
import os
import threading
import time
import weakref

import torch

from .. import native
from ..validate import integer
from . import checks
from .batch import Piece
from .errors import StreamError
from .files import pread as read_at
from .limits import parse_bytes
from .memory import PAGE, aligned_empty
from .preads import Preads

log = logging.getLogger("specdec_kernels.stream")

ENGINES = ("io_uring", "direct", "buffered")
PIECES = {"io_uring": 2 << 20, "direct": 2 << 20, "buffered": 4 << 20}  # bytes of one read
# Reads under way at once. A disk that has many works on all of them, and then the blocks of all slots arrive together:
# while they are used nothing is read. About 6 MB suffice for the full rate, and blocks arrive one after the other.
THREADS = {"direct": 3, "buffered": 1}  # the page cache reads ahead by itself, for one reader at a time
DEPTH = 3  # of io_uring
LEAST = 64 << 10  # bytes of a piece under a limit
SIGNALS = 0.1  # seconds; a wait that is longer looks for signals so often
SLICE = 0.01  # seconds of a limit that one piece may take


class Reader:
    """Reads ``files`` (objects with path, fd, size and check_unchanged(); fd is for buffered reading).

    engine : "auto", or one of ENGINES, which is then used or refused, never replaced (StreamError)
    threads : of the engines direct and buffered
    depth : reads that io_uring has under way
    limit : bytes per second ("500MB", a number) that reading may take at most
    piece : bytes of one read, a multiple of 4096
    pread : ``pread(fd, view, offset) -> count`` in place of the system's, for tests; then without io_uring

    Use as a context manager. All methods may be called from several threads at once. After a fork the child can't use
    it (StreamError), the parent goes on.
    """

    def __init__(self, files, *, engine="auto", threads=None, limit=None, depth=None, piece=None, pread=None):
        if engine not in ("auto", *ENGINES):
            raise ValueError(f"engine: expected auto, {', '.join(ENGINES)}, got {engine!r}")
        self._threads = None if threads is None else _count("threads", threads, 256)
        self._depth = DEPTH if depth is None else _count("depth", depth, 1024)
        self._limit = None if limit is None else parse_bytes(limit, "limit")
        if piece is not None:
            _check_piece(piece)
        self._pread, self._pid = checks.function("pread", pread), os.getpid()
        self.files = _files(files)
        self._descriptors = Descriptors(self.files)
        self._busy = {}  # batch -> the memory that may still be written to
        try:
            self.engine, self._reads = self._choose(engine)
        except BaseException:
            self._descriptors.close()
            raise
        self._piece = _under(self._limit, PIECES[self.engine] if piece is None else piece)
        self._before, self._counted = self._reads.counters(), (0, 0.0)
        self._shut = weakref.finalize(self, _shut, self._pid, self._reads, self._descriptors, self._busy)
        _readers.add(self)

    def submit(self, ranges, memory):
        """Starts reading ``ranges`` (each with file (an index), offset, nbytes, at) to their places in ``memory``, a
        writable contiguous uint8 CPU tensor or buffer; returns a :class:`Ticket`.

        Ranges of pages (offset, length and place in memory are multiples of 4096) are read past the page cache, others
        through it. The memory must not be used or written to before the ticket is done.
        """
        self._check()
        memory = _as_tensor(memory)
        return self.start(self.pieces(_ranges(ranges), memory), memory)

    def pieces(self, ranges, memory):
        """What :meth:`start` wants, for whoever reads the same ranges into the same memory again and again."""
        return [piece for part in ranges for piece in self._cut(part, memory)]

    def start(self, pieces, memory):
        """Starts reading ``pieces``, made of the tensor ``memory``; returns a :class:`Ticket`."""
        self._check()
        for batch in list(self._busy):
            if batch.wait(0):
                self._busy.pop(batch, None)
        batch = self._reads.submit(pieces)
        self._busy[batch] = memory
        return Ticket(self, batch)

    @property
    def bytes_read(self):
        return self._counters()[0]

    @property
    def read_seconds(self):
        """Seconds in which there was something to read: with ``bytes_read`` the bandwidth."""
        return self._counters()[1]

    def _counters(self):
        if os.getpid() == self._pid:  # in a child the lock may be somebody's who is not there
            (count, seconds), (probed, before) = self._reads.counters(), self._before
            self._counted = count - probed, seconds - before
        return self._counted

    def close(self):
        """Ends reading: what is under way is waited for, what is queued never comes (its tickets raise StreamError)."""
        self._shut()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _check(self):
        self._check_process()
        if not self._shut.alive:
            raise StreamError(f"{self._name()}: the reader is closed")

    def _check_process(self):
        if os.getpid() != self._pid:
            raise StreamError(
                f"{self._name()}: this process was forked from the one that reads; open the files anew here"
            )

    def _name(self):
        return self.files[0].path if self.files else "reader"

    def _cut(self, part, memory):
        """The pieces of one range."""
        if not 0 <= part.file < len(self.files):
            raise ValueError(f"ranges: expected a file below {len(self.files)}, got {part.file}")
        if min(part.nbytes, part.at, part.offset) < 0 or part.at + part.nbytes > memory.nbytes:
            raise ValueError(f"ranges: expected a place in {memory.nbytes} bytes of memory, got {part}")
        direct, buffered = self._descriptors.direct.get(part.file, -1), self._descriptors.buffered[part.file]
        offset, address, left = part.offset, memory.data_ptr() + part.at, part.nbytes
        even = -(-left // max(1, -(-left // self._piece)))  # a small last one would have a place among those under way
        even += -even % PAGE
        while left:
            size = min(left, even)
            pages = direct >= 0 and not (offset | address) % PAGE and size >= PAGE
            if pages:
                size -= size % PAGE
            elif size < left:
                size -= (offset + size) % PAGE  # the next piece starts on a page
            yield Piece(part.file, direct if pages else -1, buffered, offset, size, address)
            offset, address, left = offset + size, address + size, left - size

    # ---- engines ------------------------------------------------------------------------------------

    def _choose(self, wish):
        """(name, what does the reads) of the engine that was asked for, or of the first that works."""
        candidates = ENGINES if wish == "auto" else (wish,)
        if wish == "auto" and self._pread is not None:
            candidates = ENGINES[1:]
        reasons = []
        for name in candidates:
            try:
                reads = self._start(name)
            except OSError as error:
                if wish != "auto":
                    raise StreamError(f"{self._name()}: the engine {name} can't read this: {error}") from error
                reasons.append(f"; {name}: {error}")
                continue
            log.info("%s is read by %s%s", self._name(), name, "".join(reasons))
            return name, reads
        raise AssertionError("buffered reading always starts")

    def _start(self, name):
        """An engine that has proved that it can read the files, or OSError."""
        if name == "buffered":
            return self._preads(name)
        self._descriptors.open_direct(self.files)
        try:
            reads = self._uring() if name == "io_uring" else self._preads(name)
            try:
                self._probe(reads)
            except BaseException:
                reads.close()
                raise
            return reads
        except BaseException:
            self._descriptors.close_direct()
            raise

    def _preads(self, name):
        return Preads(self._threads or THREADS[name], self._limit, self._pread or read_at)

    def _uring(self):
        if self._pread is not None:
            raise OSError("it takes no pread")
        if not hasattr(native.cpu, "UringReads"):
            raise OSError(native.cpu_reason or "the compiled module was built without it")
        return native.cpu.UringReads(self._depth, self._limit or 0)

    def _probe(self, reads):
        """Some file systems open a file for direct reading and then refuse to read."""
        memory = aligned_empty(PAGE)
        for index, file in enumerate(self.files):
            if file.size >= PAGE:
                direct, buffered = self._descriptors.direct[index], self._descriptors.buffered[index]
                batch = reads.submit([Piece(index, direct, buffered, 0, PAGE, memory.data_ptr())])
                while not batch.wait(SIGNALS):
                    pass
                if batch.failure is not None:
                    raise _as_error(batch.failure[2])


class Ticket:
    """What was submitted: ``wait`` for it, or ``cancel`` it."""

    def __init__(self, reader, batch):
        self._reader, self._batch = reader, batch

    def wait(self, timeout=None):
        """Returns when all bytes are in memory.

        Raises StreamError, with the file and the offset, if they can't be read, after ``cancel`` and after the reader
        was closed: in each case when nothing writes to the memory any more. TimeoutError after ``timeout`` seconds.
        """
        reader, batch = self._reader, self._batch
        reader._check_process()
        if timeout is not None:
            checks.seconds("timeout", timeout)
        end = None if timeout is None else time.monotonic() + timeout
        while not batch.wait(SIGNALS if end is None else min(SIGNALS, max(0.0, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{reader._name()}: not read after {timeout} seconds")
        reader._busy.pop(batch, None)
        if batch.failure is not None:
            file, offset, number = batch.failure
            raise StreamError(
                f"{reader.files[file].path}: reading at byte {offset} failed: {_as_error(number).strerror}"
            )
        if batch.dropped:
            why = "reading was cancelled" if reader._shut.alive else "the reader was closed before this was read"
            raise StreamError(f"{reader._name()}: {why}")

    def done(self):
        """Whether ``wait`` would not wait: nothing writes to the memory any more."""
        self._reader._check_process()
        return self._batch.wait(0)

    def cancel(self):
        """Reads nothing more of it. What the disk has begun still lands: the memory is free when it is ``done``."""
        self._reader._check_process()
        self._batch.cancel()


class Descriptors:
    """A reader's own descriptors, so that it reads what it opened whatever else is closed."""

    def __init__(self, files):
        self.buffered, self.direct = [], {}
        try:
            for file in files:
                file.check_unchanged()
                self.buffered.append(os.dup(file.fd))
        except BaseException:
            self.close()
            raise

    def open_direct(self, files):
        """One more per file, for reading past the page cache; OSError where that can't be had."""
        try:
            for index, file in enumerate(files):
                self.direct[index] = _open_direct(file.path, self.buffered[index])
        except BaseException:
            self.close_direct()
            raise

    def close_direct(self):
        while self.direct:
            os.close(self.direct.popitem()[1])

    def close(self):
        self.close_direct()
        while self.buffered:
            os.close(self.buffered.pop())


def _open_direct(path, fd):
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this system has no O_DIRECT")
    flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
    try:
        direct = os.open(f"/proc/self/fd/{fd}", flags)  # the file that is open, whatever has its name now
    except FileNotFoundError:  # no /proc
        direct = os.open(path, flags)
    if not os.path.sameopenfile(direct, fd):
        os.close(direct)
        raise OSError(f"{path} is another file now")
    return direct


def _as_error(number):
    return OSError(number, os.strerror(number) if number else "the file ends before that; it was cut while it was open")


def _as_tensor(memory):
    if not isinstance(memory, torch.Tensor):
        try:
            view = memoryview(memory)
        except TypeError:
            raise TypeError(f"memory: expected a tensor or a buffer, got {type(memory).__name__}") from None
        if view.readonly:
            raise ValueError("memory: expected a writable buffer, got a read-only one")
        return torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else torch.empty(0, dtype=torch.uint8)
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous() or memory.device.type != "cpu":
        raise ValueError(
            f"memory: expected a contiguous uint8 [n] on the cpu, got {memory.dtype} {list(memory.shape)} "
            f"with strides {memory.stride()} on {memory.device}"
        )
    return memory


def _count(name, value, most):
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}: expected an int from 1 to {most}, got {value!r}")
    return value


def _files(files):
    files = checks.items("files", files, "open files")
    for file in files:
        if not hasattr(file, "check_unchanged"):
            raise TypeError(f"files: expected open files such as a Pack's, got {type(file).__name__} in it")
    return files


def _ranges(ranges):
    ranges = checks.items("ranges", ranges, "ranges with file, offset, nbytes, at")
    for part in ranges:
        for field in ("file", "offset", "nbytes", "at"):
            if not hasattr(part, field):
                raise TypeError(
                    f"ranges: expected ranges with file, offset, nbytes, at, got {type(part).__name__} in it"
                )
            integer(f"ranges: {field}", getattr(part, field))
    return ranges


def _check_piece(size):
    if isinstance(size, bool) or not isinstance(size, int) or size % PAGE or not PAGE <= size <= 1 << 30:
        raise ValueError(f"piece: expected a multiple of {PAGE} from {PAGE} to {1 << 30}, got {size!r}")


def _under(limit, size):
    """The bytes of a piece, fewer under a low limit, so that they come evenly."""
    return size if limit is None else min(size, max(LEAST, int(limit * SLICE) // PAGE * PAGE))


# ---- the end of a reader, and forks -----------------------------------------------------------------


def _shut(pid, reads, descriptors, busy):
    if os.getpid() == pid:
        reads.close()
    busy.clear()
    descriptors.close()


_readers = weakref.WeakSet()
_paused = {}  # forking thread -> the readers that it stopped


def _before_fork():
    """A page that is written to after a fork is copied, and a direct read that is under way fills the old one."""
    stopped = _paused[threading.get_ident()] = [reader._reads for reader in _readers if reader._shut.alive]
    for reads in stopped:
        reads.pause()


def _after_fork():
    for reads in _paused.pop(threading.get_ident()):
        reads.resume()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)
