"""The blocks that stream to a device, in the host's memory: some stay there, others come from the file through slots.

All of it belongs to the one thread that copies them to the device.
"""

from .slots import Slots, windows


class HostBlocks:
    """plan : of the host's memory, for the blocks that stream to the device
    order : in which the device wants them, as far as anybody can tell
    reads : what reads blocks from the file (loads.py); ``empty(nbytes)`` gives memory
    """

    def __init__(self, plan, order, sizes, reads, empty, poison):
        self._reads, self._sizes, self._order, self._at = reads, sizes, order, 0
        self._resident = {index: empty(sizes[index]) for index in plan.resident}
        self._loads = {index: reads.start(index, memory) for index, memory in self._resident.items()}
        memories = [empty(plan.slot_bytes) for _ in range(plan.slots)]
        self._slots, self._slot_bytes = Slots(memories, reads, poison), plan.slot_bytes
        self._windows = windows(order, self._resident, plan.slots)
        self._slots.fill(self._windows[0])

    def take(self, index):
        """``(memory, again)``: all of block ``index``; ``again``: the memory is used again after ``release``, which has
        to be called then. Raises what reading raised."""
        at = self._position(index)
        self._at = (at + 1) % max(1, len(self._order))
        memory, window = self._resident.get(index), self._windows[at]
        if memory is None and index not in window:  # the device gave it up only lately
            window = (index, *window)[: len(self._slots)]
        self._slots.fill(window)
        if memory is not None:
            self._loaded(index, memory)
            return memory[: self._sizes[index]], False
        if len(self._slots) and self._sizes[index] <= self._slot_bytes:
            return self._slots.take(index, window).memory[: self._sizes[index]], True
        memory = self._reads.empty(self._sizes[index])
        self._reads.start(index, memory).wait()
        return memory, True

    def release(self):
        """The block that was taken last is copied."""
        following = self._windows[self._at]
        self._slots.release(following)
        self._slots.fill(following)

    def _position(self, index):
        """Where in the order the device is; a wrong guess costs time only."""
        if self._order and self._order[self._at] == index:
            return self._at
        return self._order.index(index) if index in self._order else self._at

    def _loaded(self, index, memory):
        load = self._loads.pop(index, None)
        if load is None:
            return
        try:
            load.wait()
        except BaseException:
            self._loads[index] = self._reads.start(index, memory)  # for whoever tries again
            raise
