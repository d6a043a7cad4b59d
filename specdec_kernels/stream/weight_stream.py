"""A model's blocks in the order of a pass, resident or as they come from the file.

The thread that asks for the blocks does all the bookkeeping (slots.py) and the reader's threads do nothing but fill
memory, so nothing here is shared and nothing locks. When the next block is asked for, the slot of the one before is
free, and reading something into it begins at once; only then is the next block waited for. After the last block the
slots fill with the first ones of the next pass, while the caller drafts and samples.

The files are compared with what they were when they were opened at both ends of a pass: a file that was written to
in between raises StreamError before a result can be used. Every block's checksum is tested when it is first read.
"""

import functools
import os
import threading
import time
import warnings
from typing import NamedTuple

import torch

from ..validate import tensor
from . import checks
from .errors import StreamError
from .loads import Loads
from .memory_rows import MemoryRows
from .pack import Pack
from .plan import Plan
from .resident import loaded_blocks, mapped_blocks
from .slots import Slots, windows
from .stats import StreamStats

ORDERS = 16  # whose windows are kept


class LoadedBlock(NamedTuple):
    """Valid until the next block is asked for. ``slot`` None: resident, valid until the stream is closed."""

    index: int
    name: str
    tensors: dict
    slot: int | None
    generation: int


def _check_plan(pack, plan):
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    sizes = {index: pack.blocks[index].nbytes for index in pack.order}
    if plan.sizes != sizes:
        raise ValueError(f"plan: expected one of this pack, {pack.path}, got one of a pack with blocks of other sizes")


class WeightStream:
    """``with WeightStream(pack, plan) as stream: for block in stream.blocks(): ...``

    pack : a Pack, or the path of one (then it is closed with the stream)
    plan : what :func:`plan` made of the same pack
    verify : tests each block's checksum when it is first read
    progress : called with the fraction of the resident bytes that are loaded; an exception from it ends the loading
    poison : fills slots with 0xFF when they are free (tests)
    no_pin : page-locks no memory of the host (of plans for a device with memory of its own)
    device : what stands in for the plan's device (device.py; tests)
    reader : options of :class:`Reader`: engine, threads, limit, depth

    On a GPU, work on a block belongs on the stream that is current when the next one is asked for. A tensor of a block
    has the same address whenever the block is in the same slot, so what is done with one block can be captured.

    One thread at a time may use it; ``close`` may be called from any. A pass that is left early (break, an exception)
    ends there, and the next one starts from its beginning. After a fork, a stream that reads can't be used in the
    child. Raises StreamError when weights can't be had: reading failed, a file changed, the stream is closed.
    """

    _closed = True  # until it is open

    def __init__(self, pack, plan, *, verify=True, progress=None, poison=False, no_pin=False, device=None, **reader):
        checks.function("progress", progress)
        self._owned = not isinstance(pack, Pack)
        self.pack, self.plan = Pack.open(checks.source("pack", pack)) if self._owned else pack, plan
        try:
            _check_plan(self.pack, plan)
        except BaseException:
            if self._owned:
                self.pack.close()
            raise
        self._closed, self._pid = False, os.getpid()
        self._one_pass = threading.Lock()
        self._resident, self._mapping, self._loads, self._slots = {}, None, None, None
        self._uploads = None  # the loads of a device with memory of its own
        self._order, self._windows, self._known = self.pack.order, (), {}  # _known: order -> its windows
        self._rows = {}  # matrix -> what writes its rows from memory, or None
        self._passes = self._streamed_bytes = self._peak_bytes = 0
        self._counters, self._wait_seconds = (None, 0, 0.0), 0.0
        try:
            self._open(verify, progress or (lambda fraction: None), poison, not no_pin, device, reader)
        except BaseException:
            self.close()
            raise

    def _open(self, verify, progress, poison, pin, device, options):
        plan = self.plan
        self._peak_bytes = plan.resident_bytes
        if plan.mapped:
            self._mapping, blocks = mapped_blocks(self.pack, plan, verify, progress)
            if self._mapping is not None:
                self._keep(blocks)
                return
        if plan.device.type == "cpu":
            self._loads = Loads(self.pack, verify, options)
        else:
            from .device import TorchDevice
            from .uploads import Uploads

            device = device or TorchDevice(plan.device)
            self._loads = self._uploads = Uploads(
                self.pack, plan, device, verify=verify, poison=poison, pin=pin, options=options
            )
        self._keep(loaded_blocks(self.pack, plan, self._loads, progress))
        if not plan.streamed:
            self._stop_reading()
            return
        if self._uploads is not None:
            self._uploads.stream_from_host()
        memories = [self._loads.empty(plan.slot_bytes) for _ in range(plan.slots)]
        self._slots = Slots(memories, self._loads, poison)
        self._peak_bytes += self._slots.nbytes
        self._use(self._order)

    def _keep(self, blocks):
        for index, tensors in blocks.items():
            self._resident[index] = LoadedBlock(index, self.pack.blocks[index].name, tensors, None, 0)

    @property
    def mapped(self):
        """Whether the blocks are pages of the file, which the system can take back when memory is short."""
        return self._mapping is not None

    def blocks(self, order=None):
        """An iterator over the blocks of one pass, as :class:`LoadedBlock`.

        ``order``: indexes of blocks, in any order, with gaps and repetitions; None = all that a pass uses. A block is
        valid until the next one is asked for. Raises StreamError, also when the pass is over: its result is then not
        to be used.
        """
        order = self.pack.order if order is None else checks.items("order", order, "indexes of blocks")
        if not self._is_known(order):
            for index in order:
                if isinstance(index, bool) or not isinstance(index, int) or index not in self.plan.sizes:
                    raise ValueError(f"order: expected indexes of blocks that the plan has, got {index!r}")
        return self._pass(order)

    def _is_known(self, order):
        try:
            return order in self._known
        except TypeError:  # something in it is no index
            return False

    def _pass(self, order):
        self._check_usable()
        if not self._one_pass.acquire(blocking=False):
            raise StreamError(
                "blocks: a pass is under way; it has to end, or its iterator to be closed, before another"
            )
        slots, resident = self._slots, self._resident
        try:
            self._check_files()
            self._use(order)
            if slots is not None:
                slots.fill(self._windows[0])
            for at, index in enumerate(order):
                block = resident.get(index)
                if block is not None:
                    yield block
                    self._check_usable()
                    continue
                yield self._streamed(index, at)
                self._check_usable()
                following = self._windows[at + 1]
                slots.release(following)
                slots.fill(following)
            self._check_files()
            self._passes += 1
        except Exception:
            self._check_usable()  # what a closed stream raises here says less than that it is closed
            raise
        finally:
            try:
                if slots is not None:
                    slots.release(())
            except Exception:
                if not self._closed:  # another thread has taken the slots away just now
                    raise
            finally:
                self._one_pass.release()

    def _streamed(self, index, at):
        start = time.perf_counter()
        slot = self._slots.take(index, self._windows[at])
        self._wait_seconds += time.perf_counter() - start
        block = self.pack.blocks[index]
        tensors = slot.views.get(index)
        if tensors is None:
            tensors = slot.views[index] = block.views(slot.memory)
        self._streamed_bytes += block.nbytes
        return LoadedBlock(index, block.name, tensors, slot.number, slot.generation)

    def _use(self, order):
        self._windows = self._known.get(order)
        if self._windows is None:
            if len(self._known) >= ORDERS:
                self._known.clear()
            self._windows = self._known[order] = windows(order, self._resident, len(self._slots or ()))
        self._order = order

    def check(self, block):
        """Raises StreamError if ``block``, a LoadedBlock, is not valid any more: others may lie in its memory."""
        self._check_usable()
        if block.slot is not None and not self._slots.holds(block.slot, block.index, block.generation):
            raise StreamError(
                f"block {block.index} ({block.name}): no longer in slot {block.slot}; others were read into it"
            )

    def rows(self, matrix, ids, out):
        """Writes the float32 rows ``ids`` (int64 [n]) of a logical matrix to ``out`` [n, k], the bits of ``Pack.rows``:
        from memory if all of the matrix is resident, else from the file."""
        self._check_usable()
        tensor("out", out, (torch.float32,))
        if checks.text("matrix", matrix) not in self._rows:
            self._rows[matrix] = self._memory_rows(matrix)
        (self._rows[matrix] or functools.partial(self.pack.rows, matrix))(ids, out)

    def _memory_rows(self, matrix):
        parts = self.pack.matrices.get(matrix, ())
        if self._mapping is not None:
            found = [self._mapping[index] for index, _ in parts]
        else:
            found = [self._resident[index].tensors for index, _ in parts if index in self._resident]
        if not parts or len(found) < len(parts):
            return None
        return MemoryRows([tensors[name] for tensors, (_, name) in zip(found, parts, strict=True)]).write

    def drop_slots(self, count=1):
        """Frees up to ``count`` slots; one always stays. Returns the bytes."""
        self._check_usable()
        checks.count("count", count)
        if self._slots is None:
            return 0
        freed = self._slots.drop(min(count, len(self._slots) - 1))
        self._changed()
        return freed

    def drop_resident(self, count=1):
        """Makes up to ``count`` resident blocks stream, evenly spread ones that fit a slot. Returns the bytes freed.

        Their memory is free when nobody has their tensors any more.
        """
        self._check_usable()
        checks.count("count", count)
        if self._slots is None:
            return 0
        sizes = self.plan.sizes
        fit = [index for index in self._resident if sizes[index] <= self.plan.slot_bytes]
        count = min(count, len(fit))
        dropped = [fit[(2 * i + 1) * len(fit) // (2 * count)] for i in range(count)]
        for index in dropped:
            del self._resident[index]
        self._changed()
        return sum(sizes[index] for index in dropped)

    def shrink(self, size):
        """Frees at least ``size`` bytes if it can: first the slots but two, then resident blocks, then one more slot.

        Returns the bytes freed; less than ``size`` if there was no more to free. A pass may be under way.
        """
        checks.count("size", size)
        freed = 0
        while freed < size and self._slots is not None and len(self._slots) > 2:
            freed += self.drop_slots()
        while freed < size and (more := self.drop_resident()):
            freed += more
        if freed < size:
            freed += self.drop_slots()
        return freed

    def _changed(self):
        """Resident blocks or slots are not what they were."""
        self._rows.clear()
        self._known.clear()
        self._use(self._order)

    @property
    def stats(self):
        slots, uploads, loads = self._slots, self._uploads, self._loads
        engine, bytes_read, read_seconds = loads.counters() if loads else self._counters
        return StreamStats(
            active=slots is not None,
            engine=engine,
            passes=self._passes,
            bytes_read=bytes_read,
            streamed_bytes=self._streamed_bytes,
            row_bytes=self.pack.row_bytes,
            read_seconds=read_seconds,
            wait_seconds=self._wait_seconds,
            resident_bytes=sum(self.plan.sizes[index] for index in self._resident),
            slots=len(slots or ()),
            slot_bytes=self.plan.slot_bytes,
            peak_bytes=self._peak_bytes,
            reused=slots.reused if slots else 0,
            dropped=slots.dropped if slots else 0,
            link=uploads.link if uploads and slots else None,
            copied_bytes=uploads.copied_bytes if uploads else 0,
            pinned_bytes=uploads.pinned_bytes if uploads else 0,
        )

    def _check_usable(self):
        if self._closed:
            raise StreamError(f"{self.pack.path}: the stream is closed")
        if self._loads is not None and os.getpid() != self._pid:
            raise StreamError(f"{self.pack.path}: this process was forked from the one that reads; open it anew here")

    def _check_files(self):
        if self._mapping is not None:
            self._mapping.check()
        else:
            self.pack.check_unchanged()

    def close(self):
        """Ends reading, joins the threads and gives back memory and files. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._stop_reading()
        if self._slots is not None:
            self._slots.clear()
        self._resident.clear()
        self._rows.clear()
        self._known.clear()
        self._mapping = None
        if self._owned:
            self.pack.close()

    def _stop_reading(self):
        if self._loads is not None:
            self._loads.close()
            self._counters, self._loads = self._loads.counters(), None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def __del__(self):
        if not self._closed:
            warnings.warn(f"{self.pack.path}: a WeightStream was not closed", ResourceWarning, stacklevel=2)
            self.close()
