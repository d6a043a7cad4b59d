"""Blocks on their way into memory: read, and at the first time checked, in threads that the user of the blocks does
not wait for until the block is needed."""

import os
import queue
import threading
import weakref

from .memory import aligned_empty
from .reader import Reader


class Loads:
    """Reads blocks of ``pack`` into memory. ``options``: of the Reader; ``verify``: checks each block once."""

    ahead = 4  # resident blocks that are read at the same time while loading

    def __init__(self, pack, verify, options):
        self._blocks = pack.blocks
        self._reader = Reader(pack.files, **options)
        self._before = self._reader.bytes_read  # to find out whether it can read at all
        unchecked = {block.index for block in pack.blocks if verify and block.crc32 is not None}
        self._checks = Checks(pack.check_block, unchecked)
        self._pieces = {}  # (block, its place in memory) -> what the reader makes of it; a pass has few of them

    def start(self, index, memory):
        """Begins to read block ``index``; returns what has ``wait()``, which raises StreamError, and ``cancel()``."""
        place = index, memory.data_ptr(), memory.nbytes
        pieces = self._pieces.get(place)
        if pieces is None:
            pieces = self._pieces[place] = self._reader.pieces(self._blocks[index].ranges, memory)
        return self._checks.after(self._reader.start(pieces, memory), index, memory)

    def empty(self, nbytes):
        """Memory that blocks are read into."""
        return aligned_empty(nbytes)

    def fill(self, memory, value):
        memory.fill_(value)

    def leave(self, memory):
        """Nobody uses the block in ``memory`` any more. The host's own work on it is over by then."""

    def counters(self):
        """(engine, bytes read, seconds in which there was something to read)."""
        return self._reader.engine, self._reader.bytes_read - self._before, self._reader.read_seconds

    def close(self):
        """Returns when nothing is written any more. Whoever waits for a load that was not done gets a StreamError."""
        self._reader.close()
        self._checks.close()


class Checks:
    """``check(index, memory)`` raises if the bytes of a block are wrong; ``unchecked``: the blocks that want it once.

    A thread does it, so that one block is checked while others are read; it ends with the last block.
    """

    def __init__(self, check, unchecked):
        self._check, self._unchecked = check, unchecked
        self._queue, self._shut = None, None

    def after(self, ticket, index, memory):
        """The ticket itself, or, if the block was not checked yet, what waits for ticket and check."""
        if index not in self._unchecked:
            return ticket
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            arguments = self._queue, self._check, self._unchecked
            thread = threading.Thread(target=_run, args=arguments, name="weight-checks", daemon=True)
            thread.start()
            self._shut = weakref.finalize(self, _shut, os.getpid(), self._queue, thread)
        load = Checked(ticket, index, memory)
        self._queue.put(load)
        return load

    def close(self):
        """Ends the thread. All tickets have to be done."""
        if self._shut is not None:
            self._shut()


class Checked:
    """A load that is done when its ticket is and the bytes were found to be right."""

    __slots__ = ("_done", "_error", "_ticket", "index", "memory")

    def __init__(self, ticket, index, memory):
        self._ticket, self.index, self.memory = ticket, index, memory
        self._error, self._done = None, threading.Event()

    def wait(self):
        self._done.wait()
        if self._error is not None:
            raise self._error

    def cancel(self):
        self._ticket.cancel()

    def finish(self, check, unchecked):
        try:
            self._ticket.wait()
            if self.index in unchecked:  # or it was read a second time before it was checked
                check(self.index, self.memory)
                unchecked.discard(self.index)
        except BaseException as error:  # whatever it is, somebody waits for this load
            self._error = error
        self.memory = None
        self._done.set()


def _run(loads, check, unchecked):
    while (load := loads.get()) is not None:
        load.finish(check, unchecked)
        del load


def _shut(pid, loads, thread):
    if os.getpid() == pid:  # a forked child has no such thread
        loads.put(None)
        thread.join()
