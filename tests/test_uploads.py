"""Streaming to a device, on a simulated one whose streams get out of step: every order that matters is kept, and each
event that keeps one is needed."""

import logging
import os
import random
import time
from dataclasses import replace

import pytest
import torch

from simulated_device import SimulatedDevice
from specdec_kernels import Int8Weight
from specdec_kernels.stream import Pack, StreamError, WeightStream
from specdec_kernels.stream.device import PinError
from specdec_kernels.stream.pinned import Arena, Ring
from streams import contents, parts, plan_of, same, settled, threads_of, write_pack

EAGER = ("copies", "work", None)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A pack with n blocks and its contents; made when it is first asked for."""
    made, folder = {}, tmp_path_factory.mktemp("packs")

    def get(n, pages=(1, 3)):
        if (n, pages) not in made:
            pack = Pack.open(write_pack(folder / f"{n}-{pages[0]}.pack", n, pages=pages))
            made[n, pages] = pack, contents(pack)
        return made[n, pages]

    yield get
    for pack, _ in made.values():
        pack.close()


def device_plan(pack, slots, resident=(), host_resident=None, host_slots=1):
    """``slots`` on the device; the host keeps ``host_resident``, or everything that streams."""
    on_device = plan_of(pack, slots, resident)
    streamed = on_device.streamed
    kept = streamed if host_resident is None else tuple(i for i in host_resident if i in streamed)
    read = tuple(i for i in streamed if i not in kept)
    host = replace(
        on_device,
        resident=kept,
        streamed=read,
        slots=host_slots if read else 0,
        slot_bytes=max((on_device.sizes[i] for i in read), default=0),
        sizes={i: on_device.sizes[i] for i in streamed},
    )
    return replace(on_device, device=torch.device("cuda"), host=host)


def stream_of(pack, plan, device, **options):
    return WeightStream(pack, plan, device=device, poison=True, **{"engine": "buffered", **options})


def use(device, block, seen):
    """Queues work: what it sees of the block goes into ``seen`` when the device comes to it."""
    device.launch(lambda: seen.append((block.index, parts(block.tensors))))


def queue_pass(stream, device, seen, order=None):
    for block in stream.blocks(order):
        stream.check(block)
        use(device, block, seen)


def wrong(seen, expected, order):
    """How many of the blocks are not what they should be."""
    assert [index for index, _ in seen] == list(order)
    return sum(not same(found, expected[index]) for index, found in seen)


def passes(pack, plan, device, orders=(None,) * 3, **options):
    """(what the device saw, in which order it should have, the statistics after that)"""
    seen = []
    with stream_of(pack, plan, device, **options) as stream:
        for order in orders:
            queue_pass(stream, device, seen, order)
        device.synchronize()
        stats = stream.stats
    return seen, [i for order in orders for i in (pack.order if order is None else order)], stats


# ---- every order that matters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 10))
def test_a_streamed_pass_sees_what_a_resident_one_sees(packs, n):
    """Cases 1, 5: 1 to 9 blocks through 1 to 4 slots, three passes; streams as far out of step as events let them."""
    pack, expected = packs(n)
    for slots in range(1, 5):
        for seed, eager in enumerate(EAGER):
            device = SimulatedDevice(seed, eager)
            seen, order, stats = passes(pack, device_plan(pack, slots), device)
            assert not wrong(seen, expected, order), (slots, eager)
            assert stats.active and stats.link == "pinned" and stats.copied_bytes >= pack.nbytes
            assert stats.slot_bytes * stats.slots == stats.peak_bytes and stats.resident_bytes == 0
            assert device.waits >= 3 * n  # copy done, at least


LARGE = 5, 8  # pages of a block: more than a ring of four pages
LINKS = {"pinned": {}, "ring": {"pinnable": 4 * 4096}, "pageable": {"pinnable": 0}, "no_pin": {}}


@pytest.mark.parametrize("link", LINKS)
def test_every_kind_of_host_memory(packs, link, monkeypatch):
    """Cases 4, 42, 44: the host keeps all, some or nothing of what streams; page-locked memory or not."""
    monkeypatch.setattr("specdec_kernels.stream.uploads.PIECE", 4096)
    pack, expected = packs(7, LARGE)
    for seed, (eager, host_resident, host_slots) in enumerate(
        (e, kept, s) for e in EAGER for kept, s in ((None, 1), ((), 1), ((), 3), ((1, 4), 2))
    ):
        plan = device_plan(pack, 2, (3,), host_resident, host_slots)
        device = SimulatedDevice(seed, eager, **LINKS[link])
        seen, order, stats = passes(pack, plan, device, no_pin=link == "no_pin")
        assert not wrong(seen, expected, order), (eager, host_resident)
        assert stats.link == ("pageable" if link == "no_pin" else link)
        booked = {"pinned": plan.host.resident_bytes + plan.host.slots_bytes, "ring": 4 * 4096}.get(link, 0)
        assert stats.pinned_bytes == booked and not device.registered  # exact, and all given back
        read = sum(pack.blocks[i].nbytes for i in (*plan.resident, *plan.host.resident))
        assert stats.bytes_read > read if plan.host.slots else stats.bytes_read == read


def test_other_orders(packs):
    """Case 2: blocks left out, repeated, reversed, and passes that change: a wrong guess costs time only."""
    pack, expected = packs(6)
    rng = random.Random(0)
    orders = [(2, 0, 1), (5, 4, 3, 2, 1, 0), (0, 0, 1, 1, 5, 0), None, (4,), ()]
    orders += [tuple(rng.choices(range(6), k=rng.randrange(9))) for _ in range(20)]
    for seed, (eager, kept) in enumerate((e, k) for e in EAGER for k in (None, (), (0, 3))):
        for slots in (1, 3):
            device = SimulatedDevice(seed, eager)
            plan = device_plan(pack, slots, (2,), kept, 2)
            seen, order, _ = passes(pack, plan, device, orders)
            assert not wrong(seen, expected, order)


def test_a_slow_reader_and_passes_that_end_early(packs):
    """Case 5: reads come when they come; a pass is left, another raises, the next one is right."""
    pack, expected = packs(5)
    rng = random.Random(1)

    def pread(fd, view, offset):
        time.sleep(rng.random() / 500)
        data = os.pread(fd, len(view), offset)
        view[: len(data)] = data
        return len(data)

    device, seen = SimulatedDevice(3), []
    plan = device_plan(pack, 2, (), (), 2)
    with WeightStream(pack, plan, device=device, poison=True, engine="buffered", pread=pread) as stream:
        for block in stream.blocks():
            if block.index == 2:
                break
        with pytest.raises(ZeroDivisionError):
            for _ in stream.blocks((3, 1)):
                1 / 0  # noqa: B018
        for _ in range(3):
            queue_pass(stream, device, seen)
        device.synchronize()
    assert not wrong(seen, expected, list(pack.order) * 3)


def test_two_streams_of_one_device(packs):
    pack, expected = packs(5)
    device, seen = SimulatedDevice(5), ([], [])
    with stream_of(pack, device_plan(pack, 2), device) as a, stream_of(pack, device_plan(pack, 1, (0,)), device) as b:
        for _ in range(3):
            for one, other in zip(a.blocks(), b.blocks(), strict=True):
                use(device, one, seen[0])
                use(device, other, seen[1])
        device.synchronize()
    assert not wrong(seen[0], expected, list(pack.order) * 3) and not wrong(seen[1], expected, list(pack.order) * 3)


# ---- each event is needed ----------------------------------------------------------------------------------------

# The wait that is left out, the streams that run ahead, how the host keeps what streams.
FAULTS = {
    "work does not wait for the copy": ("copy done", "work", {}),
    "work does not wait for the copy, by chance": ("copy done", None, {}),
    "a copy does not wait for the work": ("slot free", "copies", {}),
    "a copy does not wait for the work, by chance": ("slot free", None, {}),
    "the host's slot is read over before it is copied": ("host", "work", {"host_resident": (), "host_slots": 1}),
    "a piece of the ring is written over before it is copied": ("host", "work", {"pinnable": 4 * 4096}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_wait_shows(packs, fault, monkeypatch):
    """Cases 3, 4, 7: with every wait the same passes are right, without one of them some numbers are wrong."""
    monkeypatch.setattr("specdec_kernels.stream.uploads.PIECE", 4096)
    pack, expected = packs(8, LARGE)
    without, eager, options = FAULTS[fault]
    options = dict(options)
    pinnable = options.pop("pinnable", None)
    plan = device_plan(pack, 2, **options)
    found = {}
    for left_out in ((), (without,)):
        found[left_out] = 0
        for seed in range(3):
            device = SimulatedDevice(seed, eager, left_out, pinnable)
            seen, order, _ = passes(pack, plan, device)
            found[left_out] += wrong(seen, expected, order)
    assert found[()] == 0 and found[without,] > 0


def test_a_stream_does_not_wait_for_what_is_queued_later(packs, monkeypatch):
    """Why ``wait`` holds the host until the copy is queued: an event that was not recorded holds nobody."""
    from specdec_kernels.stream import uploads

    pack, _ = packs(4)
    original = uploads.Upload.wait
    order = []

    def wait(self):
        order.append(self.copied is not None)
        original(self)
        assert self.copied is not None

    monkeypatch.setattr(uploads.Upload, "wait", wait)
    passes(pack, device_plan(pack, 2), SimulatedDevice(0))
    assert order


# ---- memory ------------------------------------------------------------------------------------------------------


def test_addresses_stay(packs):
    """Cases 60, 62: a block in the same slot has the same tensors at the same addresses, pass after pass."""
    pack, _ = packs(5)
    device, found = SimulatedDevice(0), {}
    with stream_of(pack, device_plan(pack, 3, (1,)), device) as stream:
        for _ in range(12):
            for block in stream.blocks():
                before = found.setdefault((block.index, block.slot), block.tensors)
                assert block.tensors is before
                assert isinstance(before["matrix"], Int8Weight)
        assert len({slot for _, slot in found}) == 4  # 3 and None: one that is resident


def test_slots_are_used_again_by_a_new_stream_without_growth(packs):
    """Case 60: opened 20 times, nothing is left behind: no thread, no registration, no copy under way."""
    pack, _ = packs(4)
    device, threads = SimulatedDevice(0), threads_of()
    for _ in range(20):
        passes(pack, device_plan(pack, 2, (0,), (1,), 1), device)
        assert not device.registered
    assert settled(threads_of, threads)


def test_shrinking_while_work_is_queued(packs):
    pack, expected = packs(8)
    for eager in EAGER:
        device, seen = SimulatedDevice(1, eager), []
        with stream_of(pack, device_plan(pack, 3, (0, 5), (2,), 2), device) as stream:
            queue_pass(stream, device, seen)
            for i, block in enumerate(stream.blocks()):
                use(device, block, seen)
                if i == 2:
                    assert stream.drop_slots() > 0
                if i == 4:
                    assert stream.drop_resident() > 0
            queue_pass(stream, device, seen)
            queue_pass(stream, device, seen)
            device.synchronize()
            assert stream.stats.slots == 2
        assert not wrong(seen, expected, list(pack.order) * 4)


def test_resident_blocks_alone(packs):
    """All of it fits the device: read, copied, and nothing is left running."""
    pack, expected = packs(5)
    device = SimulatedDevice(2, "work")
    threads = threads_of()
    with stream_of(pack, device_plan(pack, 1, tuple(range(5))), device) as stream:
        assert settled(threads_of, threads) and not stream.stats.active
        seen = []
        queue_pass(stream, device, seen)
        device.synchronize()
    assert not wrong(seen, expected, pack.order)


def test_a_damaged_block_never_reaches_a_pass(tmp_path):
    path = write_pack(tmp_path / "pack", 4)
    with Pack.open(path) as pack:
        place = pack.blocks[2].ranges[0].offset + 5
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    for kept in (None, ()):
        with Pack.open(path) as pack, stream_of(pack, device_plan(pack, 2, (), kept, 1), SimulatedDevice(0)) as stream:
            for _ in range(2):
                with pytest.raises(StreamError, match=r"block 2 \(layer.2\) is damaged"):
                    list(stream.blocks())
    with Pack.open(path) as pack, pytest.raises(StreamError, match="damaged"):
        stream_of(pack, device_plan(pack, 2, (2,)), SimulatedDevice(0))


def test_closed_while_blocks_are_on_their_way(packs):
    pack, _ = packs(6)
    device, threads = SimulatedDevice(0), threads_of()
    stream = stream_of(pack, device_plan(pack, 2, (), (), 2), device)
    running = stream.blocks()
    next(running)
    stream.close()
    with pytest.raises(StreamError, match="closed"):
        next(running)
    assert not device.registered and settled(threads_of, threads)


# ---- page-locked memory ------------------------------------------------------------------------------------------


def test_exactly_what_was_booked_is_locked():
    """Case 42: five units of an odd size lock five times that size, where powers of two would lock far more."""
    device, unit = SimulatedDevice(), 307 * 4096
    arena = Arena(device, 5 * unit, segment=256 * 4096)
    memories = [arena.empty(unit) for _ in range(5)]
    assert arena.locked == sum(device.registered.values()) == 5 * unit
    assert len(device.registered) == 6 and max(device.registered.values()) == 256 * 4096
    assert all(m.data_ptr() % 4096 == 0 and arena.takes(m) for m in memories)
    with pytest.raises(ValueError, match="expected at most 0, what is left"):
        arena.empty(1)
    arena.close()
    assert not device.registered and arena.locked == 0


def test_a_copy_never_spans_two_segments():
    """The simulated device refuses one that does."""
    device = SimulatedDevice(0)
    arena = Arena(device, 10 * 4096, segment=4 * 4096)
    source, target = arena.empty(10 * 4096), torch.zeros(10 * 4096, dtype=torch.uint8)
    source.copy_(torch.arange(10 * 4096) % 251)
    arena.copy(target, source, device.stream())
    device.synchronize()
    assert torch.equal(source, target) and device.copies == 3


@pytest.mark.parametrize("k", range(5))
def test_registration_that_fails_at_piece_k_is_undone(k):
    """Case 53: rolled back, the error is cleared, and the next launch is clean."""
    device = SimulatedDevice(pinnable=k * 4096)
    with pytest.raises(PinError, match="4096 bytes of page-locked host memory can't be had"):
        Arena(device, 5 * 4096, segment=4096)
    assert device.refused == 1 and not device.registered and not device.stuck
    device.launch(lambda: None)


def test_an_arena_that_is_forgotten_is_unregistered():
    device = SimulatedDevice()
    arena = Arena(device, 4096)
    assert device.registered
    del arena
    assert not device.registered


def test_refused_page_locks_are_said_once_and_the_ring_has_to_do(packs, caplog, monkeypatch):
    """Case 43: the message says what kind of memory it was, and the stream works."""
    pack, expected = packs(4, LARGE)
    monkeypatch.setattr("specdec_kernels.stream.uploads.PIECE", 4096)
    device = SimulatedDevice(0, pinnable=4 * 4096)
    plan = device_plan(pack, 2)
    with caplog.at_level(logging.WARNING, "specdec_kernels.stream"):
        seen, order, stats = passes(pack, plan, device)
    assert not wrong(seen, expected, order) and stats.link == "ring"
    (text,) = (record.getMessage() for record in caplog.records)
    assert "page-locked host memory can't be had: out of memory" in text and "through 16384 page-locked bytes" in text


def test_memory_that_device_and_host_share_is_not_locked(packs):
    """Case 44: there, page-locking takes memory from the device."""
    pack, expected = packs(4)
    device = SimulatedDevice(0)
    device.shares_memory = True
    seen, order, stats = passes(pack, device_plan(pack, 2), device)
    assert not wrong(seen, expected, order) and stats.link == "pageable" and device.refused == 0


def test_a_ring_waits_for_its_pieces():
    device, source = SimulatedDevice(0, "work"), torch.arange(50_000).to(torch.uint8)
    ring, stream, target = Ring(device, 4096, 2), device.stream(), torch.zeros(50_000, dtype=torch.uint8)
    ring.copy(target, source, stream)
    again = source.clone()
    source.fill_(7)  # the ring has it all
    device.synchronize()
    assert torch.equal(target, again) and ring.locked == 8192
    ring.close()
    assert not device.registered
