"""Blocks on their way to a device: from the file into the host's memory, and from there into the device's.

One thread takes the blocks in the order in which they were asked for, waits for each until it is in the host's memory,
and queues its copy on the one stream for copies. It is the only one that knows the host's memory, as the thread that
uses the blocks is the only one that knows the device's slots. In between are two events per slot:

copy done : behind the copy; the user's stream waits for it when the block is taken
slot free : behind what the user's stream had been given when it was done with the block; the next copy into that memory
    waits for it

The device's memory never moves, so what holds its addresses (a CUDA graph of what is done with a block) stays valid.
"""

import contextlib
import logging
import os
import queue
import threading

from .device import PinError
from .errors import StreamError
from .host_blocks import HostBlocks
from .loads import Loads
from .pinned import PIECE, PIECES, Arena, Pageable, Ring

log = logging.getLogger("specdec_kernels.stream")


class Uploads:
    """What :class:`Loads` is for memory of the host, for memory of ``device`` (device.py). ``pin``: page-locks the
    host's memory if that can be done."""

    ahead = 1  # blocks that are read beside the one that is copied, while the device's resident ones are loaded

    def __init__(self, pack, plan, device, *, verify, poison, pin, options):
        self._plan, self._device, self._poison = plan, device, poison
        self._sizes = {block.index: block.nbytes for block in pack.blocks}
        self._order = tuple(index for index in pack.order if index not in plan.resident)
        self._pin = pin and not device.shares_memory
        self._stream, self._queue = device.stream(), queue.SimpleQueue()
        self._reads = Loads(pack, verify, options)
        self._pageable = self._link = Pageable(device)
        self._host, self._free, self.copied_bytes, self._pid = None, {}, 0, os.getpid()
        self._thread = threading.Thread(target=self._run, name="weight-uploads", daemon=True)
        self._thread.start()

    # ---- of the thread that uses the blocks ------------------------------------------------------------------

    def empty(self, nbytes):
        """Memory of the device for blocks."""
        memory = self._device.empty(nbytes)
        self.leave(memory)  # who had it before may not be done with it yet
        return memory

    def start(self, index, memory):
        """Begins to bring block ``index`` into the device's ``memory``."""
        upload = Upload(index, memory[: self._sizes[index]], self._device, self._free.get(memory.data_ptr()))
        if self._host is None:
            upload.host = self._reads.empty(self._sizes[index])
            upload.load = self._reads.start(index, upload.host)
        self._queue.put(upload)
        return upload

    def leave(self, memory):
        """What the current stream was given up to now may use the block in ``memory``, nothing later does."""
        self._free[memory.data_ptr()] = self._device.record(self._device.current())

    def fill(self, memory, value):
        self._device.fill(memory, value)

    def stream_from_host(self):
        """All that the device keeps is there. From here on blocks come out of the host's memory."""
        if self._pin:
            self._link = self._pinned()
        empty = self._link.empty if self._link.later else self._reads.empty
        self._host = HostBlocks(self._plan.host, self._order, self._sizes, self._reads, empty, self._poison)

    def _pinned(self):
        host = self._plan.host
        try:
            return Arena(self._device, host.resident_bytes + host.slots_bytes)
        except PinError as error:
            piece = min(PIECE, max(self._sizes.values()))
            log.warning("%s; blocks are copied through %d page-locked bytes instead", error, piece * PIECES)
        try:
            return Ring(self._device, piece)
        except PinError as error:
            log.warning("%s; blocks are copied from ordinary memory, which is slow", error)
            return self._pageable

    @property
    def link(self):
        """How blocks get to the device: "pinned", "ring" or "pageable"."""
        return self._link.name

    @property
    def pinned_bytes(self):
        """Page-locked just now."""
        return self._link.locked

    def counters(self):
        return self._reads.counters()

    def close(self):
        """Returns when nothing is written any more. Uploads that were not done raise StreamError."""
        self._reads.close()
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the device
        self._queue.put(None)
        self._thread.join()
        try:
            self._device.finish(self._device.record(self._stream))
        finally:
            self._host = None
            self._link.close()

    # ---- of the thread that copies ----------------------------------------------------------------------------

    def _run(self):
        while (upload := self._queue.get()) is not None:
            self._bring(upload)
            del upload  # and the memory with it

    def _bring(self, upload):
        again, link = False, self._pageable
        try:
            if upload.cancelled:
                raise StreamError(f"block {upload.index}: nobody wants it any more")
            if upload.load is not None:
                upload.load.wait()
                memory = upload.host
            else:
                memory, again = self._host.take(upload.index)
                link = self._link if self._link.takes(memory) else link
            if upload.free is not None:
                self._device.wait(self._stream, upload.free)  # slot free
            link.copy(upload.memory, memory, self._stream)
            upload.copied = self._device.record(self._stream)  # copy done
            self.copied_bytes += memory.nbytes
        except BaseException as error:  # whatever it is, somebody waits for this upload
            upload.error = error
        upload.host = upload.load = None
        upload.queued.set()
        if again:
            with contextlib.suppress(Exception):  # whoever takes a block that can't be read is told
                if link.later:
                    self._device.finish(upload.copied or self._device.record(self._stream))
                self._host.release()


class Upload:
    """One block on its way into ``memory``; ``free``: the event that the copy waits for."""

    __slots__ = ("_device", "cancelled", "copied", "error", "free", "host", "index", "load", "memory", "queued")

    def __init__(self, index, memory, device, free):
        self.index, self.memory, self.free, self._device = index, memory, free, device
        self.host = self.load = self.copied = self.error = None
        self.cancelled, self.queued = False, threading.Event()

    def wait(self):
        """Puts the current stream behind the copy. The host waits only until the copy is queued: a stream does not wait
        for what was not queued before."""
        self.queued.wait()
        if self.error is not None:
            raise self.error
        self._device.wait(self._device.current(), self.copied)

    def cancel(self):
        self.cancelled = True
