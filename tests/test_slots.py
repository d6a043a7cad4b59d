"""Slots alone: which blocks they should hold, and what happens when reads land at the worst moment."""

import random

import pytest
import torch

from specdec_kernels.stream import StreamError
from specdec_kernels.stream.slots import Slots, reads_per_pass, windows


@pytest.mark.parametrize("blocks", range(1, 10))
@pytest.mark.parametrize("slots", range(1, 5))
def test_report_1_every_block_is_read_once_whatever_the_remainder(blocks, slots):
    reads = reads_per_pass(range(blocks), (), slots)
    assert sorted(reads) == (list(range(blocks)) if blocks > slots else [])


def test_windows():
    assert windows([0, 1, 2], (), 2) == [(0, 1), (1, 2), (2, 0), (0, 1)]
    assert windows([0, 1, 2, 3], {1, 2}, 1) == [(0,), (3,), (3,), (3,), (0,)]
    assert windows([2, 0, 0, 2, 1], (), 2) == [(2, 0), (0, 2), (0, 2), (2, 1), (1, 2), (2, 0)]
    assert windows([0, 1], {0, 1}, 3) == [(), (), ()]
    assert windows([], (), 2) == [()]
    assert windows([4], (), 3) == [(4,), (4,)]


class Landing:
    """Reads that are on their way until somebody waits for them, or until they please (``eager``: at once)."""

    def __init__(self, rng, eager):
        self.rng, self.eager, self.flying = rng, eager, {}

    def fill(self, memory, value):
        memory.fill_(value)

    def leave(self, memory):
        pass

    def start(self, index, memory):
        assert memory.data_ptr() not in self.flying, "two reads into one slot"
        load = Flight(self, index, memory)
        self.flying[memory.data_ptr()] = load
        if self.rng.random() < self.eager:
            load.wait()
        return load


class Flight:
    def __init__(self, landing, index, memory):
        self.landing, self.index, self.memory, self.cancelled = landing, index, memory, False

    def wait(self):
        if self.landing.flying.get(self.memory.data_ptr()) is self:
            del self.landing.flying[self.memory.data_ptr()]
            self.memory.fill_(self.index)
        if self.cancelled:
            raise StreamError("cancelled")

    def cancel(self):
        self.cancelled = True


@pytest.mark.parametrize("eager", [0.0, 0.5, 1.0])
def test_slots_with_reads_that_land_at_the_worst_moment(eager):
    rng = random.Random(int(10 * eager))
    for _ in range(150):
        count, number = rng.randint(1, 7), rng.randint(1, 4)
        slots = Slots([torch.zeros(8, dtype=torch.uint8) for _ in range(number)], Landing(rng, eager), poison=True)
        for _ in range(4):
            order = [rng.randrange(count) for _ in range(rng.randint(1, 9))] if rng.random() < 0.5 else range(count)
            each = windows(order, (), len(slots))
            slots.fill(each[0])
            for at, index in enumerate(order):
                slot = slots.take(index, each[at])
                assert slot.memory.tolist() == [index] * 8 and slots.holds(slot.number, index, slot.generation)
                slots.fill(each[at])
                assert slot.memory.tolist() == [index] * 8
                if rng.random() < 0.05:
                    slots.release(())
                    break
                if rng.random() < 0.03 and len(slots) > 1:
                    slots.drop(1)
                    each = windows(order, (), len(slots))
                    assert slot.memory.tolist() == [index] * 8
                slots.release(each[at + 1])
                slots.fill(each[at + 1])


def test_the_slot_in_use_is_never_given_away():
    slots = Slots([torch.zeros(8, dtype=torch.uint8)], Landing(random.Random(0), 1.0), poison=True)
    slot = slots.take(7, (7,))
    slots.fill((3, 4))
    assert slot.memory.tolist() == [7] * 8 and slots.drop(1) == 0
    slots.release((3, 4))
    assert slots.take(3, (3, 4)).memory.tolist() == [3] * 8
