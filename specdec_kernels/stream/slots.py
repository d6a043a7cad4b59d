"""Slots: pieces of memory through which the streamed blocks of a model pass, and which block goes where.

There is no ring index. A slot that is done with goes to a queue of free slots, and the blocks to come are a queue, too:
at each position of a pass the *window* is what is in use there and the blocks that follow it, as many different ones as
there are slots, over the end of the pass into the next one. Whatever of the window is in no slot is read into a free
one, and a slot is free when its block is not in the window. So any number of blocks goes with any number of slots,
blocks can be left out, repeated or turned round, and a wrong guess of what the next pass wants costs time alone.

All of this belongs to the one thread that uses the blocks, and nothing here locks. Each filling of a slot has a
number, its generation: by it a block that was kept too long is told from the one that was read over it.
"""

import contextlib
from collections import deque


def windows(order, resident, count):
    """Per position of ``order``, and one past the end, the blocks that should be in ``count`` slots then.

    The first of a window is the next streamed block at or after the position. After the last block the pass starts
    again: the same order is what most probably comes next.
    """
    if not count:
        return [()] * (len(order) + 1)
    result, following = [], []  # following: where each different block comes next, soonest first
    for index in reversed([*order, *order]):
        if index not in resident:
            if index in following:
                following.remove(index)
            following.insert(0, index)
        result.append(tuple(following[:count]))
    result.reverse()
    return [*result[: len(order)], result[0]] if order else [()]


def reads_per_pass(order, resident, count):
    """The blocks that a pass reads, one entry per read, once passes of the same order follow each other."""
    held, reads = set(), []
    each = windows(order, resident, count)
    for _ in range(2):  # the first pass starts with empty slots; from the second on all are alike
        reads = []
        for window in each[1:]:
            reads += [index for index in window if index not in held]
            held = set(window)
    return reads


class Slot:
    """``memory`` for one block at a time. ``block``: whose bytes it holds or gets, None = nobody's."""

    __slots__ = ("block", "generation", "load", "memory", "number", "views")

    def __init__(self, number, memory):
        self.number, self.memory = number, memory
        self.block = self.load = None
        self.generation = 0
        self.views = {}  # block index -> its tensors in this slot, made once: their addresses stay


class Slots:
    """``source`` (loads.py, uploads.py) fills the memories: ``start(index, memory)`` begins to read a block and returns
    its load, what has ``wait()`` and ``cancel()``; ``leave(memory)`` hears that the block in use is done with; and
    ``fill(memory, value)``.

    ``poison``: memory that is free holds 0xFF, which makes NaN of most weights that are used too late (tests).
    """

    def __init__(self, memories, source, poison=False):
        self._source, self._poison = source, poison
        self._all = [Slot(number, memory) for number, memory in enumerate(memories)]
        self._free = deque(self._all)
        self._held = {}  # block index -> the slot that holds or gets it
        self._in_use = None
        self.reused = 0  # how often a slot was filled that had been filled before
        self.dropped = 0  # blocks that were read in vain

    def __len__(self):
        return len(self._all)

    @property
    def nbytes(self):
        return sum(slot.memory.nbytes for slot in self._all)

    def fill(self, window):
        """Begins to read what of ``window`` is in no slot yet."""
        for index in window:
            if index not in self._held:
                slot = self._free_slot(window)
                if slot is None:
                    return  # a window of more blocks than there are slots
                slot.generation += 1
                try:
                    slot.load = self._source.start(index, slot.memory)
                except BaseException:
                    self._free.append(slot)
                    raise
                slot.block = index
                self._held[index] = slot
                self.reused += slot.generation > 1

    def take(self, index, window):
        """The slot with all of block ``index``, in use until ``release``. Raises what reading it raised."""
        slot = self._held.get(index)
        if slot is None:  # its first load failed, or slots were dropped
            self.fill((index, *window))
            slot = self._held[index]
        try:
            slot.load.wait()
        except BaseException:
            self._give_up(slot)
            raise
        self._in_use = slot
        return slot

    def release(self, window):
        """The block in use is done with. It stays where it is if ``window`` has it again."""
        slot, self._in_use = self._in_use, None
        if slot is None:
            return
        if slot.block not in window:
            slot.load = None
            self._free_up(slot)
            if self._poison:
                self._source.fill(slot.memory, 0xFF)
        self._source.leave(slot.memory)

    def holds(self, number, index, generation):
        """Whether slot ``number`` still has block ``index`` from its filling ``generation``."""
        slot = self._held.get(index)
        return slot is not None and slot.number == number and slot.generation == generation

    def drop(self, count):
        """Gives up to ``count`` slots back, never the one in use. Returns their bytes."""
        freed = 0
        for slot in [slot for slot in reversed(self._all) if slot is not self._in_use][:count]:
            if slot.block is not None:
                self._give_up(slot)
            self._settle(slot)
            self._free.remove(slot)
            self._all.remove(slot)
            freed += slot.memory.nbytes
        return freed

    def clear(self):
        """Lets go of all memory. Nothing may be writing to it any more."""
        self._all, self._in_use = [], None
        self._free.clear()
        self._held.clear()

    def _free_slot(self, window):
        """A free slot, or that of a block which was read in vain because the pass took another turn, or None."""
        if not self._free:
            astray = (slot for index, slot in self._held.items() if index not in window and slot is not self._in_use)
            slot = next(astray, None)
            if slot is None:
                return None
            self._give_up(slot)
            self.dropped += 1
        self._settle(self._free[0])
        return self._free.popleft()

    def _give_up(self, slot):
        """The slot is free, but before it is used again ``_settle`` has to see that nothing writes to it any more."""
        slot.load.cancel()
        self._free_up(slot)

    def _settle(self, slot):
        if slot.load is not None:
            with contextlib.suppress(Exception):  # of a block that nobody wants, or of being cancelled
                slot.load.wait()
            slot.load = None

    def _free_up(self, slot):
        del self._held[slot.block]
        slot.block = None
        self._free.append(slot)
