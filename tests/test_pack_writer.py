"""The writer of packs: what it writes is what is read, and it leaves either a whole file or nothing.

Numbers in names are those of the list of field reports that the cases come from.
"""

import errno
import json
import os
import signal
import stat
import subprocess
import sys

import pytest
import torch

import pack_bytes as pb
from forked import Nursery
from specdec_kernels import Int8Weight, pack_int8
from specdec_kernels.stream import Pack, PackWriter, newfile, writer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pack"


@pytest.fixture(scope="module")
def child():
    nursery = Nursery()
    yield nursery.run
    nursery.close()


@pytest.fixture(params=["unnamed", "named"])
def way(request, monkeypatch):
    """Both ways to write a file that is not there until it is complete."""
    if request.param == "named":
        monkeypatch.setattr(newfile.NewFile, "_unnamed", lambda self: None)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("needs O_TMPFILE")


def read(pack, index):
    return pack.read_block(index, torch.empty(pack.blocks[index].nbytes, dtype=torch.uint8))


def small(path, seed=0, **options):
    torch.manual_seed(seed)
    with PackWriter(path, {"seed": seed}, header_room=4096, **options) as out:
        out.add_block("a", {"w": torch.randn(6, 4), "m": pack_int8(torch.randn(20, 8))})
        out.add_block("b", {"w": torch.randn(3)})
    return path.read_bytes()


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(value):
    return value.contiguous().flatten().view(torch.uint8)


def test_c19_every_dtype_comes_back(path):
    """Bit for bit, NaN among them, with scalars, empty and strided tensors."""
    torch.manual_seed(0)
    random = torch.randint(0, 256, (5, 48), dtype=torch.uint8)
    parts = {tag: random.view(dtype) for tag, (dtype, _) in pb.TAGS.items() if tag != "BOOL"}
    parts["BOOL"] = random > 100
    parts |= {"scalar": torch.tensor(3, dtype=torch.int16), "empty": torch.empty(0, 7), "none": torch.empty(3, 0)}
    parts |= {"strided": torch.randn(8, 6).T, "every other": torch.arange(20)[::2], "one": torch.tensor([True])}
    with PackWriter(path) as out:
        out.add_block("all", parts)
        out.add_block("nothing", {"empty": torch.empty(0)})
    with Pack.open(path) as pack:
        views = read(pack, 0)
        assert list(views) == list(parts)
        for name, value in parts.items():
            assert same(views[name], value), name
        assert read(pack, 1)["empty"].shape == (0,)
    official = pytest.importorskip("safetensors.torch", reason="the official library is the authority").load_file(path)
    for name, value in parts.items():
        assert same(official[f"all.{name}"], value), name
    assert all(name.split(".")[0] in ("all", "nothing", "_pad") for name in official)


def test_int8_comes_back(path):
    torch.manual_seed(0)
    weights = {
        "rows": pack_int8(torch.randn(35, 96)),
        "rotated": pack_int8(torch.randn(64, 128), group_size=32, rotate=True),
        "odd": pack_int8(torch.randn(17, 20), group_size=10),
        "empty": Int8Weight.empty(0, 8),
    }
    with PackWriter(path) as out:
        assert out.add_block("a", weights) == 0
        out.matrix("m", [("a", "rows")])
        out.matrix("tied", [(0, "rows")])
    with Pack.open(path) as pack:
        views = read(pack, 0)
        for name, weight in weights.items():
            found = views[name]
            assert same(found.codes, weight.codes) and same(found.scale, weight.scale)
            assert (found.shape, found.group_size, found.rotated) == (weight.shape, weight.group_size, weight.rotated)
        assert pack.matrices["m"] == pack.matrices["tied"] == ((0, "rows"),)
        assert path.stat().st_size == pack.blocks[0].ranges[0].offset + pack.nbytes  # a tie is stored once


def test_the_layout_of_the_file(path):
    """Whole pages per block, parts on cache lines, the order as given, nothing but zeros in between."""
    config = {"text": 'quotes " and \\ and é\n', "list": [1, 2.5, None, True]}
    with PackWriter(path, config) as out:
        out.add_block("first", {"a": torch.ones(3), "b": torch.ones(5)})
        out.add_block("aside", {"a": torch.ones(2000)}, in_order=False)
        out.add_block("second", {"a": torch.ones(1)})
    data = path.read_bytes()
    with Pack.open(path) as pack:
        assert pack.config == config and pack.order == (0, 2)
        at = pack.blocks[0].ranges[0].offset
        for block in pack.blocks:
            (place,) = block.ranges
            assert place.offset == at and at % 4096 == block.nbytes % 4096 == 0
            used = bytearray(block.nbytes)
            for part in block.parts.values():
                assert part.pieces[0].at % 64 == 0
                used[part.pieces[0].at : part.pieces[0].at + part.nbytes] = b"x" * part.nbytes
            assert all(data[at + i] == 0 for i in range(block.nbytes) if not used[i])
            at += block.nbytes
        assert at == len(data)
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0 and json.loads(data[8 : 8 + length])["__metadata__"]["format"] == "specdec-pack"


def test_the_header_makes_room(path, monkeypatch):
    """Where the room for the header is too small, the data moves back in place, over itself."""
    monkeypatch.setattr(writer, "PIECE", 10_000)
    torch.manual_seed(0)
    blocks = [{f"part{j}": torch.randn(1 + 37 * i % 501, 9) for j in range(8)} for i in range(60)]
    for room in (0, 4096, 1 << 20):
        with PackWriter(path, {"room": room}, header_room=room) as out:
            for i, parts in enumerate(blocks):
                out.add_block(f"block{i}", parts)
        with Pack.open(path) as pack:
            start = pack.blocks[0].ranges[0].offset
            assert (start > 40_000) if room < 1 << 20 else (1 << 20 <= start < (1 << 20) + 8192)
            for i, parts in enumerate(blocks):
                assert all(same(found, parts[name]) for name, found in read(pack, i).items())


def test_a_new_file_or_none(path, way):
    """C 27: a failure half-way leaves the old file and nothing else; so does Ctrl-C."""
    old = small(path)
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), PackWriter(path) as out:
            out.add_block("a", {"w": torch.randn(100_000)})
            raise error
        assert path.read_bytes() == old and os.listdir(path.parent) == [path.name]
    out = PackWriter(path)
    out.add_block("a", {"w": torch.randn(10)})
    out.abort()
    out.abort()
    assert path.read_bytes() == old and os.listdir(path.parent) == [path.name]
    new = small(path, seed=1)
    assert new != old and os.listdir(path.parent) == [path.name]


def test_c26_saving_onto_an_open_pack(path, way):
    """Load, change, save to the same path: who has the old file open reads on, who opens it now gets the new one."""
    small(path)
    with Pack.open(path) as old:
        before = read(old, 0)["w"].clone()
        with PackWriter(path, old.config) as out:
            for block in old.blocks:
                out.add_block(
                    block.name, {name: v if name == "m" else v + 1 for name, v in read(old, block.index).items()}
                )
        assert same(read(old, 0)["w"], before)
        old.check_unchanged()
    with Pack.open(path) as new:
        assert same(read(new, 0)["w"], before + 1)


def test_a_full_disk(path, child):
    """ENOSPC, here as a limit on the file's size: an OSError, the old file as it was, no other file."""
    old = small(path)
    done = child(
        """
        import errno, resource, signal
        from specdec_kernels.stream import newfile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for _ in range(2):
            try:
                with PackWriter(sys.argv[1]) as out:
                    out.add_block("a", {"w": torch.randn(1 << 20)})
            except OSError as error:
                print(error.errno == errno.EFBIG, os.listdir(os.path.dirname(sys.argv[1])))
            newfile.NewFile._unnamed = lambda self: None
        """,
        path,
    )
    assert (done.returncode, done.stdout) == (0, "True ['model.pack']\n" * 2), done.stderr
    assert path.read_bytes() == old


def test_a_disk_that_fills_up(path, way, monkeypatch):
    """A write that is short first and fails then, at every place where there is a write."""
    old, calls, fails = small(path), 0, 0

    def full(fd, view, offset):
        nonlocal calls
        calls += 1
        if calls == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(fd, view[: max(1, len(view) // 2)] if len(view) > 8 else view, offset)

    monkeypatch.setattr(newfile, "_pwrite", full)
    new = small(path)
    assert new == old and calls > 20
    for at in range(1, calls, 7):
        calls, fails = 0, at
        with pytest.raises(OSError) as caught:
            small(path, seed=1)
        assert caught.value.errno == errno.ENOSPC
        assert path.read_bytes() == old and os.listdir(path.parent) == [path.name]


SAVE = """
import os, sys, time, torch
from specdec_kernels.stream import PackWriter, newfile
if sys.argv[2] == "named":
    newfile.NewFile._unnamed = lambda self: None
with PackWriter(sys.argv[1]) as out:
    out.add_block("a", {"w": torch.zeros(1 << 20)})
    print("half", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["unnamed", "named"])
def test_e55_killed_while_saving(path, name):
    """SIGKILL: the old file is whole. Nothing is left, or what is left goes with the next save to the same place."""
    old = small(path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", SAVE, path, name], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout.readline() == b"half\n"
        assert len(os.listdir(path.parent)) == (1 if name == "unnamed" else 2)
        if name == "named":  # while the writer lives, its file stays
            small(path)
            assert len(os.listdir(path.parent)) == 2
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == old
    if name == "unnamed":
        assert os.listdir(path.parent) == [path.name]
    small(path)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_system_without_links(path, monkeypatch):
    """Found out before the work, not after it."""

    def refused(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    small(path)
    assert os.listdir(path.parent) == [path.name]


def test_a_writer_that_another_one_took_for_dead(path, monkeypatch):
    """Between making a temporary file and locking it there is a moment; who loses it there makes another one."""
    monkeypatch.setattr(newfile.NewFile, "_unnamed", lambda self: None)
    real, lost = newfile._lock, []

    def late(fd):
        if not lost:
            lost.append(os.listdir(path.parent)[0])
            newfile._remove_if_left(path.parent / lost[0])
        real(fd)

    monkeypatch.setattr(newfile, "_lock", late)
    small(path)
    assert lost and os.listdir(path.parent) == [path.name]


def test_modes_and_links(tmp_path, way):
    """The mode follows umask, or stays that of the file that is replaced; a link keeps pointing at the new file."""
    path, link = tmp_path / "real.pack", tmp_path / "link.pack"
    before = os.umask(0o027)
    try:
        small(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        link.symlink_to(path)
        small(link, seed=1)
    finally:
        os.umask(before)
    assert link.is_symlink() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o604
    with Pack.open(path) as pack:
        assert pack.config == {"seed": 1}
    for target in ("/dev/null", tmp_path):
        with pytest.raises(ValueError, match="path: expected a new or a regular file"):
            PackWriter(target)
    with pytest.raises(FileNotFoundError):
        PackWriter(tmp_path / "no folder" / "x.pack")


def test_wrong_arguments(path):
    ones = torch.ones(2, 2)
    with pytest.raises((TypeError, ValueError)):
        PackWriter(path, {1, 2})
    with pytest.raises(ValueError):
        PackWriter(path, float("nan"))
    with PackWriter(path) as out:
        out.add_block("a", {"b.c": ones, "v": torch.ones(2)})
        wrong = [
            (("a", {"x": ones}), "name: expected a string that no block before had"),
            ((3, {"x": ones}), "name: expected a string"),
            (("b", {}), "parts: expected one or more"),
            (("a.b", {"c": ones}), r"the name 'a\.b\.c' is taken"),
            (("_pad", {"0": ones}), r"the name '_pad\.0' is taken"),
        ]
        for arguments, match in wrong:
            with pytest.raises(ValueError, match=match):
                out.add_block(*arguments)
        for parts in ({"x": [1.0]}, {3: ones}, {"x": ones.to(torch.complex128)}):
            with pytest.raises(TypeError, match="parts"):
                out.add_block("c", parts)
        for value in (ones.clone().requires_grad_(), ones.to_sparse(), ones.to("meta")):
            with pytest.raises(ValueError, match=r"parts\['x'\]: expected"):
                out.add_block("c", {"x": value})
        for parts, match in (
            ([("z", "x")], "expected names or indexes of blocks"),
            ([(7, "x")], "expected names or indexes of blocks"),
            ([("a", "x")], "expected a matrix of block 'a'"),
            ([("a", "v")], "expected a matrix of block 'a'"),
            ([], "equally many columns"),
        ):
            with pytest.raises(ValueError, match=match):
                out.matrix("m", parts)
        out.add_block("c", {"x": ones})  # what was refused left no trace
    with Pack.open(path) as pack:
        assert [block.name for block in pack.blocks] == ["a", "c"] and same(read(pack, 1)["x"], ones)


def test_an_incomplete_block_can_not_be_closed(path, monkeypatch):
    """An exception that somebody swallows within the with block does not lead to a file with a hole."""
    real = newfile.NewFile.write
    with pytest.raises(ValueError, match="a block is incomplete"), PackWriter(path) as out:
        monkeypatch.setattr(newfile.NewFile, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError):
            out.add_block("a", {"w": torch.ones(3)})
        monkeypatch.setattr(newfile.NewFile, "write", real)
        with pytest.raises(ValueError, match="an earlier block is incomplete"):
            out.add_block("b", {"w": torch.ones(3)})
    assert os.listdir(path.parent) == []


def test_memory_of_one_block(path, child):
    """D 46: writing takes the memory of what is being added, not of the file."""
    done = child(
        """
        def peak():
            text = open("/proc/self/status").read()
            return int(text.partition("VmHWM:")[2].split()[0])
        one = {"w": torch.zeros(4 << 20, dtype=torch.uint8)}
        with PackWriter(sys.argv[1]) as out:
            out.add_block("first", one)
            before = peak()
            for i in range(40):
                out.add_block(f"b{i}", one)
        print(peak() - before)
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500 and path.stat().st_size > 160 << 20


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as refused:
        PackWriter(tmp_path / "no folder" / "x.pack")
    assert refused.value.filename == str(tmp_path / "no folder" / "x.pack")
