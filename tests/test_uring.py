"""The io_uring engine by itself: short reads, errors, its end; and machines that forbid io_uring."""

import contextlib
import ctypes
import errno
import os
import platform
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from readers import OpenFile, write_bytes
from specdec_kernels import native
from specdec_kernels.stream import aligned_empty
from specdec_kernels.stream.batch import Piece
from specdec_kernels.stream.reader import Descriptors

PAGE = 4096


def reads(depth=4, limit=0.0, most=0):
    if not hasattr(native.cpu, "UringReads"):
        pytest.skip("needs a compiled module with io_uring")
    try:
        return contextlib.closing(native.cpu.UringReads(depth, limit, most))
    except OSError as error:
        pytest.skip(f"io_uring: {error}")


@pytest.fixture
def model(tmp_path):
    """(descriptors, data) of a file of 1 MB and a bit; the direct one is -1 where there is none."""
    data = write_bytes(tmp_path / "model", (1 << 20) + 77)
    files = [OpenFile(tmp_path / "model")]
    descriptors = Descriptors(files)
    with contextlib.suppress(OSError):
        descriptors.open_direct(files)
    yield descriptors, data
    descriptors.close()


def piece(descriptors, offset, nbytes, memory, direct=True):
    first = descriptors.direct.get(0, -1) if direct else -1
    return Piece(0, first, descriptors.buffered[0], offset, nbytes, memory.data_ptr())


def finish(batch, seconds=20):
    assert batch.wait(seconds)
    return batch.failure


def attributes():
    """(policy, flags, nice, priority, runtime) of this thread, sched_getattr(2)."""
    number = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
    memory = ctypes.create_string_buffer(48)
    if number is None or sys.platform != "linux":
        pytest.skip("the number of this system's call isn't known here")
    assert ctypes.CDLL(None).syscall(number, 0, memory, 48, 0) == 0
    return struct.unpack("IIQiIQQQ", memory.raw)[1:6]


def test_short_turns_are_of_one_thread_and_change_nothing_else():
    if not hasattr(native.cpu, "short_turns"):
        pytest.skip("needs the compiled module")
    before, found = attributes(), []
    thread = threading.Thread(target=lambda: found.extend([native.cpu.short_turns(), attributes()]))
    thread.start(), thread.join()
    taken, inside = found
    assert inside[:4] == before[:4] and attributes() == before
    if taken and inside[4]:  # systems before Linux 6.12 say nothing of turns
        assert inside[4] == 100_000


@pytest.mark.parametrize(("direct", "most"), [(True, PAGE), (True, 3 * PAGE), (False, 777), (False, 5000), (True, 0)])
def test_c37_reads_that_come_back_short(model, direct, most):
    descriptors, data = model
    memory = aligned_empty(1 << 20)
    with reads(most=most) as engine:
        pieces = [
            piece(descriptors, at, 256 << 10, memory[at : at + (256 << 10)], direct)
            for at in range(0, 1 << 20, 256 << 10)
        ]
        assert finish(engine.submit(pieces)) is None
        assert torch.equal(memory, data[: 1 << 20])
        assert engine.counters()[0] == 1 << 20


def test_more_pieces_than_depth_from_several_threads(model):
    descriptors, data = model
    with reads(depth=2) as engine:
        wrong = []

        def read(number):
            for turn in range(20):
                memory = torch.empty(10_000, dtype=torch.uint8)
                offset = (number * 7919 + turn * 104729) % (1 << 20)
                size = min(10_000, data.numel() - offset)
                parts = range(0, size, 999)
                batch = engine.submit(
                    [piece(descriptors, offset + p, min(999, size - p), memory[p:], False) for p in parts]
                )
                if finish(batch) is not None or not torch.equal(memory[:size], data[offset : offset + size]):
                    wrong.append((number, turn))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_c37_the_end_of_the_file_and_errors(model):
    descriptors, data = model
    memory = aligned_empty(2 * PAGE)
    with reads() as engine:
        batch = engine.submit([piece(descriptors, 1 << 20, PAGE, memory)])
        file, _, number = finish(batch)
        assert (file, number) == (0, 0) and batch.dropped
        assert torch.equal(memory[:77], data[1 << 20 :])
        assert finish(engine.submit([Piece(3, -1, 10_000, 5, PAGE, memory.data_ptr())])) == (3, 5, errno.EBADF)
        assert finish(engine.submit([Piece(0, -1, descriptors.buffered[0], 5, PAGE, PAGE)])) == (0, 5, errno.EFAULT)
        if descriptors.direct:
            off_page = Piece(0, descriptors.direct[0], descriptors.buffered[0], 0, PAGE, memory.data_ptr() + 1)
            assert finish(engine.submit([off_page])) == (0, 0, errno.EINVAL)
        assert finish(engine.submit([piece(descriptors, 0, PAGE, memory)])) is None
        assert torch.equal(memory[:PAGE], data[:PAGE])


@pytest.mark.parametrize("wrong", [(-1, PAGE, 8), (0, 0, 8), (0, (1 << 30) + 1, 8), (0, PAGE, 0)])
def test_pieces_that_can_not_be(wrong):
    offset, nbytes, address = wrong
    with reads() as engine, pytest.raises(ValueError, match="piece: bad"):
        engine.submit([Piece(0, -1, 0, offset, nbytes, address)])


def test_cancelled_paused_closed(model):
    descriptors, data = model
    memory = aligned_empty(1 << 20).zero_()
    with reads(depth=1, limit=4e6) as engine:
        pieces = [piece(descriptors, at, 4 * PAGE, memory[at:]) for at in range(0, 1 << 20, 4 * PAGE)]
        batch = engine.submit(pieces)
        assert not batch.wait(0) and not batch.wait(0.02)
        engine.pause()
        count = engine.counters()[0]
        assert 0 <= count < 1 << 20 and count % (4 * PAGE) == 0
        time.sleep(0.05)
        assert engine.counters()[0] == count
        engine.resume()
        end = time.monotonic() + 20
        while engine.counters()[0] == count:
            assert time.monotonic() < end
        batch.cancel()
        assert batch.wait(20) and batch.dropped and batch.failure is None
        count = engine.counters()[0]
        assert torch.equal(memory[:count], data[:count]) and (memory[count:] == 0).all()
        last = engine.submit(pieces)
        engine.close()
        assert last.wait(0) and last.dropped
        late = engine.submit(pieces)
        assert late.wait(0) and late.dropped
        last.cancel()
        engine.pause(), engine.resume()


def test_the_limit_counts_work_and_not_idle_time(model):
    descriptors, _ = model
    memory = aligned_empty(1 << 20)
    with reads(limit=10e6) as engine:
        for _ in range(2):
            start = time.monotonic()
            pieces = [piece(descriptors, at, 16 * PAGE, memory[at:]) for at in range(0, 1 << 20, 16 * PAGE)]
            assert finish(engine.submit(pieces)) is None
            assert 0.1 < time.monotonic() - start < 0.6
            time.sleep(0.15)
        count, seconds = engine.counters()
        assert count == 2 << 20 and 0.2 < seconds < 1.2


# ---- processes of their own -------------------------------------------------------------------------

FORBID = """
import ctypes, struct, sys
def forbid(call, number):
    # A filter of system calls, as containers have it: this call gives that error.
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | number), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, header, 0, 0) != 0:
        sys.exit(77)
"""

READ = """
import logging, torch
from readers import OpenFile, Range
from specdec_kernels.stream import Reader, StreamError, aligned_empty
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
path = sys.argv[1]
file = OpenFile(path)
def read(**options):
    memory = aligned_empty(file.size)
    with Reader([file], **options) as reader:
        reader.submit([Range(0, 0, file.size, 0)], memory).wait()
        assert memory.numpy().tobytes() == open(path, "rb").read()
        return reader.engine
"""


def python(code, *arguments):
    """A Python that finds the package where this one did, and not in the checkout, which may lie in its way."""
    folders = [str(Path(__file__).parent), str(Path(native.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=tempfile.gettempdir()
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's filters of system calls")
def test_c58_machines_that_forbid_io_uring(tmp_path):
    write_bytes(tmp_path / "model", 1 << 20)
    code = f"""
{FORBID}
{READ}
import errno, os
for number in (errno.EPERM, errno.ENOSYS, errno.ENOMEM):  # one filter after the other: the last one counts
    forbid(425, number)
    assert read() in ("direct", "buffered")
    try:
        read(engine="io_uring")
    except StreamError as error:
        print("refused:", error)
"""
    done = python(code, tmp_path / "model")
    if done.returncode == 77:
        pytest.skip("this machine allows no filter of system calls")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for i, number in enumerate((errno.EPERM, errno.ENOSYS, errno.ENOMEM)):
        assert "is read by" in lines[2 * i] and "; io_uring: " in lines[2 * i]
        assert lines[2 * i + 1].startswith("refused: ") and "engine io_uring can't read this" in lines[2 * i + 1]
        if hasattr(native.cpu, "UringReads"):
            assert os.strerror(number) in lines[2 * i] and os.strerror(number) in lines[2 * i + 1]


def test_a_process_that_ends_without_closing(tmp_path):
    """Neither a reader at work, nor a forked child with one, keeps a process from ending."""
    write_bytes(tmp_path / "model", 1 << 20)
    code = f"""
import sys
{READ}
import os
readers, tickets, memories = [], [], []
for engine in ("io_uring", "direct", "buffered"):
    try:
        readers.append(Reader([file], engine=engine, limit="200kB"))
    except StreamError:
        continue
    memories.append(aligned_empty(1 << 20))
    tickets.append(readers[-1].submit([Range(0, 0, 1 << 20, 0)], memories[-1]))
child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
print("end")
"""
    start = time.monotonic()
    done = python(code, tmp_path / "model")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "end", done.stderr
    assert time.monotonic() - start < 60


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_c49_files_larger_than_the_address_space(tmp_path):
    """Reading takes the memory that is read into, and nothing that grows with the file."""
    with open(tmp_path / "model", "wb") as file:
        file.truncate(8 << 30)
    code = f"""
import sys
{READ}
import re, resource
def field(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
block = 8 << 20
for engine in ("auto", "buffered"):
    with Reader([file], engine=engine, threads=2) as reader:
        memories = [aligned_empty(block).fill_(1) for _ in range(2)]
        limit = field("VmSize") + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        before = field("RssAnon")
        for i in range(24):
            at = i * 331 * (1 << 20) % (8 << 30)
            reader.submit([Range(0, at, block, 0)], memories[i % 2]).wait()
            assert not memories[i % 2].any()
            memories[i % 2].fill_(1)
        assert field("RssAnon") - before < 8 << 20, field("RssAnon") - before
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
    done = python(code, tmp_path / "model")
    assert done.returncode == 0, done.stderr
