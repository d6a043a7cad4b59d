"""A device that shows what a missing event does: its streams get out of step as far as their events let them.

Memory is the CPU's. Work on a stream lies in its queue and is done one piece at a time, when somebody waits for it or
whenever the device feels like it: ``eager`` names the streams that run ahead ("copies", "work"), the others lie still
until they must move; "all" lets nothing lie; None leaves it to chance. A copy from registered memory reads it when it
is done, from other memory when it is queued. ``without`` leaves out waits: "copy done", "slot free" (streams for
events), "host" (the copying thread for events).
"""

import random
import threading
from collections import Counter, deque

from specdec_kernels.stream.device import PinError
from specdec_kernels.stream.memory import aligned_empty


class Event:
    done = False


class Stream:
    def __init__(self, name):
        self.name, self.queue = name, deque()  # of (event to be waited for or None, function)


class SimulatedDevice:
    shares_memory = False

    def __init__(self, seed=0, eager=None, without=(), pinnable=None):
        """``pinnable``: bytes that can be registered at the same time; None = any number."""
        self._random, self._lock = random.Random(seed), threading.RLock()
        self._eager, self._without, self._pinnable = eager, set(without), pinnable
        self._work, self._streams = Stream("work"), []
        self._streams.append(self._work)
        self.registered, self.refused, self.stuck = {}, 0, False
        self._reading = Counter()  # registration -> queued copies from it
        self.copies = self.waits = 0

    # ---- what uploads.py calls --------------------------------------------------------------------------------

    def empty(self, nbytes):
        return aligned_empty(nbytes).fill_(0xEE)

    def fill(self, memory, value):
        self._add(self._work, None, lambda: memory.fill_(value))

    def stream(self):
        self._streams.append(Stream("copies"))
        return self._streams[-1]

    def current(self):
        return self._work

    def record(self, stream):
        event = Event()
        self._add(stream, None, lambda: setattr(event, "done", True))
        return event

    def wait(self, stream, event):
        if ("copy done" if stream is self._work else "slot free") not in self._without:
            self.waits += 1
            self._add(stream, event, lambda: None)

    def finish(self, event):
        if "host" in self._without and threading.current_thread() is not threading.main_thread():
            return
        with self._lock:
            while not event.done:
                assert self._step(), "every stream waits for another one"

    def copy(self, target, source, stream):
        start, end = source.data_ptr(), source.data_ptr() + source.nbytes
        inside = [(a, n) for a, n in self.registered.items() if a < end and start < a + n]
        if inside:
            (address, size), *more = inside
            assert not more and address <= start and end <= address + size, "a copy from two registrations"
            self._reading[address] += 1
        else:
            address, source = None, source.clone()

        def run():
            target.copy_(source)
            self._reading[address] -= 1

        self._add(stream, None, run)
        self.copies += 1

    def register(self, address, nbytes):
        assert address % 4096 == nbytes % 4096 == 0
        if self._pinnable is not None and sum(self.registered.values()) + nbytes > self._pinnable:
            self.refused, self.stuck = self.refused + 1, True
            raise PinError(f"{nbytes} bytes of page-locked host memory can't be had: out of memory (2)")
        self.registered[address] = nbytes
        return True

    def unregister(self, address):
        with self._lock:
            assert not self._reading[address], "a copy from there is under way"
            del self.registered[address]

    def clear_error(self):
        self.stuck = False

    # ---- what a model would do --------------------------------------------------------------------------------

    def launch(self, function):
        """Work for the current stream."""
        self._add(self._work, None, function)

    def synchronize(self):
        with self._lock:
            while self._step():
                pass
            assert not any(stream.queue for stream in self._streams), "every stream waits for another one"

    # ---- inside -----------------------------------------------------------------------------------------------

    def _add(self, stream, event, function):
        with self._lock:
            assert not self.stuck, "an error of before shows up in this launch"
            stream.queue.append((event, function))
            if self._eager is None:
                for _ in range(self._random.randrange(3)):
                    self._step()
            else:
                while self._step(None if self._eager == "all" else self._eager):
                    pass

    def _step(self, name=None):
        """Does one piece of work of some stream that has any to do, of those called ``name``; False if none has."""
        able = [s for s in self._streams if s.queue and (s.queue[0][0] is None or s.queue[0][0].done)]
        favoured = [s for s in able if s.name == (name or self._eager)]
        able = favoured or ([] if name else able)
        if not able:
            return False
        self._random.choice(able).queue.popleft()[1]()
        return True
