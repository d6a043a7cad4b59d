"""Checksums of blocks as they come in, in a thread of their own: one block is checked while others are read."""

import queue
import threading


class Checked:
    """A load that is done once its bytes were read and found to be right."""

    __slots__ = ("_done", "_error", "_ticket", "block", "memory")

    def __init__(self, block, ticket, memory):
        self.block, self.memory, self._ticket = block, memory, ticket
        self._error, self._done = None, threading.Event()

    def wait(self):
        self._done.wait()
        if self._error is not None:
            raise self._error

    def done(self):
        return self._done.is_set()

    def cancel(self):
        self._ticket.cancel()

    def run(self, check):
        try:
            self._ticket.wait()
            check(self.block, self.memory)
        except BaseException as error:
            self._error = error
        self.memory = None
        self._done.set()


class Checksums:
    """``check(index, memory)`` raises if the bytes are wrong. A block is checked the first time that it is read."""

    def __init__(self, check, blocks):
        self._check, self._unchecked = check, set(blocks)
        self._queue, self._thread = None, None

    def load(self, index, ticket, memory):
        """``ticket`` itself, or, for a block that was not checked before, what waits for its check, too."""
        if index not in self._unchecked:
            return ticket
        if self._thread is None:
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, args=(self._queue,), name="weight-checksums", daemon=True)
            self._thread.start()
        load = Checked(index, ticket, memory)
        self._queue.put(load)
        return load

    def _run(self, loads):
        while (load := loads.get()) is not None:
            load.run(self._once)

    def _once(self, index, memory):
        if index in self._unchecked:
            self._check(index, memory)
            self._unchecked.discard(index)
            if not self._unchecked:
                self._queue.put(None)  # what is still in front of it is only waited for

    def close(self):
        """Ends the thread; the tickets of all loads must be done or cancelled."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
