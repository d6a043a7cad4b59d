"""Streaming to a device, on a simulated one whose streams get out of step: every order that matters is kept, and each
event that keeps one is needed."""

import ctypes
import errno
import functools
import logging
import os
import random
import time

import pytest
import torch

from simulated_device import SimulatedDevice
from specdec_kernels import Int8Weight, expand
from specdec_kernels.stream import Pack, StreamError, WeightStream, plan
from streams import contents, device_plan, parts, plan_of, same, settled, threads_of, write_pack

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


def stream_of(pack, planned, device, **options):
    return WeightStream(pack, planned, device=device, poison=True, **{"engine": "buffered", **options})


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


def passes(pack, planned, device, orders=(None,) * 3, **options):
    """(what the device saw, in which order it should have, the statistics after that)"""
    seen = []
    with stream_of(pack, planned, device, **options) as stream:
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
        planned = device_plan(pack, 2, (3,), host_resident, host_slots)
        device = SimulatedDevice(seed, eager, **LINKS[link])
        seen, order, stats = passes(pack, planned, device, no_pin=link == "no_pin")
        assert not wrong(seen, expected, order), (eager, host_resident)
        assert stats.link == ("pageable" if link == "no_pin" else link)
        booked = {"pinned": planned.host.resident_bytes + planned.host.slots_bytes, "ring": 4 * 4096}.get(link, 0)
        assert stats.pinned_bytes == booked and not device.registered  # exact, and all given back
        read = sum(pack.blocks[i].nbytes for i in (*planned.resident, *planned.host.resident))
        assert stats.bytes_read > read if planned.host.slots else stats.bytes_read == read


def test_other_orders(packs):
    """Case 2: blocks left out, repeated, reversed, and passes that change: a wrong guess costs time only."""
    pack, expected = packs(6)
    rng = random.Random(0)
    orders = [(2, 0, 1), (5, 4, 3, 2, 1, 0), (0, 0, 1, 1, 5, 0), None, (4,), ()]
    orders += [tuple(rng.choices(range(6), k=rng.randrange(9))) for _ in range(20)]
    for seed, (eager, kept) in enumerate((e, k) for e in EAGER for k in (None, (), (0, 3))):
        for slots in (1, 3):
            device = SimulatedDevice(seed, eager)
            planned = device_plan(pack, slots, (2,), kept, 2)
            seen, order, _ = passes(pack, planned, device, orders)
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
    planned = device_plan(pack, 2, (), (), 2)
    with WeightStream(pack, planned, device=device, poison=True, engine="buffered", pread=pread) as stream:
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


@pytest.mark.parametrize("eager", EAGER)
def test_a_tied_matrix_that_is_used_first_and_last(packs, eager):
    """Case 9: one owner, whatever the number of slots, over several passes."""
    pack, expected = packs(6)
    order = (5, 0, 1, 2, 3, 4, 5)
    for slots, kept in ((1, None), (2, ()), (2, None), (3, (5,))):
        seen, wanted, _ = passes(pack, device_plan(pack, slots, (), kept, 2), SimulatedDevice(1, eager), (order,) * 3)
        assert not wrong(seen, expected, wanted)


@pytest.mark.parametrize("eager", EAGER)
def test_two_devices_and_budgets_around_the_size_of_a_slot(packs, eager):
    """Case 10: slots belong to one device; whether anything streams changes no bit."""
    pack, expected = packs(6)
    least = plan(pack, device="cuda", budget=pack.nbytes).minimum
    budgets = {least + d for d in (0, 4096, 8192)} | {pack.nbytes - d for d in (4096, 1, 0)}
    for budget in sorted(budgets):
        devices = [SimulatedDevice(2, eager), SimulatedDevice(3, eager)]
        planned = plan(pack, device="cuda", budget=budget, host_budget=pack.nbytes)
        assert planned.total_bytes <= budget
        seen = [], []
        with stream_of(pack, planned, devices[0]) as a, stream_of(pack, planned, devices[1]) as b:
            for _ in range(3):
                for one, other in zip(a.blocks(), b.blocks(), strict=True):
                    use(devices[0], one, seen[0])
                    use(devices[1], other, seen[1])
            for device in devices:
                device.synchronize()
            assert a.stats.active == b.stats.active == (budget < pack.nbytes)
            assert a.stats.peak_bytes <= budget
        assert not any(wrong(found, expected, list(pack.order) * 3) for found in seen)


def read_memory(index, place, seen):
    seen.append((index, ctypes.string_at(*place)))


def test_memory_outlives_the_tensors_of_a_block(packs):
    """Case 7: nobody holds a tensor when the device comes to the work; memory belongs to the slot."""
    pack, expected = packs(6)
    for eager in EAGER:
        device, seen = SimulatedDevice(4, eager), []
        with stream_of(pack, device_plan(pack, 2, (1,)), device) as stream:
            for _ in range(3):
                for block in stream.blocks():
                    vector = block.tensors["vector"]
                    place = vector.data_ptr(), vector.nbytes
                    del vector
                    device.launch(functools.partial(read_memory, block.index, place, seen))
                    del block
            device.synchronize()
        for index, found in seen:
            assert found == expected[index]["vector"][0].numpy().tobytes()


def test_conversions_come_behind_the_copy(packs):
    """Case 8: int8 becomes bf16 in one scratch matrix for all blocks, by work like any other."""
    pack, _ = packs(6)
    scratch, wanted = torch.empty(24, 32, dtype=torch.bfloat16), []
    with WeightStream(pack, plan_of(pack, 1, range(6))) as stream:
        for block in stream.blocks():
            wanted.append(block.tensors["matrix"].dequantize().bfloat16())
    for eager in EAGER:
        device, seen = SimulatedDevice(5, eager), []
        with stream_of(pack, device_plan(pack, 2), device) as stream:
            for _ in range(3):
                for block in stream.blocks():
                    device.launch(functools.partial(expand, block.tensors["matrix"], out=scratch))
                    device.launch(lambda seen=seen: seen.append(scratch.clone()))
            device.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(seen, wanted * 3, strict=True))


def test_a_read_that_fails_once(packs):
    """Whatever keeps the block on the host, the pass raises, and the next one tries again."""
    pack, expected = packs(5)
    place = pack.blocks[3].ranges[0].offset
    for kept in (None, (), (3,)):
        broken, seen, device = [True], [], SimulatedDevice(6)

        def pread(fd, view, offset, broken=broken):
            if offset == place and broken:
                broken.clear()
                raise OSError(errno.EIO, "Input/output error")
            data = os.pread(fd, len(view), offset)
            view[: len(data)] = data
            return len(data)

        with stream_of(pack, device_plan(pack, 2, (), kept, 2), device, pread=pread) as stream:
            with pytest.raises(StreamError, match="Input/output error"):
                list(stream.blocks())
            for _ in range(2):
                queue_pass(stream, device, seen)
            device.synchronize()
        assert not broken and not wrong(seen, expected, list(pack.order) * 2)


@pytest.mark.parametrize("opened, used", [(True, False), (False, True), (True, True)])
def test_inference_mode(packs, opened, used):
    """A mode of the thread: memory that was made in it must not be refused to the thread that copies."""
    pack, expected = packs(5)
    for pinnable in (None, 0):
        device, seen = SimulatedDevice(0, pinnable=pinnable), []
        with torch.inference_mode(opened):
            stream = stream_of(pack, device_plan(pack, 2, (0,), (), 2), device)
        with stream, torch.inference_mode(used):
            for _ in range(3):
                queue_pass(stream, device, seen)
            device.synchronize()
        assert not wrong(seen, expected, list(pack.order) * 3)


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
    planned = device_plan(pack, 2, **options)
    found = {}
    for left_out in ((), (without,)):
        found[left_out] = 0
        for seed in range(3):
            device = SimulatedDevice(seed, eager, left_out, pinnable)
            seen, order, _ = passes(pack, planned, device)
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


# ---- page-locked memory that can't be had ---------------------------------------------------------------------------


def test_refused_page_locks_are_said_once_and_the_ring_has_to_do(packs, caplog, monkeypatch):
    """Case 43: the message says what kind of memory it was, and the stream works."""
    pack, expected = packs(4, LARGE)
    monkeypatch.setattr("specdec_kernels.stream.uploads.PIECE", 4096)
    device = SimulatedDevice(0, pinnable=4 * 4096)
    planned = device_plan(pack, 2)
    with caplog.at_level(logging.WARNING, "specdec_kernels.stream"):
        seen, order, stats = passes(pack, planned, device)
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
