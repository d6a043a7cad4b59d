"""Streamed weights are the bits of the file: any number of blocks and slots, any order, any engine, any timing.

Slots that are free hold 0xFF here, so a block that is used too late or too early is not what the file holds.
Numbers: reports on streaming.
"""

import gc
import random
import threading
import time
from dataclasses import replace

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import pack_int8
from specdec_kernels.stream import Pack, PackWriter, StreamError, WeightStream, plan
from specdec_kernels.stream.slots import reads_per_pass
from streams import (
    Reads,
    contents,
    opened,
    page_aligned,
    parts,
    plan_of,
    run_pass,
    same,
    settle,
    streamed_bytes,
    write_pack,
)  # fmt: skip


@pytest.mark.parametrize("slots", range(1, 5))
@pytest.mark.parametrize("count", range(1, 10))
def test_report_1_every_number_of_blocks_and_slots(packs, count, slots):
    pack, expected = packs(count)
    for resident in ((), range(0, count, 3)):
        if len(resident) == count:
            continue
        with opened(pack, slots, resident, pread=Reads(delay=0.0005, seed=slots)) as stream:
            for number in range(3):
                assert run_pass(stream, expected) == list(range(count))
                stats = stream.stats
                assert stats.passes == number + 1 and stats.active
                assert stats.streamed_bytes == (number + 1) * streamed_bytes(pack, range(count), resident)
            assert stats.resident_bytes == pack.nbytes - streamed_bytes(pack, range(count), resident)
            assert stats.dropped == 0
            if count - len(resident) > slots:
                assert stats.reused > 0
                assert stats.bytes_read >= stats.resident_bytes + stats.streamed_bytes


@pytest.mark.parametrize("slots", range(1, 5))
@pytest.mark.parametrize("count", [3, 4, 8])
def test_report_2_orders_that_nobody_foresaw(packs, count, slots):
    """Blocks left out, repeated, turned round, in another order every time, passes broken off in between."""
    pack, expected = packs(count)
    rng = random.Random(10 * count + slots)
    with opened(pack, slots, [1], pread=Reads(delay=0.0005)) as stream:
        for _ in range(25):
            order = rng.choice(
                [
                    list(range(count)),
                    list(reversed(range(count))),
                    [index for index in range(count) if rng.random() < 0.6],
                    [rng.randrange(count) for _ in range(rng.randrange(12))],
                    [0, 0, 2, 2, 2, 0],
                ]
            )
            assert run_pass(stream, expected, order) == order
            for block in stream.blocks():
                assert same(parts(block.tensors), expected[block.index])
                if rng.random() < 0.3:
                    break
        assert stream.stats.dropped > 0 or count <= slots + 1


def test_report_2_a_model_that_skips_a_block_on_odd_passes(packs):
    pack, expected = packs(4)
    with opened(pack, 2) as stream:
        for number in range(6):
            order = [2, 0, 1] if number % 2 else [2, 0, 1, 3]
            assert run_pass(stream, expected, order) == order


@pytest.mark.parametrize("engine", ["io_uring", "direct", "buffered"])
@pytest.mark.parametrize("verify", [True, False])
def test_report_4_the_same_bits_whatever_reads_them(packs, engine, verify):
    pack, expected = packs(7)
    try:
        stream = WeightStream(pack, plan_of(pack, 2, [3]), engine=engine, verify=verify, poison=True)
    except StreamError as error:
        pytest.skip(f"this system or its file system has no {engine}: {error}")
    with stream:
        for order in (None, None, [6, 1, 1, 0], None):
            run_pass(stream, expected, order)
        assert stream.stats.engine == engine


def test_report_5_slow_reads_change_nothing_but_the_time(packs):
    pack, expected = packs(5)
    reads = Reads()
    with opened(pack, 2, pread=reads, threads=1) as stream:
        run_pass(stream, expected)
        reads.delay, start, before = 0.1, time.perf_counter(), stream.stats.wait_seconds
        for _ in range(2):
            run_pass(stream, expected)
        assert 0.1 < stream.stats.wait_seconds - before <= time.perf_counter() - start


def test_report_3_a_slot_is_filled_again_only_after_its_block_was_used(packs):
    """The reader has all the time it wants, and still does not touch the block in use."""
    pack, expected = packs(6)
    with opened(pack, 3) as stream:
        for block in stream.blocks():
            before = stream.stats.bytes_read
            deadline = time.monotonic() + 0.02
            while time.monotonic() < deadline and stream.stats.bytes_read == before:
                time.sleep(0.002)
            assert same(parts(block.tensors), expected[block.index])


def test_report_3_a_block_that_was_kept_too_long_is_known(packs):
    pack, _ = packs(5)
    with opened(pack, 2, [4]) as stream:
        kept = []
        for block in stream.blocks():
            stream.check(block)
            for old in kept:
                if old.slot is None:
                    stream.check(old)
                    continue
                with pytest.raises(StreamError, match=rf"block {old.index} \(layer.{old.index}\): no longer in slot"):
                    stream.check(old)
            kept.append(block)
        for _ in stream.blocks():
            pass
        # The same block in the same slot again is another filling.
        again = [block for block in stream.blocks() if (block.index, block.slot) == (kept[0].index, kept[0].slot)]
        assert all(block.generation != kept[0].generation for block in again)


def test_free_slots_are_poisoned(packs):
    """The test above would prove little otherwise."""
    pack, _ = packs(3)
    reads = Reads()
    with opened(pack, 1, pread=reads) as stream:
        iterator = stream.blocks()
        block = next(iterator)
        reads.gate = threading.Event()
        threading.Timer(0.05, reads.gate.set).start()
        view = block.tensors["bytes"]
        assert not bool((view == 0xFF).all())
        iterator.close()
        assert bool((view == 0xFF).all())


def test_report_7_tensors_outlive_the_stream(packs):
    pack, expected = packs(4)
    stream = opened(pack, 2, [0])
    blocks = [block for block in stream.blocks() if block.slot is None]
    block = next(stream.blocks([2]))
    stream.close()
    del stream
    gc.collect()
    assert same(parts(blocks[0].tensors), expected[0])
    assert block.tensors["bytes"].numel() and bool((block.tensors["bytes"] == 0xFF).all())


def test_the_same_objects_for_the_same_block_in_the_same_slot(packs):
    """Who recorded calls on them can run those again."""
    pack, _ = packs(4)
    with opened(pack, 2, [1]) as stream:
        seen = {}
        for _ in range(6):
            for block in stream.blocks():
                first = seen.setdefault((block.index, block.slot), block.tensors)
                assert all(first[name] is block.tensors[name] for name in first)
        assert len(seen) > 4


def test_what_kernels_make_of_streamed_weights_is_bit_equal(packs):
    pack, _ = packs(6)
    x = torch.randn(5, 32)

    def outputs(stream):
        return torch.cat([sk.linear_int8(x, block.tensors["matrix"]) for block in stream.blocks()])

    with opened(pack, 2) as stream, WeightStream(pack, plan_of(pack, 0, range(6))) as resident:
        assert resident.stats.active is False and stream.stats.active
        for _ in range(3):
            assert torch.equal(outputs(stream), outputs(resident))


def test_report_62_padding_is_the_files(packs):
    """24 rows are two panels of 16: what is behind them is zero, though the slots were full of other bytes."""
    pack, _ = packs(6)
    with opened(pack, 2) as stream:
        for _ in range(2):
            for block in stream.blocks():
                matrix = block.tensors["matrix"]
                assert matrix.shape == (24, 32) and matrix.codes.shape == (2, 8, 16, 4)
                assert bool((matrix.codes[1, :, 8:] == 128).all()) and bool((matrix.scale[1, :, 8:] == 0).all())


def test_report_9_a_tied_matrix_is_read_once(packs):
    """Embedding and head are the same blocks: rows come from the file, the pass reads each block once."""
    pack, _ = packs(5)
    memories = [page_aligned(block.nbytes) for block in pack.blocks]
    whole = torch.cat([pack.read_block(i, memories[i])["matrix"].dequantize() for i in range(5)])
    ids = torch.tensor([0, 119, 24, 23, 24])
    with opened(pack, 2) as stream:
        for _ in range(2):
            out = torch.empty(5, 32)
            stream.rows("embedding", ids, out)
            assert torch.equal(out, whole[ids])
            for _ in stream.blocks():
                pass
        stats = stream.stats
        assert stats.streamed_bytes == 2 * pack.nbytes
        assert stats.row_bytes > 0


def test_rows_are_the_same_bits_from_memory_and_from_the_file(tmp_path):
    """int8 and bfloat16 matrices in one part and in several, also of a block that no pass needs."""
    generator = torch.Generator().manual_seed(0)
    parts = [pack_int8(torch.randn(40, 64, generator=generator), group_size=32, rotate=True) for _ in range(3)]
    floats = torch.randn(50, 64, generator=generator).bfloat16()
    with PackWriter(tmp_path / "a.safetensors") as writer:
        for i, part in enumerate(parts):
            writer.add_block(f"head.{i}", {"weight": part})
        writer.add_block("more", {"floats": floats, "int8": parts[0]}, in_order=False)
        writer.matrix("head", [(f"head.{i}", "weight") for i in range(3)])
        writer.matrix("floats", [("more", "floats")])
        writer.matrix("int8", [("more", "int8")])
    whole = {"head": torch.cat([part.dequantize() for part in parts]), "floats": floats.float()}
    whole["int8"] = parts[0].dequantize()
    with Pack.open(tmp_path / "a.safetensors") as pack:
        made = plan(pack, budget=pack.nbytes)
        plans = [made, replace(made, mapped=False), plan_of(pack, 1), plan_of(pack, 1, [0, 2])]
        for number, each in enumerate(plans):
            with WeightStream(pack, each) as stream:
                before = pack.row_bytes
                for ids in ([], [3], [0, 39, 3, 3], [0, 119, 40, 79, 80, 7], [85, 86]):
                    for matrix, right in whole.items():
                        chosen = torch.tensor(ids, dtype=torch.int64) % len(right)
                        out = torch.full((len(ids), 64), 7.0)
                        stream.rows(matrix, chosen, out)
                        assert torch.equal(out, right[chosen])
                mapped = number == 0 and sk.native.cpu is not None
                assert (pack.row_bytes == before) == mapped  # only what is mapped has blocks that no pass needs
                for wrong in (-1, 120):
                    with pytest.raises((ValueError, IndexError), match=str(wrong)):
                        stream.rows("head", torch.tensor([0, wrong]), torch.empty(2, 64))
                with pytest.raises(ValueError, match="matrix: expected one of this pack's"):
                    stream.rows("heads", torch.tensor([0]), torch.empty(1, 64))
                if number == 1:
                    before = pack.row_bytes
                    stream.rows("head", torch.tensor([0, 100]), torch.empty(2, 64))
                    assert pack.row_bytes == before


def test_rows_after_blocks_were_dropped(packs):
    pack, _ = packs(5)
    ids, out = torch.tensor([0, 119, 24, 50]), torch.empty(4, 32)
    with opened(pack, 1, [0, 1, 2, 3]) as stream:
        right = pack.rows("embedding", ids)
        stream.rows("embedding", ids, out)
        assert torch.equal(out, right)
        stream.drop_resident(4)
        stream.rows("embedding", ids, out.zero_())
        assert torch.equal(out, right)


def test_report_52_streaming_that_was_asked_for_happens(tmp_path):
    """A plan below the weights' size reads from the file in every pass and holds less than the weights."""
    path = write_pack(tmp_path / "a.safetensors", 8)
    with Pack.open(path) as pack:
        total = pack.nbytes
        made = plan(path, budget=total * 2 // 3, reserved={"kv": 5000}, slots=2)
        assert made.bytes_per_pass > 0
        with WeightStream(path, made) as stream:
            for _ in range(2):
                run_pass(stream, contents(pack))
            stats = stream.stats
        assert stats.active and stats.engine in ("io_uring", "direct", "buffered")
        assert stats.bytes_read >= made.resident_bytes + 2 * made.bytes_per_pass
        assert stats.streamed_bytes == 2 * made.bytes_per_pass
        assert 0 < stats.resident_bytes < total
        assert stats.peak_bytes + 5000 == made.total_bytes <= made.budget


@pytest.mark.parametrize("slots", [1, 3])
def test_bytes_per_pass_are_the_planned_ones(packs, slots):
    """Once reading ahead is as far before a pass as after it."""
    pack, expected = packs(9)
    with opened(pack, slots, [2, 5]) as stream:
        run_pass(stream, expected)
        read = []
        for _ in range(3):
            settle(stream)
            read.append(stream.stats.bytes_read)
            run_pass(stream, expected)
        assert read[1] - read[0] == read[2] - read[1] == stream.plan.bytes_per_pass
        assert stream.plan.bytes_per_pass == streamed_bytes(pack, range(9), [2, 5])


def test_the_next_pass_begins_while_the_caller_does_something_else(packs):
    pack, expected = packs(8)
    reads = Reads()
    with opened(pack, 3, pread=reads) as stream:
        run_pass(stream, expected)
        settle(stream)
        ahead = stream.stats.bytes_read - stream.stats.streamed_bytes
        assert ahead == sum(pack.blocks[index].nbytes for index in range(3))  # all slots, of the blocks that come first
        count = len(reads.reads)
        reads.gate = threading.Event()  # from here on nothing is read
        iterator = stream.blocks()
        for index in range(3):
            assert same(parts(next(iterator).tensors), expected[index])
        assert len(reads.reads) <= count + 2
        reads.gate.set()
        assert [block.index for block in iterator] == [3, 4, 5, 6, 7]


def test_report_66_67_a_pass_reads_what_it_uses_and_that_once(packs):
    """As a mixture of experts would: another set of blocks each time, each read once however many rows want it."""
    pack, expected = packs(9)
    rng = random.Random(4)
    with opened(pack, 1) as stream:  # one slot reads nothing ahead within a pass but the next block
        for _ in range(6):
            union = sorted(rng.sample(range(9), rng.randint(2, 6)))
            before = stream.stats
            run_pass(stream, expected, union)
            after = stream.stats
            assert after.streamed_bytes - before.streamed_bytes == streamed_bytes(pack, union)
            fills = after.reused - before.reused - (after.dropped - before.dropped)
            assert fills <= len(union) + 1


def test_a_block_that_comes_again_soon_is_not_read_again(packs):
    pack, expected = packs(6)
    with opened(pack, 3) as stream:
        order = [0, 0, 1, 0, 2, 3, 3, 4, 3, 5]
        run_pass(stream, expected, order)
        settle(stream)
        before = stream.stats.bytes_read
        run_pass(stream, expected, order)
        settle(stream)
        assert stream.stats.bytes_read - before == pack.nbytes
        assert reads_per_pass(order, (), 3) == [3, 4, 5, 0, 1, 2]


def test_report_72_a_pass_after_a_rejected_one_sees_the_same_blocks(packs):
    """What was read ahead belongs to the file, not to the tokens of the pass before."""
    pack, expected = packs(5)
    with opened(pack, 4) as stream:
        for _ in range(4):
            run_pass(stream, expected)  # verifies drafts, which are rejected
            run_pass(stream, expected, [0, 1, 2])  # layers without the head
            for _ in stream.blocks():  # broken off after the first block
                break


def test_orders_that_are_none(packs):
    pack, _ = packs(3)
    with opened(pack, 1, [0]) as stream:
        for order in ([3], [-1], [0, 1.0], [True], ["layer.0"]):
            with pytest.raises(ValueError, match="order: expected indexes of blocks that the plan has"):
                stream.blocks(order)
        assert list(stream.blocks([])) == []
