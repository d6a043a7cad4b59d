"""Reader: the bytes of the file in memory whatever the disk does, or a typed error; nothing left behind."""

import errno
import gc
import logging
import os
import time

import pytest
import torch

import readers
from readers import Disk, OpenFile, Range, cached_bytes, refuses_direct, whole, write_bytes
from specdec_kernels.stream import Reader, StreamError, aligned_empty
from specdec_kernels.stream.reader import ENGINES

PAGE = 4096
pytestmark = pytest.mark.usefixtures("one_thread")  # comparing bytes with more costs more than it saves


@pytest.fixture(params=ENGINES)
def engine(request, tmp_path):
    return readers.working(request.param, tmp_path)


@pytest.fixture
def model(tmp_path):
    return readers.model(tmp_path)


def test_ranges_of_several_files(engine, tmp_path):
    a, b = write_bytes(tmp_path / "a", 300_000, 1), write_bytes(tmp_path / "b", 5_000_003, 2)
    ranges = [
        Range(1, 0, 2 * PAGE, 0),  # pages to pages
        Range(0, 5, 1000, 2 * PAGE),  # begins in a page
        Range(0, PAGE, PAGE, 3 * PAGE + 64),  # pages to a cache line
        Range(1, PAGE, 4_990_000, 5 * PAGE),  # many pages and a rest
        Range(1, 5_000_002, 1, 5_999_999),  # the last byte of the file to the last of the memory
        Range(0, 7, 0, 0),
    ]
    expected = torch.full((6_000_000,), 7, dtype=torch.uint8)
    memory = aligned_empty(6_000_000).fill_(7)
    for part in ranges:
        expected[part.at : part.at + part.nbytes] = (a, b)[part.file][part.offset : part.offset + part.nbytes]
    with Reader([OpenFile(tmp_path / "a"), OpenFile(tmp_path / "b")], engine=engine, piece=64 * PAGE) as reader:
        reader.submit(ranges, memory).wait()
        assert torch.equal(memory, expected)
        assert reader.bytes_read == sum(part.nbytes for part in ranges)
        assert 0 < reader.read_seconds < 60 and reader.engine == engine


def test_buffers_of_python(engine, model):
    file, data = model
    memory = bytearray(1000)
    with Reader([file], engine=engine) as reader:
        reader.submit([Range(0, 3, 1000, 0)], memoryview(memory)).wait()
        reader.submit([], memory).wait()
        reader.submit([], bytearray()).wait()
    assert memory == data[3:1003].numpy().tobytes()


def test_c41_bytes_that_mean_something_to_text(engine, tmp_path):
    (tmp_path / "text").write_bytes(b"\x1a\r\n\n\r" * 4000)
    memory = aligned_empty(20_000)
    with Reader([OpenFile(tmp_path / "text")], engine=engine) as reader:
        reader.submit(whole(memory), memory).wait()
    assert memory.numpy().tobytes() == b"\x1a\r\n\n\r" * 4000


# ---- disks that misbehave ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["direct", "buffered"])
@pytest.mark.parametrize("seed", range(4))
def test_c37_short_reads_and_interrupted_ones(model, name, seed):
    file, data = model
    interrupted = {n: (errno.EINTR, errno.EAGAIN)[n % 2] for n in range(1, 60, 3)}
    disk = Disk(short=(100_000, 70_000, 3 * PAGE, 1 << 19)[seed], errors=interrupted, delay=0.0005, seed=seed)
    memory = aligned_empty(data.numel())
    with Reader([file], engine=name, pread=disk, piece=128 * PAGE) as reader:
        reader.submit(whole(data), memory).wait()
        assert torch.equal(memory, data)
        assert reader.bytes_read == data.numel() and len(disk.reads) > 15


@pytest.mark.parametrize("name", ["direct", "buffered"])
def test_c37_the_end_of_the_file_is_an_error(model, name):
    file, data = model
    with Reader([file], engine=name, pread=Disk(ends=100 * PAGE + 5), piece=64 * PAGE, threads=1) as reader:
        ticket = reader.submit(whole(data), aligned_empty(data.numel()))
        with pytest.raises(StreamError, match=rf"{file.path}: reading at byte {100 * PAGE + 5} failed: the file ends"):
            ticket.wait()
        assert ticket.done()
        with pytest.raises(StreamError, match="the file ends"):
            ticket.wait()
        again = aligned_empty(PAGE)
        reader.submit(whole(again), again).wait()  # the reader itself is fine
        assert torch.equal(again, data[:PAGE])


def test_c25_a_file_that_was_cut(engine, tmp_path):
    data = write_bytes(tmp_path / "model", 1 << 20)
    file = OpenFile(tmp_path / "model")
    with Reader([file], engine=engine) as reader:
        os.truncate(tmp_path / "model", 300_000)
        with pytest.raises(StreamError, match=r"model: reading at byte \d+ failed: the file ends before that"):
            reader.submit(whole(data), aligned_empty(1 << 20)).wait()
        assert os.path.exists(file.path)


def test_c28_a_renamed_and_a_deleted_file_stay_readable(engine, model, tmp_path):
    file, data = model
    os.rename(file.path, tmp_path / "old")
    write_bytes(file.path, 1 << 20, seed=9)
    memory = aligned_empty(data.numel())
    with Reader([file], engine=engine) as reader:
        os.unlink(tmp_path / "old")
        reader.submit(whole(data), memory).wait()
    assert torch.equal(memory, data)


def test_a_file_that_changed_before_the_reader_came(model):
    file, _ = model

    def changed():
        raise StreamError("changed")

    file.check_unchanged = changed
    with pytest.raises(StreamError, match="changed"):
        Reader([file])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_c38_direct_reading_that_is_refused(model, number, caplog):
    file, data = model
    memory = aligned_empty(data.numel())
    caplog.set_level(logging.INFO, "specdec_kernels.stream")
    with Reader([file], pread=refuses_direct(number)) as reader:
        reader.submit(whole(data), memory).wait()
        assert reader.engine == "buffered" and torch.equal(memory, data)
    assert len(caplog.records) == 1
    assert "buffered" in caplog.text and os.strerror(number) in caplog.text
    with pytest.raises(StreamError, match=f"engine direct can't read this: .*{os.strerror(number)}"):
        Reader([file], engine="direct", pread=refuses_direct(number))


def test_c38_no_direct_opening(model, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    with Reader([model[0]]) as reader:
        assert reader.engine == "buffered"
    with pytest.raises(StreamError, match="no O_DIRECT"):
        Reader([model[0]], engine="direct")


def test_an_error_of_one_is_not_the_others(model):
    file, data = model
    with Reader([file], engine="buffered", threads=1, pread=Disk(errors={1: errno.EIO})) as reader:
        memories = [aligned_empty(PAGE) for _ in range(3)]
        tickets = [reader.submit([Range(0, i * PAGE, PAGE, 0)], memories[i]) for i in range(3)]
        with pytest.raises(StreamError, match=rf"model: reading at byte {PAGE} failed: {os.strerror(errno.EIO)}"):
            tickets[1].wait()
        tickets[0].wait(), tickets[2].wait()
        assert torch.equal(memories[0], data[:PAGE]) and torch.equal(memories[2], data[2 * PAGE : 3 * PAGE])


def test_a_read_that_raises_anything(model):
    def broken(fd, view, offset):
        raise ZeroDivisionError

    with Reader([model[0]], engine="buffered", pread=broken) as reader:
        for _ in range(2 * 3):
            with pytest.raises(StreamError, match="reading at byte 0 failed"):
                reader.submit([Range(0, 0, 10, 0)], bytearray(10)).wait()


def test_c37_ranges_above_2_gib_are_cut(model):
    done = []

    def nothing(fd, view, offset):
        done.append((offset, len(view)))
        return len(view)

    size = (3 << 30) + 5
    with Reader([model[0]], engine="buffered", pread=nothing, threads=1) as reader:
        reader.submit([Range(0, 0, size, 0)], aligned_empty(size)).wait()
        assert reader.bytes_read == size
    assert max(n for _, n in done) <= 4 << 20
    assert [offset for offset, _ in done] == [sum(n for _, n in done[:i]) for i in range(len(done))]


# ---- pace, memory, page cache -----------------------------------------------------------------------


def test_the_limit(engine, tmp_path):
    write_bytes(tmp_path / "model", 4 << 20)
    memory = aligned_empty(1 << 20)
    with Reader([OpenFile(tmp_path / "model")], engine=engine, limit="20MB") as reader:
        for _ in range(2):  # what was not used while there was nothing to do is gone
            start = time.monotonic()
            tickets = [reader.submit([Range(0, i << 20, 1 << 20, 0)], memory) for i in range(4)]
            for ticket in tickets:
                ticket.wait()
            rate = (4 << 20) / (time.monotonic() - start)
            assert 8e6 < rate < 20.5e6
            time.sleep(0.2)
        assert reader.bytes_read == 8 << 20
        assert 0.4 < reader.read_seconds < 1.2


@pytest.mark.parametrize("shift", [0, 3])
def test_c47_what_was_read_is_not_in_the_page_cache(engine, tmp_path, shift):
    """Blocks that end anywhere, and, with a shift, that are no pages, so that all engines go through the cache."""
    size, block = 64 << 20, 700 * PAGE  # in long files the page cache holds pieces of 2 MB, which go only as a whole
    data = write_bytes(tmp_path / "model", size + 5)
    file = OpenFile(tmp_path / "model")
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(file) > size // 8:
        pytest.skip("this file system keeps its files in memory")
    with Reader([file], engine=engine) as reader:
        memories = [aligned_empty(block) for _ in range(2)]
        for i, offset in enumerate(range(0, size - block, block)):
            reader.submit([Range(0, offset + shift, block, 0)], memories[i % 2]).wait()
            assert torch.equal(memories[i % 2], data[offset + shift :][:block])
    assert cached_bytes(file) <= size // 8


def test_memory_files(engine):
    if not hasattr(os, "memfd_create"):
        pytest.skip("needs memfd_create")
    fd = os.memfd_create("weights")
    os.write(fd, bytes(range(256)) * 64)
    try:
        file = OpenFile(f"/proc/self/fd/{fd}")
        memory = aligned_empty(4 * PAGE)
        try:
            with Reader([file], engine=engine) as reader:
                reader.submit(whole(memory), memory).wait()
        except StreamError:
            assert engine != "buffered"  # older kernels have no direct reading there
            with Reader([file]) as reader:
                reader.submit(whole(memory), memory).wait()
    finally:
        os.close(fd)
    assert memory.numpy().tobytes() == bytes(range(256)) * 64


# ---- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "mmap"}, "engine: expected auto, io_uring, direct, buffered, got 'mmap'"),
        ({"threads": 0}, "threads: expected an int from 1 to 256, got 0"),
        ({"threads": True}, "threads: expected an int"),
        ({"depth": 1025}, "depth: expected an int from 1 to 1024, got 1025"),
        ({"limit": "12x"}, "limit: expected bytes"),
        ({"limit": 0}, "limit: expected bytes"),
        ({"piece": 4097}, "piece: expected a multiple of 4096"),
    ],
)
def test_options(model, options, message):
    with pytest.raises(ValueError, match=message):
        Reader([model[0]], **options)


def test_what_is_submitted(model):
    with Reader([model[0]]) as reader:
        for memory, message in [
            (torch.zeros(8), r"memory: expected a contiguous uint8 \[n\] on the cpu, got torch.float32"),
            (torch.zeros(8, 8, dtype=torch.uint8), "memory: expected a contiguous uint8"),
            (torch.zeros(8, dtype=torch.uint8)[::2], "memory: expected a contiguous uint8"),
            (torch.empty(8, dtype=torch.uint8, device="meta"), "memory: .* on meta"),
            (b"12345678", "memory: expected a writable buffer"),
        ]:
            with pytest.raises(ValueError, match=message):
                reader.submit([], memory)
        memory = bytearray(8)
        for part in (Range(1, 0, 1, 0), Range(-1, 0, 1, 0)):
            with pytest.raises(ValueError, match="ranges: expected a file below 1"):
                reader.submit([part], memory)
        for part in (Range(0, 0, 9, 0), Range(0, 0, 5, 4), Range(0, -1, 1, 0), Range(0, 0, 1, -1), Range(0, 0, -1, 0)):
            with pytest.raises(ValueError, match="ranges: expected a place in 8 bytes"):
                reader.submit([part], memory)


def test_aligned_memory():
    for size in (1, PAGE, (2 << 20) - 1, 2 << 20, (6 << 20) + 5):
        memory = aligned_empty(size)
        assert memory.data_ptr() % (PAGE if size < 2 << 20 else 2 << 20) == 0
        assert memory.dtype == torch.uint8 and memory.shape == (size,)
        memory.fill_(3)
        view = memory[size // 2 :]
        del memory
        gc.collect()
        assert (view == 3).all()
    assert aligned_empty(0).shape == (0,)
    with pytest.raises(ValueError, match="nbytes: expected"):
        aligned_empty(-1)
    with pytest.raises(MemoryError, match="nbytes: "):
        aligned_empty(1 << 60)
