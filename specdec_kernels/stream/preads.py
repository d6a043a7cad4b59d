"""Reads by a few threads with ``pread``: what works everywhere.

The threads take pieces from one queue in order; several reads are under way at once because a disk needs that. Where a
read comes back short, the rest of the piece is read; where a direct read leaves a rest that is not made of pages, the
page cache serves it.
"""

import ctypes
import errno
import os
import threading
import time
from collections import deque

from .. import native
from .batch import Failure, Pace
from .memory import PAGE

FOLIO = 2 << 20  # the page cache holds up to so much in one, and drops it only as a whole: with whoever reads its end
AGAIN = (errno.EINTR, errno.EAGAIN)


class Batch:
    """Pieces that were submitted together.

    left : pieces that are queued or being read
    failure : the first Failure
    dropped : pieces were taken out of the queue, because of a failure or of ``cancel``
    """

    def __init__(self, pool, left):
        self._pool, self.left, self.failure, self.dropped = pool, left, None, False

    def wait(self, timeout):
        """Whether nothing is left to read, after ``timeout`` seconds at most."""
        with self._pool.lock:
            return self._pool.landed.wait_for(lambda: self.left == 0, timeout)

    def cancel(self):
        self._pool.drop(self)


class Preads:
    """``threads`` threads; ``read(fd, view, offset)`` does what :func:`.files.pread` does. What was read through the
    page cache leaves it."""

    def __init__(self, threads, limit, read):
        self.lock = threading.Lock()
        self.landed, self._work = threading.Condition(self.lock), threading.Condition(self.lock)
        self._queue = deque()  # (batch, piece)
        self._reading = 0  # pieces taken from the queue and not landed yet
        self._pauses, self._stopped = 0, False
        self._pace, self._read = Pace(limit), read
        self._drop = getattr(os, "posix_fadvise", None)
        self._bytes, self._seconds, self._since = 0, 0.0, None
        self._turn = threading.Lock()  # who has it looks for work
        self._threads = [threading.Thread(target=self._run, name="weight-reader", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, pieces):
        batch = Batch(self, len(pieces))
        with self.lock:
            if self._stopped:
                batch.left, batch.dropped = 0, True
                return batch
            if self._since is None and pieces:
                self._since = time.monotonic()
                self._pace.wake(self._since)
            self._queue.extend((batch, piece) for piece in pieces)
            self._work.notify()
        return batch

    def counters(self):
        """(bytes read, seconds in which there was something to read)."""
        with self.lock:
            now = 0.0 if self._since is None else time.monotonic() - self._since
            return self._bytes, self._seconds + now

    def pause(self):
        """Starts no more reads, and returns when none is under way (before a fork). Pauses nest."""
        with self.lock:
            self._pauses += 1
            self.landed.wait_for(lambda: self._reading == 0)

    def resume(self):
        with self.lock:
            self._pauses -= 1
            self._work.notify()

    def close(self):
        """Drops what is queued, waits for what is being read, ends the threads."""
        with self.lock:
            self._stopped = True
            while self._queue:
                self._drop_queued(self._queue[0][0])
            self._work.notify()
        for thread in self._threads:
            thread.join()

    def drop(self, batch):
        """Cancels a batch; what is being read for it still lands."""
        with self.lock:
            if batch.left:
                self._drop_queued(batch)

    def _drop_queued(self, batch):
        batch.dropped = True
        kept = [entry for entry in self._queue if entry[0] is not batch]
        count, self._queue = len(self._queue) - len(kept), deque(kept)
        self._count_off(batch, count)

    def _count_off(self, batch, count):
        batch.left -= count
        if not self._queue and not self._reading and self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None
        if not batch.left or not self._reading:
            self.landed.notify_all()

    def _run(self):
        if hasattr(native.cpu, "short_turns"):
            native.cpu.short_turns()
        while (entry := self._take()) is not None:
            batch, piece = entry
            count, failure = self._fill(piece)
            with self.lock:
                self._reading -= 1
                self._bytes += count
                if failure is not None and batch.failure is None:
                    batch.failure = failure
                    self._drop_queued(batch)
                self._count_off(batch, 1)
            del batch, entry

    def _take(self):
        """The next (batch, piece) as soon as it may start, None at the end."""
        with self._turn, self.lock:
            while not self._stopped:
                early = None
                if self._queue and not self._pauses:
                    early = self._pace.early(self._queue[0][1].nbytes, time.monotonic())
                    if not early:
                        self._reading += 1
                        return self._queue.popleft()
                self._work.wait(early)
            return None

    def _fill(self, piece):
        """Reads a piece: (bytes read, what went wrong or None)."""
        done = 0
        try:
            view = memoryview((ctypes.c_ubyte * piece.nbytes).from_address(piece.address)).cast("B")
            while done < piece.nbytes:
                fd = piece.direct if piece.direct >= 0 and done % PAGE == 0 else piece.buffered
                try:
                    count = self._read(fd, view[done:], piece.offset + done)
                except OSError as error:
                    if error.errno in AGAIN:
                        continue
                    return done, Failure(piece.file, piece.offset + done, error.errno)
                if count == 0:
                    return done, Failure(piece.file, piece.offset + done, 0)
                done += count
                if self._drop is not None and fd == piece.buffered:
                    end = piece.offset + done
                    start = (end - count) // FOLIO * FOLIO
                    self._drop(fd, start, end - start, os.POSIX_FADV_DONTNEED)
        except BaseException as error:  # whatever a read raises, somebody waits for this piece
            return done, Failure(piece.file, piece.offset + done, getattr(error, "errno", None) or errno.EIO)
        return done, None
