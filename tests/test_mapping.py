"""Mapped and sealed packs: the same bytes for every process, and a file that is cut never kills or lies."""

import errno
import fcntl
import gc
import os
import signal
from pathlib import Path

import pytest
import torch

from forked import Nursery
from specdec_kernels import native, pack_int8
from specdec_kernels.stream import Pack, PackWriter, StreamError, WeightStream, map_pack, plan, seal, sealed

compiled = pytest.mark.skipif(native.cpu is None, reason=f"needs the compiled module: {native.cpu_reason}")
linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


@pytest.fixture(scope="module")
def child():
    nursery = Nursery()
    yield nursery.run
    nursery.close()


def write_pack(path, blocks=3, rows=64, seed=0):
    torch.manual_seed(seed)
    weights = [pack_int8(torch.randn(rows, 256)) for _ in range(blocks)]
    with PackWriter(path, {"seed": seed}, header_room=4096) as writer:
        for index, weight in enumerate(weights):
            writer.add_block(f"layer{index}", {"w": weight, "norm": torch.randn(5)})
            writer.matrix(f"m{index}", [(index, "w")])
    return weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pack"


@compiled
def test_the_views_are_the_file(path):
    weights = write_pack(path)
    with Pack.open(path) as pack:
        mapped = map_pack(pack)
        assert len(mapped) == 3 and list(mapped) == [0, 1, 2] and 3 not in mapped
        for index, weight in enumerate(weights):
            mapped.load(index)
            pack.check_block(index, mapped.memory(index))
            view = mapped[index]["w"]
            assert torch.equal(view.codes, weight.codes) and torch.equal(view.scale, weight.scale)
            ids = torch.arange(64)
            assert torch.equal(view.rows(ids), weight.rows(ids))
        mapped.check()
    view = mapped[1]["w"]
    del mapped
    gc.collect()
    assert torch.equal(view.codes, weights[1].codes), "a view keeps the mapping"
    place = f"{view.codes.data_ptr() >> 12:x}"
    del view
    gc.collect()
    assert not any(place in line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line)


@compiled
def test_a_file_that_is_cut(path, child):
    """C 25: SIGBUS becomes an exception that names the file; the process lives and never uses a zero as a weight."""
    write_pack(path, blocks=8)
    done = child(
        """
        pack = Pack.open(sys.argv[1])
        mapped = map_pack(pack)
        mapped.check()
        before = [mapped.memory(i).sum().item() for i in range(8)]
        os.truncate(sys.argv[1], pack.blocks[5].ranges[0].offset + 100)
        after = [mapped.memory(i).sum().item() for i in range(8)]
        assert after[:5] == before[:5] and after[6:] == [0, 0] and native.cpu
        for _ in range(2):
            try:
                mapped.check()
            except StreamError as error:
                print(error)
        os.truncate(sys.argv[1], pack.files[0].size)  # as long as before, but full of zeros
        for file in pack.files:
            os.utime(file.path, ns=(0, file.identity[3]))
        pack.check_unchanged()
        try:
            mapped.check()
        except StreamError as error:
            print(error)
        another = map_pack(pack)
        another.check()
        del mapped
        print("alive", another[0]["w"].rows(torch.tensor([3])).shape)
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == lines[1] and f"{path}: the file changed while it was open: its size went from" in lines[0]
    assert lines[2] == f"{path}: part of the mapped file could not be read; it was cut or is damaged"
    assert lines[3].startswith("alive")


@compiled
@pytest.mark.parametrize("when", ["before", "after", "before and after", "never"])
def test_a_signal_that_belongs_to_no_mapping(path, child, when):
    """The process still dies of SIGBUS, by whichever handler was there, and does not go round in circles."""
    write_pack(path)
    done = child(
        """
        import faulthandler, mmap
        when = sys.argv[2]
        if "before" in when:
            faulthandler.enable()
        mapped = map_pack(Pack.open(sys.argv[1]))
        if "after" in when:
            faulthandler.enable()
            mapped.check()
        with open(sys.argv[1] + ".other", "wb+") as file:
            file.truncate(4096)
            other = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
            file.truncate(0)
        print("now", flush=True)
        other[0]
        print("not reached")
        """,
        path,
        when,
    )
    assert done.stdout == "now\n"
    assert done.returncode == -signal.SIGBUS, (done.returncode, done.stderr)
    assert ("Fatal Python error: Bus error" in done.stderr) == (when != "never")


@compiled
def test_a_handler_that_came_later(path, child):
    """check() puts the guard in front again: faulthandler alone would end the process."""
    write_pack(path)
    done = child(
        """
        import faulthandler
        pack = Pack.open(sys.argv[1])
        mapped = map_pack(pack)
        faulthandler.enable()
        mapped.check()
        os.truncate(sys.argv[1], 8192)
        print(mapped.memory(2).sum().item())
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@compiled
def test_a_signal_that_was_sent(path, child):
    """kill -BUS is nobody's fault: a Python handler that was set before gets it."""
    write_pack(path)
    done = child(
        """
        import signal
        signal.signal(signal.SIGBUS, lambda *_: print("heard"))
        mapped = map_pack(Pack.open(sys.argv[1]))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGBUS)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "heard\nheard\n"), done.stderr


@pytest.mark.slow
def test_under_sanitizers(path, sanitized):
    """Their own handler of SIGBUS stands behind the guard; no memory error in finding and replacing pages."""
    write_pack(path)
    code = """
import os, sys, torch
from specdec_kernels.stream import Pack, StreamError, map_pack
pack = Pack.open(sys.argv[1])
many = [map_pack(pack) for _ in range(5)]
del many[::2]
os.truncate(sys.argv[1], pack.blocks[1].ranges[0].offset)
for mapped in many:
    mapped.load(2)
    print(mapped.memory(0).sum().item() > 0, mapped.memory(1).sum().item(), mapped.memory(2).sum().item())
    try:
        mapped.check()
    except StreamError:
        print("noticed")
"""
    done = sanitized(["-c", code, path])
    assert (done.returncode, done.stdout) == (0, "True 0 0\nnoticed\n" * 2), done.stderr[-4000:]


@compiled
def test_threads_that_meet_the_loss_together(path, child):
    write_pack(path, blocks=4, rows=4096)
    done = child(
        """
        import threading
        pack = Pack.open(sys.argv[1])
        mapped = map_pack(pack)
        os.truncate(sys.argv[1], pack.blocks[0].ranges[0].offset)
        sums, start = [], threading.Barrier(4)
        def run(i):
            start.wait()
            sums.append(mapped.memory(i).sum().item())
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        print(sums)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "[0, 0, 0, 0]\n"), done.stderr


@compiled
def test_ranges_are_used_again(path):
    """Many mappings, one after the other and at once: the guard knows which ones live."""
    weights = write_pack(path)
    with Pack.open(path) as pack:
        for _ in range(3):
            many = [map_pack(pack) for _ in range(20)]
            assert all(torch.equal(mapped[2]["w"].codes, weights[2].codes) for mapped in many)
            del many[::2]


@compiled
def test_d49_no_room_for_a_mapping(path, child):
    """A limit on address space: an exception that can be caught; the pack is still there to be read."""
    write_pack(path, rows=4096)
    done = child(
        """
        import resource
        pack = Pack.open(sys.argv[1])
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
        try:
            map_pack(pack)
        except StreamError as error:
            print(str(error).endswith("Cannot allocate memory"))
        print(pack.rows("m0", torch.tensor([1])).shape)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "True\ntorch.Size([1, 256])\n"), done.stderr


def test_mapping_is_refused(path, monkeypatch):
    """Where SIGBUS can't be caught, or blocks are gathered from several files."""
    write_pack(path)
    with Pack.open(path) as pack:
        with monkeypatch.context() as patch:
            patch.setattr(native, "cpu", None)
            with pytest.raises(StreamError, match="mapping a file needs the compiled module"):
                map_pack(pack)
        pack.blocks[0].ranges *= 2
        if native.cpu is not None:
            with pytest.raises(StreamError, match="only a pack of one file can be mapped"):
                map_pack(pack)


@compiled
def test_a_rewrite_under_the_mapping(path):
    """C 28: rename and delete leave the old bytes in place; writing into the file is noticed."""
    weights, other = write_pack(path, seed=0), path.with_name("other")
    write_pack(other, seed=1)
    with Pack.open(path) as pack:
        mapped = map_pack(pack)
        os.replace(other, path)
        mapped.check()
        os.unlink(path)
        mapped.check()
        assert torch.equal(mapped[0]["w"].codes, weights[0].codes)
    write_pack(path)
    with Pack.open(path) as pack:
        mapped = map_pack(pack)
        with open(path, "r+b") as file:
            file.seek(pack.blocks[1].ranges[0].offset)
            file.write(b"changed")
        with pytest.raises(StreamError, match="the file changed while it was open: its content was rewritten"):
            mapped.check()


@linux
def test_sealed_memory(path, child):
    """E 55: no name, nothing to cut; a child maps the same bytes."""
    weights = write_pack(path)
    before = set(os.listdir("/dev/shm"))
    with Pack.open(path) as pack:
        fd = seal(pack)
    try:
        path.unlink()
        assert set(os.listdir("/dev/shm")) == before
        for change in (lambda: os.ftruncate(fd, 0), lambda: os.write(fd, b"x")):
            with pytest.raises(OSError):
                change()
        with pytest.raises(OSError):
            os.truncate(f"/proc/self/fd/{fd}", 1)
        with pytest.raises(OSError):
            os.write(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x")
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with Pack.open(fd) as pack:
            assert pack.path.startswith("/memfd:specdec-pack")
            ids = torch.tensor([5, 63])
            assert torch.equal(pack.rows("m1", ids), weights[1].rows(ids))
        if native.cpu is not None:
            code = """
            ids, pack = torch.tensor([5]), Pack.open(os.open(sys.argv[1], os.O_RDONLY))
            mapped = map_pack(pack)
            print(torch.equal(pack.rows("m2", ids), mapped[2]["w"].rows(ids)))
            mapped.check()
            """
            done = child(code, f"/proc/{os.getpid()}/fd/{fd}")
            assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
        with Pack.open(fd) as pack:  # E 59: a process that used it and ended takes nothing away
            assert torch.equal(pack.rows("m1", ids), weights[1].rows(ids))
    finally:
        os.close(fd)


@linux
def test_sealed_memory_streams_and_maps(path):
    weights = write_pack(path, blocks=6)
    with Pack.open(path) as pack:
        fd = seal(pack)
    with Pack.open(fd) as pack:
        os.close(fd)
        for budget in (2 * pack.blocks[0].nbytes, None):
            with WeightStream(pack, plan(pack, budget=budget, slots=2), poison=True) as stream:
                for _ in range(2):
                    for block in stream.blocks():
                        assert torch.equal(block.tensors["w"].codes, weights[block.index].codes)
                assert stream.stats.active == (budget is not None)


@linux
def test_no_room_for_sealed_memory(path, child):
    """E 55: a limit is an exception when the memory is made, not SIGBUS when it is used; nothing stays open."""
    write_pack(path)
    done = child(
        """
        import resource
        pack = Pack.open(sys.argv[1])
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            seal(pack)
        except OSError as error:
            print(error.errno, len(os.listdir("/proc/self/fd")) - before)
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, f"{errno.EFBIG} 0\n"), done.stderr


@linux
def test_more_than_there_is(path, monkeypatch):
    write_pack(path)
    monkeypatch.setattr(sealed, "available_memory", lambda: (1000, "a test"))
    with (
        Pack.open(path) as pack,
        pytest.raises(OSError, match=r"more than the 1000 that are free \(a test\)") as caught,
    ):
        seal(pack)
    assert caught.value.errno == errno.ENOMEM


@linux
def test_sealing_without_help_from_the_kernel(path, monkeypatch):
    weights = write_pack(path)

    def refused(*_):
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "sendfile", refused)
    with Pack.open(path) as pack:
        fd = seal(pack)
    with Pack.open(fd) as pack:
        os.close(fd)
        assert torch.equal(pack.rows("m0", torch.arange(64)), weights[0].rows(torch.arange(64)))
    monkeypatch.delattr(os, "memfd_create")
    with Pack.open(path) as pack, pytest.raises(StreamError, match="no sealed memory files"):
        seal(pack)


def pss(kind="Pss"):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


@compiled
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs /proc/self/smaps_rollup")
def test_two_processes_have_one_copy(path, child):
    """The second one adds next to nothing: what both count as theirs grows by less than 15 % of the weights."""
    write_pack(path, blocks=4, rows=2**15)
    size = path.stat().st_size // 1024
    with Pack.open(path) as pack:
        before = pss()
        mapped = map_pack(pack)
        for index in mapped:
            mapped.memory(index).sum()
        alone = pss() - before
        assert alone > 0.9 * size
        done = child(
            """
            from pathlib import Path
            def pss():
                return int(Path("/proc/self/smaps_rollup").read_text().partition("Pss:")[2].split()[0])
            pack = Pack.open(sys.argv[1])
            mapped = map_pack(pack)
            torch.zeros(2**20).sum()
            bare = pss()
            for index in mapped:
                mapped.memory(index).sum()
            print(pss() - bare)
            """,
            path,
        )
        assert done.returncode == 0, done.stderr
        second = int(done.stdout)
        first = alone - second  # while the child lived: a page that two map counts half for each
        assert second < 0.6 * size and first + second - alone < 0.15 * size
