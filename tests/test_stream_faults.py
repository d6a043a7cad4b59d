"""Streams when things go wrong: files that change, reads that fail, passes that break off, forks. Numbers: reports."""

import errno
import os
import random
import signal
import threading
import time

import pytest
import torch

import specdec_kernels as sk
from readers import Disk, Gate
from specdec_kernels.stream import Pack, StreamError, WeightStream, plan
from streams import (
    PAGE,
    contents,
    descriptors_of,
    parts,
    plan_of,
    run_pass,
    same,
    settle,
    settled,
    threads_of,
    write_pack,
)


@pytest.fixture
def model(tmp_path):
    """(path, pack, contents) of a pack of six blocks that the test may damage."""
    path = write_pack(tmp_path / "model.safetensors", 6)
    with Pack.open(path) as pack:
        yield path, pack, contents(pack)


def opened(pack, slots=2, resident=(), **options):
    return WeightStream(pack, plan_of(pack, slots, resident), poison=True, **{"pread": Disk(), **options})


def rewrite(path, offset, data):
    """In place, as an editor or a download would."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path, pack, index):
    """Damages a byte of block ``index``."""
    at = pack.blocks[index].ranges[0].offset + 100
    with open(path, "rb") as file:
        file.seek(at)
        old = file.read(1)
    rewrite(path, at, bytes([old[0] ^ 0x10]))


# The file.


@pytest.mark.parametrize("resident", [(), (0, 3)])
def test_report_28_a_file_that_is_replaced_or_deleted_stays_readable(model, tmp_path, resident):
    """The stream holds the file, not its name: it goes on with the old weights, and a new stream has the new ones."""
    path, pack, expected = model
    with opened(pack, 2, resident) as stream:
        for number, block in enumerate(stream.blocks()):
            if number == 2:
                os.replace(write_pack(tmp_path / "new.safetensors", 6, seed=1), path)
            assert same(parts(block.tensors), expected[block.index])
        run_pass(stream, expected)
        with Pack.open(path) as new:  # report 61: a reload reads the disk again
            fresh = contents(new)
            assert not same(fresh[0], expected[0])
            with opened(new) as other:
                run_pass(other, fresh)
        os.unlink(path)
        run_pass(stream, expected)


def test_report_28_a_file_that_is_rewritten_stops_the_next_pass(model):
    path, pack, expected = model
    with opened(pack) as stream:
        run_pass(stream, expected)
        flip(path, pack, 4)
        for _ in range(2):
            with pytest.raises(StreamError, match=r"model.safetensors: the file changed while it was open"):
                next(stream.blocks())
        assert stream.stats.passes == 1


def test_report_28_a_file_that_is_rewritten_within_a_pass_ends_it_with_an_error(model):
    """Blocks before and after the change are of two versions: nobody may take what was computed from them."""
    path, pack, _ = model
    with opened(pack, verify=False) as stream, pytest.raises(StreamError, match="the file changed"):
        for block in stream.blocks():
            if block.index == 5:
                flip(path, pack, 0)
    with pytest.raises(StreamError, match="the file changed"):
        opened(pack)


def test_report_28_a_file_that_grows(model):
    path, pack, expected = model
    with opened(pack) as stream:
        run_pass(stream, expected)
        with open(path, "ab") as file:
            file.write(b"x")
        with pytest.raises(StreamError, match="its size went from"):
            next(stream.blocks())


@pytest.mark.parametrize("engine", ["auto", "direct", "buffered"])
def test_report_25_a_file_that_is_cut_while_it_is_read(model, engine):
    """An exception with the file's name instead of a dead process or zeros."""
    path, pack, expected = model
    with opened(pack, 1, engine=engine, pread=None) as stream:
        seen = []
        with pytest.raises(StreamError, match=r"model.safetensors: .*(ends|cut|changed)"):
            for block in stream.blocks():
                assert same(parts(block.tensors), expected[block.index])
                seen.append(block.index)
                if block.index == 1:
                    os.truncate(path, pack.blocks[3].ranges[0].offset + 100)
        assert seen in ([0, 1], [0, 1, 2])
        with pytest.raises(StreamError, match="its size went from"):
            next(stream.blocks())


def test_a_damaged_block_is_found_when_it_is_first_read(model):
    path, _, expected = model
    with Pack.open(path) as pack:
        flip(path, pack, 3)
    with Pack.open(path) as pack:
        with opened(pack) as stream:
            for _ in range(2):  # and again
                seen = []
                with pytest.raises(StreamError, match=r"block 3 \(layer.3\) is damaged"):
                    for block in stream.blocks():
                        assert same(parts(block.tensors), expected[block.index])
                        seen.append(block.index)
                assert seen == [0, 1, 2]
            assert run_pass(stream, expected, [4, 5, 0]) == [4, 5, 0]  # what is not damaged can be had
        threads = threads_of()
        with pytest.raises(StreamError, match=r"block 3 \(layer.3\) is damaged"):
            opened(pack, 1, [2, 3])
        assert settled(threads_of, threads)
        with opened(pack, verify=False) as stream:
            assert [block.index for block in stream.blocks()] == list(range(6))


def test_every_block_is_checked_once(model, monkeypatch):
    _, pack, expected = model
    checked, check = [], pack.check_block
    monkeypatch.setattr(pack, "check_block", lambda index, memory: (checked.append(index), check(index, memory)))
    threads = threads_of()
    with opened(pack, 2, [1], pread=None, engine="buffered", threads=1) as stream:
        for _ in range(3):
            run_pass(stream, expected)
        assert sorted(checked) == list(range(6))
    assert settled(threads_of, threads)


@pytest.mark.skipif(sk.native.cpu is None, reason="mapping needs the compiled module")
def test_a_mapped_file_that_is_damaged_rewritten_or_cut(model):
    path, pack, expected = model
    made = plan(pack, budget=pack.nbytes)
    with WeightStream(path, made) as stream:
        assert made.mapped and stream.stats.engine is None
        run_pass(stream, expected)
        with pytest.raises(StreamError, match=r"(changed|cut)"):
            for block in stream.blocks():
                if block.index == 1:
                    os.truncate(path, pack.blocks[3].ranges[0].offset)
                block.tensors["bytes"].sum()  # beyond the end there is nothing to be had, and nobody dies of it
        with pytest.raises(StreamError, match=r"(changed|cut)"):
            next(stream.blocks())


@pytest.mark.skipif(sk.native.cpu is None, reason="mapping needs the compiled module")
def test_a_damaged_block_of_a_mapped_file(model):
    path, pack, _ = model
    made = plan(pack, budget=pack.nbytes)
    flip(path, pack, 2)
    with pytest.raises(StreamError, match=r"block 2 \(layer.2\) is damaged"):
        WeightStream(path, made)
    with WeightStream(path, made, verify=False) as stream:
        assert len(list(stream.blocks())) == 6


def test_what_can_not_be_mapped_is_read(model, monkeypatch):
    path, pack, expected = model
    monkeypatch.setattr(sk.native, "cpu", None)
    monkeypatch.setattr(sk.native, "cpu_reason", "it was not built")
    with WeightStream(path, plan(pack, budget=pack.nbytes)) as stream:
        run_pass(stream, expected)
        stats = stream.stats
    assert stats.bytes_read == stats.resident_bytes == pack.nbytes and not stats.active


# Reading.


def test_a_read_that_fails_names_the_place_and_the_next_pass_tries_again(model):
    path, pack, expected = model
    disk = Disk(errors={7: errno.EIO})
    with opened(pack, 2, pread=disk, threads=1) as stream:
        failed = 0
        for _ in range(4):
            try:
                run_pass(stream, expected)
            except StreamError as error:
                assert str(path) in str(error) and "at byte" in str(error) and "Input/output error" in str(error)
                failed += 1
        assert failed == 1 and stream.stats.passes == 3


def test_report_37_short_and_interrupted_reads(model):
    _, pack, expected = model
    disk = Disk(short=3000, errors=dict.fromkeys(range(2, 200, 5), errno.EINTR), delay=0.0002)
    with opened(pack, 2, [1], pread=disk, engine="buffered") as stream:
        for _ in range(3):
            run_pass(stream, expected)
    assert len(disk.reads) > 50


def test_a_block_read_in_vain_that_failed_is_nobodys_error(model):
    """Block 1 can't be read, but the pass that comes does not want it."""
    _, pack, expected = model
    start = pack.blocks[1].ranges[0].offset

    def read(fd, view, offset):
        if start <= offset < start + pack.blocks[1].nbytes:
            raise OSError(errno.EIO, "bad sector")
        return os.preadv(fd, [view], offset)

    with opened(pack, 2, pread=read) as stream:
        for _ in range(3):
            next(stream.blocks())  # has block 1 read ahead
            run_pass(stream, expected, [0, 2, 3, 4, 5])
        with pytest.raises(StreamError, match="reading at byte"):
            run_pass(stream, expected)


# Passes that break off.


def test_an_exception_in_the_middle_of_a_pass(model):
    _, pack, expected = model
    with opened(pack, 3, [2]) as stream:
        for stop in range(6):
            with pytest.raises(ZeroDivisionError) as kept:  # with its traceback, as somebody's log would
                for block in stream.blocks():
                    assert same(parts(block.tensors), expected[block.index])
                    if block.index == stop:
                        1 / 0  # noqa: B018
            run_pass(stream, expected)
            del kept


def test_a_pass_within_a_pass_is_refused_and_the_outer_one_goes_on(model):
    _, pack, expected = model
    with opened(pack, 2, [1]) as stream:
        for block in stream.blocks():
            with pytest.raises(StreamError, match="blocks: a pass is under way"):
                next(stream.blocks())
            assert same(parts(block.tensors), expected[block.index])
        first = stream.blocks()
        next(first)
        with pytest.raises(StreamError, match="its iterator to be closed"):
            list(stream.blocks())
        first.close()
        run_pass(stream, expected)


def test_an_interrupt_while_waiting(model):
    """Ctrl-C while a slow disk reads: the pass ends, no read lands where others are by then, the next pass runs."""
    _, pack, expected = model
    gate = Gate()
    gate.open()
    with opened(pack, 2, pread=gate) as stream:
        run_pass(stream, expected)
        settle(stream)
        gate.__init__()  # closed
        iterator = stream.blocks()
        next(iterator), next(iterator)
        old = signal.signal(signal.SIGALRM, lambda *_: (gate.open(), signal.default_int_handler(signal.SIGINT, None)))
        try:
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.1)  # in here: on a busy machine it may come before the wait
                next(iterator)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        for _ in range(2):
            run_pass(stream, expected)


def test_closing_from_another_thread_ends_a_pass_that_waits(model):
    _, pack, _ = model
    threads, descriptors = threads_of(), descriptors_of()
    stream = opened(pack, 2, pread=None, limit=20 * PAGE)  # a pass takes a second
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    start = time.monotonic()
    with pytest.raises(StreamError, match="the stream is closed"):
        while True:
            for _ in stream.blocks():
                pass
    assert time.monotonic() - start < 2
    closer.join()
    assert settled(threads_of, threads) and settled(descriptors_of, descriptors)


def test_closing_from_another_thread_at_any_moment(model):
    _, pack, expected = model
    rng = random.Random(1)
    for _ in range(30):
        stream = opened(pack, rng.randint(1, 3), [0] * rng.randint(0, 1), pread=Disk(delay=0.001))
        closer = threading.Timer(0.006 * rng.random(), stream.close)
        closer.start()
        with pytest.raises(StreamError, match="the stream is closed"):
            while True:
                for block in stream.blocks():
                    index, found = block.index, parts(block.tensors)
                    stream.check(block)  # or it was closed, and the copy is of anything
                    assert same(found, expected[index])
        closer.join()


def test_closing_in_the_middle_of_a_pass(model):
    _, pack, _ = model
    for resident in ((), (1,), range(6)):
        with pytest.raises(StreamError, match="the stream is closed"), opened(pack, 2, resident) as stream:
            for block in stream.blocks():
                if block.index == 1:
                    stream.close()


def test_a_closed_stream_says_so(model):
    _, pack, expected = model
    stream = opened(pack)
    iterator = stream.blocks()
    block = next(iterator)
    stream.close()
    stream.close()
    uses = [
        lambda: next(iterator),
        lambda: next(stream.blocks()),
        lambda: stream.check(block),
        lambda: stream.rows("head", torch.tensor([0]), torch.empty(1, 32)),
        lambda: stream.drop_slots(),
        lambda: stream.drop_resident(),
        lambda: stream.shrink(1),
    ]
    for use in uses:
        with pytest.raises((StreamError, StopIteration)) as refused:
            use()
        assert refused.type is StreamError and "the stream is closed" in str(refused.value)
    assert stream.stats.slots == 0 and stream.stats.bytes_read > 0
    run_pass(opened_again := opened(pack), expected)  # the pack was not the stream's to close
    opened_again.close()


def test_two_streams_at_once(model, tmp_path):
    """Over one pack, and over another one, in one thread, step by step."""
    _, pack, expected = model
    path = write_pack(tmp_path / "other.safetensors", 6, seed=5)
    with Pack.open(path) as other, opened(pack, 2) as a, opened(pack, 3, [0]) as b, opened(other, 1) as c:
        each = [expected, expected, contents(other)]
        for _ in range(3):
            for step in zip(a.blocks(), b.blocks(), c.blocks(), strict=True):
                for block, right in zip(step, each, strict=True):
                    assert same(parts(block.tensors), right[block.index])


def test_a_stream_opened_by_path_closes_its_file(model):
    path, pack, expected = model
    descriptors = descriptors_of()
    with WeightStream(path, plan_of(pack, 2)) as stream:
        run_pass(stream, expected)
        assert descriptors_of() > descriptors
    assert descriptors_of() == descriptors
    with pytest.raises(OSError):
        WeightStream(str(path) + ".gone", plan_of(pack, 2))
    assert descriptors_of() == descriptors


def test_a_plan_of_another_pack(model, tmp_path):
    path = model[0]
    descriptors = descriptors_of()
    with Pack.open(write_pack(tmp_path / "other.safetensors", 5)) as other:
        made = plan_of(other, 2)
    with pytest.raises(ValueError, match=r"plan: expected one of this pack, .*model.safetensors, got one"):
        WeightStream(path, made)
    for wrong in (None, "plan"):
        with pytest.raises(TypeError, match="plan: expected a Plan, got"):
            WeightStream(path, wrong)
    assert descriptors_of() == descriptors


# Forks.


def in_child(work):
    """The exit status of a forked child that runs ``work()``: 0 if it returned true; killed after ten seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(2)
    return os.waitpid(child, 0)[1]


def refused(use):
    try:
        use()
    except StreamError as error:
        return "forked" in str(error)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_report_56_a_forked_child_is_told_at_once(model):
    path, pack, expected = model
    with opened(pack, 2, [3], pread=Disk(delay=0.002)) as stream:
        run_pass(stream, expected)
        assert in_child(lambda: refused(lambda: next(stream.blocks()))) == 0
        assert in_child(lambda: refused(lambda: next(stream.blocks([3])))) == 0  # which is resident
        iterator = stream.blocks()
        next(iterator)
        assert in_child(lambda: refused(lambda: next(iterator))) == 0
        assert in_child(lambda: refused(lambda: list(iterator))) == 0
        assert in_child(lambda: stream.close() is None) == 0
        assert [block.index for block in iterator] == [1, 2, 3, 4, 5]  # the parent's pass goes on

        def anew():
            with WeightStream(path, plan_of(pack, 2)) as own:
                return run_pass(own, expected) == list(range(6))

        assert in_child(anew) == 0
        for _ in range(2):
            run_pass(stream, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_can_use_what_is_all_in_memory(model):
    _, pack, expected = model
    with opened(pack, 0, range(6)) as stream:
        assert in_child(lambda: run_pass(stream, expected) == list(range(6))) == 0
