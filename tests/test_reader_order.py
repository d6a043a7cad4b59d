"""Reader: what is read when, cancelled, interrupted, forked, closed, and that nothing stays behind."""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch

import readers
from readers import Disk, Gate, OpenFile, Range, open_fds, wait_for, whole, write_bytes
from specdec_kernels.stream import Reader, StreamError, aligned_empty
from specdec_kernels.stream.files import pread
from specdec_kernels.stream.reader import ENGINES, THREADS

PAGE = 4096
pytestmark = pytest.mark.usefixtures("one_thread")  # comparing bytes with more costs more than it saves


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    return readers.working(request.param, tmp_path)


@pytest.fixture
def model(tmp_path):
    return readers.model(tmp_path)


def test_pieces_go_in_order_and_over_the_ends_of_blocks(model):
    file, _ = model
    disk = Disk()
    with Reader([file], engine="buffered", threads=1, piece=PAGE, pread=disk) as reader:
        memory = aligned_empty(8 * PAGE)
        tickets = [reader.submit([Range(0, at * PAGE, 4 * PAGE, at % 8 * PAGE)], memory) for at in (8, 4, 0)]
        for ticket in tickets:
            ticket.wait()
    assert [offset // PAGE for _, offset, _ in disk.reads] == [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("nbytes", [9 * PAGE, 8 * PAGE + 1, 5 * PAGE, 4 * PAGE, 17 * PAGE + 5])
def test_pieces_of_a_range_are_alike(model, nbytes):
    disk = Disk()
    with Reader([model[0]], engine="buffered", threads=1, piece=4 * PAGE, pread=disk) as reader:
        reader.submit([Range(0, PAGE, nbytes, 0)], aligned_empty(nbytes)).wait()
    offsets, sizes = zip(*[(offset, size) for _, offset, size in disk.reads], strict=True)
    assert len(sizes) == -(-nbytes // (4 * PAGE)) and max(sizes) <= 4 * PAGE and sum(sizes) == nbytes
    assert len(set(sizes[:-1])) <= 1 and sizes[-1] > sizes[0] - len(sizes) * PAGE
    assert all(offset % PAGE == 0 for offset in offsets)


def test_reads_under_way_are_few_so_that_blocks_arrive_in_turn(model, tmp_path):
    file, data = model
    gate, block = Gate(), 64 * PAGE

    def read(fd, view, offset):  # the reader tries one page first
        return (pread if len(view) == PAGE else gate)(fd, view, offset)

    readers.working("direct", tmp_path)
    with Reader([file], engine="direct", pread=read, piece=16 * PAGE) as reader:
        tickets = [
            reader.submit([Range(0, i * block, block, 0)], aligned_empty(block)) for i in range(data.numel() // block)
        ]
        wait_for(lambda: gate.entered == THREADS["direct"])
        time.sleep(0.05)
        assert gate.entered == THREADS["direct"] < block // (16 * PAGE)
        gate.open()
        for ticket in tickets:
            ticket.wait()


def test_several_blocks_are_under_way_at_once(model):
    gate = Gate()
    with Reader([model[0]], engine="buffered", threads=4, pread=gate) as reader:
        tickets = [reader.submit([Range(0, i * PAGE, PAGE, 0)], aligned_empty(PAGE)) for i in range(4)]
        wait_for(lambda: gate.entered == 4)
        assert not any(ticket.done() for ticket in tickets)
        gate.open()
        for ticket in tickets:
            ticket.wait()


def test_cancelled(model):
    file, data = model
    gate = Gate()
    with Reader([file], engine="buffered", threads=1, pread=gate, piece=PAGE) as reader:
        first, last = aligned_empty(4 * PAGE).fill_(7), aligned_empty(PAGE)
        begun = reader.submit([Range(0, 0, 4 * PAGE, 0)], first)
        waiting = reader.submit([Range(0, 0, PAGE, 0)], aligned_empty(PAGE))
        kept = reader.submit([Range(0, PAGE, PAGE, 0)], last)
        wait_for(lambda: gate.entered == 1)
        begun.cancel(), waiting.cancel()
        assert waiting.done() and not begun.done()  # one of its reads is under way
        with pytest.raises(TimeoutError, match="not read after"):
            begun.wait(0.02)
        gate.open()
        for ticket in (begun, waiting):
            with pytest.raises(StreamError, match="cancelled"):
                ticket.wait()
        assert torch.equal(first[:PAGE], data[:PAGE]) and (first[PAGE:] == 7).all()
        kept.wait()
        kept.cancel()  # too late: it is there
        kept.wait()
        assert torch.equal(last, data[PAGE : 2 * PAGE]) and gate.entered == 2


def test_cancelling_at_random(engine, tmp_path):
    """Whatever is cancelled, a ticket that is waited for without an error has all its bytes, the others none later."""
    data = write_bytes(tmp_path / "model", 4 << 20)
    generator = torch.Generator().manual_seed(0)
    with Reader([OpenFile(tmp_path / "model")], engine=engine, piece=16 * PAGE, depth=3, threads=3) as reader:
        memories = [aligned_empty(256 << 10) for _ in range(4)]
        for turn in range(28):
            offsets = torch.randint(0, (4 << 20) - (256 << 10), (4,), generator=generator).tolist()
            offsets = [offset // PAGE * PAGE + (5 if turn % 7 == 0 else 0) for offset in offsets]
            tickets = [reader.submit([Range(0, o, 256 << 10, 0)], m) for o, m in zip(offsets, memories, strict=True)]
            tickets[turn % 4].cancel()
            for i, ticket in enumerate(tickets):
                try:
                    ticket.wait(20)
                    assert torch.equal(memories[i], data[offsets[i] :][: 256 << 10])
                except StreamError:
                    assert i == turn % 4
                memories[i].fill_(turn)
            assert all((memory == turn).all() for memory in memories)


def test_closed(engine, model):
    gc.collect()
    fds, threads = open_fds(), set(threading.enumerate())
    reader = Reader([model[0]], engine=engine, limit="1MB")
    tickets = [reader.submit([Range(0, 0, 1 << 20, 0)], aligned_empty(1 << 20)) for _ in range(3)]
    assert open_fds() > fds
    reader.close()
    reader.close()
    for ticket in tickets:
        with pytest.raises(StreamError, match="closed"):
            ticket.wait()
        ticket.cancel()
        assert ticket.done()
    with pytest.raises(StreamError, match="model: the reader is closed"):
        reader.submit([], aligned_empty(PAGE))
    assert reader.bytes_read <= 3 << 20
    assert open_fds() == fds and set(threading.enumerate()) <= threads


def test_dropped_without_being_closed(engine, model):
    gc.collect()
    fds, threads = open_fds(), set(threading.enumerate())
    reader = Reader([model[0]], engine=engine)
    reader.submit([Range(0, 0, 1 << 20, 0)], aligned_empty(1 << 20))
    del reader
    gc.collect()
    assert open_fds() == fds and set(threading.enumerate()) <= threads


def test_memory_lives_as_long_as_something_is_read_into_it(model):
    gate = Gate()
    with Reader([model[0]], engine="buffered", threads=1, pread=gate) as reader:
        memory = aligned_empty(PAGE)
        alive = weakref.ref(memory)
        ticket = reader.submit([Range(0, 0, PAGE, 0)], memory)
        wait_for(lambda: gate.entered == 1)
        del ticket, memory
        gc.collect()
        assert alive() is not None
        gate.open()
        wait_for(lambda: reader.bytes_read == PAGE)
        last = aligned_empty(PAGE)
        ticket = reader.submit([Range(0, 0, PAGE, 0)], last)
        gc.collect()
        assert alive() is None
        ticket.wait()
        alive = weakref.ref(last)
        del last
        gc.collect()
        assert alive() is None  # once it was waited for, nobody keeps it


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an alarm")
def test_waiting_can_be_interrupted(engine, model):
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with Reader([model[0]], engine=engine, limit="1MB") as reader:
            ticket = reader.submit([Range(0, 0, 4 << 20, 0)], aligned_empty(4 << 20))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            start = time.monotonic()
            with pytest.raises(Alarm):
                ticket.wait()
            assert time.monotonic() - start < 1.5
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_c56_after_a_fork(engine, model):
    """The child is told, at once, by every call; the parent goes on, with reads under way at every fork."""
    file, data = model
    memory = aligned_empty(data.numel())
    with Reader([file], engine=engine, piece=16 * PAGE) as reader:
        for _ in range(4):
            memory.zero_()
            ticket = reader.submit(whole(data), memory)
            known = reader.bytes_read
            child = os.fork()
            if child == 0:
                told = 0
                for call in (ticket.wait, ticket.done, ticket.cancel, lambda: reader.submit([], memory)):
                    try:
                        call()
                    except StreamError as error:
                        told += "forked" in str(error)
                told += reader.bytes_read == known
                reader.close()
                del reader, ticket, call
                gc.collect()
                os._exit(told)
            memory[::PAGE] = 0  # pages that the child shares are copied now; in a page cache or not, reads come after
            again = reader.submit(whole(data), memory)
            ticket.wait()
            again.wait(20)
            assert torch.equal(memory, data)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 5


def test_forks_of_several_threads(engine, model):
    file, data = model

    def fork():
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    with Reader([file], engine=engine, piece=PAGE * 4) as reader:
        threads = [threading.Thread(target=fork) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            memory = aligned_empty(data.numel())
            reader.submit(whole(data), memory).wait(20)
            assert torch.equal(memory, data)
        for thread in threads:
            thread.join()
