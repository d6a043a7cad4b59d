"""What streams take: memory as planned, nothing left when they are closed, something given back when it is asked for.

Numbers: reports on streaming.
"""

import gc
import os
import subprocess
import sys
import time

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels.stream import Pack, WeightStream, footprint, plan
from streams import (
    PAGE,
    descriptors_of,
    opened,
    page_aligned,
    parts,
    run_pass,
    same,
    settled,
    threads_of,
    write_pack,
)


def test_report_42_booked_is_allocated(tmp_path):
    """Sizes that are no powers of two: what the plan books is what the slots and resident blocks have."""
    path = write_pack(tmp_path / "a.safetensors", 5, pages=(11, 13))
    with Pack.open(path) as pack:
        made = plan(pack, budget=pack.nbytes - PAGE, slots=2)
        before = footprint().owned
        with WeightStream(pack, made) as stream:
            for _ in stream.blocks():
                pass
            assert stream.stats.peak_bytes == made.resident_bytes + 2 * made.slot_bytes == made.total_bytes
            assert footprint().owned - before < made.total_bytes + (8 << 20)


CHILD = """
import sys, resource, torch
from specdec_kernels.stream.footprint import footprint
from specdec_kernels.stream.pack import Pack
from specdec_kernels.stream.plan import plan
from specdec_kernels.stream.weight_stream import WeightStream
"""


def child(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def sparse_model(path, blocks, nbytes):
    """A plain safetensors file full of holes: it takes no room on the disk."""
    import json

    header, at = {}, 0
    for i in range(blocks):
        header[f"w{i}"] = {"dtype": "BF16", "shape": [nbytes // 2], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text = text.ljust(-(-(8 + len(text)) // PAGE) * PAGE - 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def test_report_46_51_memory_stays_under_the_budget(tmp_path):
    """A model of 2 GB under a budget of 100 MB, by what the process owns: nothing is collected, nothing copied."""
    sparse_model(tmp_path / "big.safetensors", 64, 32 << 20)
    before = sorted(os.listdir(tmp_path))
    code = """
layout = [(f"b{i}", [("w", [f"w{i}"])]) for i in range(64)]
pack = Pack.from_safetensors([sys.argv[1]], layout)
base = footprint().owned
made = plan(pack, budget="100MB", slots=2)
peak = 0
with WeightStream(pack, made) as stream:
    for block in stream.blocks(pack.order[:12]):
        assert block.tensors["w"].view(torch.int64).sum() == 0  # needs no memory of its own
        peak = max(peak, footprint().owned - base)
    stats = stream.stats
print(peak, stats.peak_bytes, stats.streamed_bytes, made.bytes_per_pass)
"""
    peak, booked, streamed, planned = map(int, child(code, tmp_path / "big.safetensors"))
    assert booked <= 100e6 and planned == 64 * (32 << 20)
    assert streamed == 12 * (32 << 20)
    assert 64 << 20 < peak < booked + (24 << 20)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_process_that_ends_without_closing_ends(tmp_path):
    """While its threads read and check, in the middle of a pass."""
    path = write_pack(tmp_path / "a.safetensors", 6)
    code = """
from specdec_kernels.stream import Pack
pack = Pack.open(sys.argv[1])
stream = WeightStream(pack, plan(pack, budget=pack.nbytes - 4096, slots=2), limit=100_000)
passing = stream.blocks()
print(next(passing).name)
"""
    start = time.monotonic()
    assert child(code, path) == ["layer.0"]
    assert time.monotonic() - start < 60


def test_the_predicted_time_of_a_throttled_pass(tmp_path):
    """Reading that is held to a rate: the plan says how long a pass takes."""
    path, limit = write_pack(tmp_path / "a.safetensors", 12, pages=(60, 70)), 8e6
    with Pack.open(path) as pack:
        made = plan(pack, budget=pack.nbytes * 2 // 3, slots=2)
        with WeightStream(pack, made, limit=limit) as stream:
            reading = [timed(stream, 0.0) for _ in range(4)]
            working = [timed(stream, 0.025) for _ in range(3)]  # longer than reading: a pass takes what the work takes
    predicted = made.predict(limit, 0.0)
    assert 0.1 < predicted < 0.3
    assert predicted == pytest.approx(min(reading[1:]), rel=0.15)
    assert made.predict(limit, 12 * 0.025) == pytest.approx(min(working[1:]), rel=0.15)


def timed(stream, work):
    start = time.perf_counter()
    for _ in stream.blocks():
        time.sleep(work)
    return time.perf_counter() - start


def test_report_50_no_right_to_lock_memory_is_needed(tmp_path):
    path = write_pack(tmp_path / "a.safetensors", 6)
    code = """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
with Pack.open(sys.argv[1]) as pack:
    with WeightStream(pack, plan(pack, budget=pack.nbytes - 4096, slots=1)) as stream:
        print(sum(int(block.tensors["bytes"].sum()) for block in stream.blocks()))
"""
    with Pack.open(path) as pack:
        memory = [page_aligned(block.nbytes) for block in pack.blocks]
        total = sum(int(pack.read_block(i, memory[i])["bytes"].sum()) for i in range(6))
    assert child(code, path) == [str(total)]


def test_report_51_kinds_of_memory_are_told_apart():
    before = footprint()
    kept = torch.ones(32 << 20, dtype=torch.uint8)
    after = footprint()
    assert after.anonymous - before.anonymous > 24 << 20
    assert after.owned == after.anonymous + after.shared
    assert abs(after.files - before.files) < 8 << 20
    del kept
    assert footprint(os.getpid()).owned > 0


def test_report_60_64_opening_and_closing_leaves_nothing(packs):
    """Threads, descriptors and memory, also after an exception in the middle of a pass."""
    pack, expected = packs(9)

    def use(number):
        with opened(pack, 2, [1, 4]) as stream:
            if number % 3 == 0:
                run_pass(stream, expected)
            elif number % 3 == 1:
                with pytest.raises(RuntimeError, match="in between"):
                    for block in stream.blocks():
                        if block.index == 3:
                            raise RuntimeError("in between")
            else:
                iterator = stream.blocks()
                next(iterator)  # and never again

    for number in range(3):
        use(number)
    gc.collect()
    threads, descriptors, memory = threads_of(), descriptors_of(), footprint().owned
    for number in range(60):
        use(number)
    assert settled(threads_of, threads) and descriptors_of() == descriptors
    assert footprint().owned - memory < 4 << 20


def test_a_stream_that_nobody_closed(packs):
    pack, _ = packs(4)
    threads, descriptors = threads_of(), descriptors_of()
    stream = opened(pack, 2)
    next(stream.blocks())
    with pytest.warns(ResourceWarning, match="not closed"):
        del stream
        gc.collect()
    assert settled(threads_of, threads) and descriptors_of() == descriptors


# Giving memory back.


def test_dropping_slots_and_resident_blocks(packs):
    pack, expected = packs(9)
    with opened(pack, 4, [0, 2, 4, 6, 8]) as stream:
        run_pass(stream, expected)
        slot, before = stream.plan.slot_bytes, stream.stats
        assert stream.drop_slots(2) == 2 * slot
        assert stream.stats.slots == 2
        run_pass(stream, expected)
        assert stream.drop_slots(9) == slot  # one stays
        run_pass(stream, expected)
        freed = stream.drop_resident(2)
        assert freed > 0 and stream.stats.resident_bytes == before.resident_bytes - freed
        for _ in range(2):
            run_pass(stream, expected)
        stream.drop_resident(100)
        run_pass(stream, expected)
        kept = [index for index in (0, 2, 4, 6, 8) if pack.blocks[index].nbytes > slot]
        assert stream.stats.resident_bytes == sum(pack.blocks[index].nbytes for index in kept)
        assert stream.drop_resident() == 0 and stream.drop_slots() == 0


def test_dropping_in_the_middle_of_a_pass(packs):
    pack, expected = packs(9)
    with opened(pack, 4, [0, 3, 6]) as stream:
        for number in range(4):
            for block in stream.blocks():
                if number and block.index == 4 - number:
                    (stream.drop_slots if number % 2 else stream.drop_resident)(number)
                assert same(parts(block.tensors), expected[block.index])
        run_pass(stream, expected)


def test_shrinking_goes_from_what_is_needed_least(packs):
    pack, expected = packs(9)
    with opened(pack, 4, [0, 3, 6]) as stream:
        before = stream.stats
        assert stream.shrink(1) == stream.plan.slot_bytes and stream.stats.slots == 3
        assert stream.shrink(stream.plan.slot_bytes + 1) > stream.plan.slot_bytes
        assert stream.stats.slots == 2 and stream.stats.resident_bytes < before.resident_bytes
        everything = stream.shrink(1 << 40)
        assert 0 < everything < 1 << 40
        assert stream.stats.slots == 1
        run_pass(stream, expected)
        assert stream.shrink(1) == 0


def test_nothing_to_drop_where_nothing_streams(packs):
    pack, expected = packs(3)
    with opened(pack, 0, range(3)) as stream:
        assert stream.drop_slots() == stream.drop_resident() == stream.shrink(1) == 0
        run_pass(stream, expected)


def test_everything_resident_needs_no_threads(packs):
    pack, expected = packs(4)
    threads, descriptors = threads_of(), descriptors_of()
    with opened(pack, 0, range(4)) as stream:
        assert settled(threads_of, threads) and descriptors_of() == descriptors
        stats = stream.stats
        assert not stats.active and stats.bytes_read == stats.resident_bytes == pack.nbytes
        run_pass(stream, expected)
        assert stream.stats.bytes_read == pack.nbytes


def test_what_fits_is_mapped(packs):
    if sk.native.cpu is None:
        pytest.skip("needs the compiled module")
    pack, expected = packs(4)
    with WeightStream(pack, plan(pack, budget=pack.nbytes)) as stream:
        assert stream.plan.mapped and not stream.stats.active
        for _ in range(2):
            run_pass(stream, expected)
        assert stream.stats.resident_bytes == pack.nbytes


def test_progress_while_resident_blocks_load(packs):
    pack, _ = packs(8)
    seen = []
    with opened(pack, 1, [0, 2, 5], progress=seen.append):
        assert len(seen) == 3 and seen == sorted(seen) and seen[-1] == 1.0

    def stop(fraction):
        raise KeyboardInterrupt

    threads = threads_of()
    with pytest.raises(KeyboardInterrupt):
        opened(pack, 1, [0, 2, 5], progress=stop)
    assert settled(threads_of, threads)
