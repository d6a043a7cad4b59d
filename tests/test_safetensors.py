"""The safetensors header, byte by byte: what must load loads, everything else is refused before data is touched.

Numbers in names (c24, ...) are those of the list of field reports that the cases come from.
"""

import gc
import os
import resource
import struct

import pytest
import torch

import pack_bytes as pb
from specdec_kernels.stream import Pack, PackError, StreamError
from specdec_kernels.stream.files import FLAGS, PackFile
from specdec_kernels.stream.safetensors import DTYPES, read_header


def header(tmp_path, data):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, str(path))
    finally:
        os.close(fd)


def refused(tmp_path, data, match):
    with pytest.raises(PackError, match=match) as caught:
        header(tmp_path, data)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and "\n" not in message and len(message) < 500


def test_every_dtype(tmp_path):
    tensors = [(f"t{tag}", tag, [3, 2]) for tag in pb.TAGS] + [("scalar", "F32", []), ("empty", "I64", [0, 5])]
    entries, metadata = header(tmp_path, pb.file(tensors, {"who": "nobody"}))
    assert metadata == {"who": "nobody"}
    start = (tmp_path / "a.safetensors").stat().st_size - pb.entries(tensors)[1]
    for name, tag, shape in tensors:
        entry = entries[name]
        assert (entry.name, entry.dtype, entry.shape) == (name, pb.TAGS[tag][0], tuple(shape))
        assert (entry.offset, entry.nbytes) == (start, pb.size(tag, shape))
        start += entry.nbytes
    assert set(pb.TAGS) <= set(DTYPES) and all(DTYPES[tag] is dtype for tag, (dtype, _) in pb.TAGS.items())


def test_the_official_writer(tmp_path):
    """What the library of the format writes is read the same, for all dtypes that both know."""
    save = pytest.importorskip("safetensors.torch", reason="the official library is the authority").save
    torch.manual_seed(0)
    known = [d for tag, d in DTYPES.items() if tag not in ("F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")]
    tensors = {str(dtype): torch.randint(0, 2, (4, 3)).to(torch.uint8).to(dtype) for dtype in known}
    tensors["scalar"], tensors["empty"] = torch.tensor(1.5), torch.empty(0, 4)
    data = save(tensors, metadata={"a": "b"})
    entries, metadata = header(tmp_path, data)
    assert metadata == {"a": "b"} and set(entries) == set(tensors)
    for name, entry in entries.items():
        assert (entry.dtype, entry.shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        read = torch.frombuffer(bytearray(data), dtype=torch.uint8)[entry.offset : entry.offset + entry.nbytes]
        assert torch.equal(read.clone(), tensors[name].contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize("left", ["all but 1", "all but 4095", "all but a page", "half", "header only", 7, 0])
def test_c24_truncated(tmp_path, left):
    data = pb.file([("a", "F32", [1000, 4]), ("b", "BF16", [100])])
    start = len(data) - 16200
    keep = {
        "all but 1": len(data) - 1,
        "all but 4095": len(data) - 4095,
        "all but a page": len(data) - 4096,
        "half": start + 8100,
        "header only": start,
    }
    refused(tmp_path, data[: keep.get(left, left)], "truncated")


def test_c24_truncated_within_the_header(tmp_path):
    data = pb.file([("a", "F32", [10])])
    for keep in range(8, len(data) - 40):
        refused(tmp_path, data[:keep], "truncated: a header of")


def two(first, second, data_bytes=16):
    a, b = pb.entry("U8", [first[1] - first[0]], *first), pb.entry("U8", [second[1] - second[0]], *second)
    return pb.raw({"a": a, "b": b}, bytes(data_bytes))


@pytest.mark.parametrize(
    ("case", "match"),
    [
        (two((0, 8), (0, 8), 8), "'b' overlaps tensor 'a'"),
        (two((0, 9), (8, 16)), "'b' overlaps tensor 'a'"),
        (two((0, 16), (4, 8)), "'b' overlaps tensor 'a'"),
        (two((0, 7), (8, 16)), "'b' leaves a hole of 1 bytes behind tensor 'a'"),
        (two((1, 8), (8, 16)), "'a' leaves a hole of 1 bytes behind the header"),
        (two((0, 8), (8, 15)), "1 bytes at the end belong to no tensor"),
        (two((0, 8), (8, 17)), "truncated: the data of the file ends 1 bytes earlier"),
        (pb.raw({"a": pb.entry("U8", [8], 8, 0)}, bytes(8)), "begin > end"),
        (pb.raw({}, bytes(1)), "1 bytes at the end belong to no tensor"),
    ],
    ids=["same", "by one byte", "inside", "hole", "hole in front", "rest", "beyond", "backwards", "no tensors"],
)
def test_c29_ranges(tmp_path, case, match):
    refused(tmp_path, case, match)


def test_c29_any_order_is_fine(tmp_path):
    entries, _ = header(tmp_path, two((8, 16), (0, 8)))
    assert entries["a"].offset == entries["b"].offset + 8
    assert header(tmp_path, pb.raw({})) == ({}, {})
    assert header(tmp_path, pb.raw(b"{}      ")) == ({}, {})


ENTRY = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b'{"a":' + ENTRY + b',"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', "the name 'a' appears twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', "the name 'dtype' appears twice"),
        (b'{"__metadata__":{"k":"1","k":"2"},"a":' + ENTRY + b"}", "the name 'k' appears twice"),
        (b"[" + ENTRY + b"]", "it must begin with '{'"),
        (b' {"a":' + ENTRY + b"}", "it must begin with '{'"),
        (b'{"a":' + ENTRY + b"", "the header is not valid"),
        (b'{"a":' + ENTRY + b"} x", "the header is not valid"),
        (b'{"\xff":' + ENTRY + b"}", "the header is not valid: 'utf-8' codec"),
        (b'{"\\ud800":' + ENTRY + b"}", "the header is not valid: 'utf-8' codec"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', "NaN is no JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it nests too deeply"),
        (b'{"__metadata__":{"k":1},"a":' + ENTRY + b"}", "__metadata__: expected an object of strings"),
        (b'{"__metadata__":["k"],"a":' + ENTRY + b"}", "__metadata__: expected an object of strings"),
        (b'{"a":1}', "expected dtype, shape and data_offsets, got 1"),
        (b'{"a":{"dtype":"U8","shape":[1]}}', "expected dtype, shape and data_offsets"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}}', "expected dtype, shape and data_offsets"),
        (b'{"a":{"dtype":"F6","shape":[1],"data_offsets":[0,1]}}', "dtype: expected one of .*, got 'F6'"),
        (b'{"a":{"dtype":["U8"],"shape":[1],"data_offsets":[0,1]}}', "dtype: expected one of .*, got"),
        (b'{"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}}', "shape: expected at most 64 sizes >= 0, got 1"),
        (b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', "shape: expected"),
        (b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', "shape: expected"),
        (b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "shape: expected"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}', r"data_offsets: expected \[begin, end\], got"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}}', r"data_offsets: expected \[begin, end\], got"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":["0",1]}}', r"data_offsets: expected \[begin, end\], got"),
        (b'{"a":{"dtype":"U8","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,1]}}', "the header is not valid"),
    ],
)
def test_c30_headers(tmp_path, text, match):
    refused(tmp_path, pb.raw(text, b"\0"), match)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 100_000_001, 100_000_000, 0, 1, 49, 2**32 + 48])
def test_c30_lengths(tmp_path, length):
    """No length is believed, so none sizes an allocation."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path, pb.raw(b'{"a":' + ENTRY + b"}", length=length), "a header of|at the end|not valid")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_c30_a_large_file_with_a_large_length(tmp_path):
    """A header as long as the sparse file behind it: refused by its length alone."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 2**32))
    os.truncate(path, 2**33)
    with pytest.raises(PackError, match="a header of 4294967296 bytes"):
        Pack.from_safetensors([path], [])


@pytest.mark.parametrize(
    ("shape", "tag", "nbytes"),
    [
        ([1000, 1000], "F32", 4),
        ([2**32, 2**32], "U8", 0),
        ([2**32, 2**32], "F32", 4),
        ([2**62, 2], "F64", 8),
        ([2**62, 4, 0], "U8", 4),
        ([], "F32", 8),
        ([0], "F32", 4),
        ([3], "BF16", 7),
        ([2**63], "U8", 1),
    ],
)
def test_c32_shapes(tmp_path, shape, tag, nbytes):
    refused(
        tmp_path, pb.raw({"a": pb.entry(tag, shape, 0, nbytes)}, bytes(nbytes)), "data_offsets: expected|shape: exp"
    )


def test_c41_binary(tmp_path):
    """Line ends and end-of-file marks of text modes come through, and the file is opened in binary mode."""
    data = pb.file([("a", "U8", [600])])
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with Pack.from_safetensors([path], [("block", [("a", ["a"])])]) as pack:
        memory = torch.empty(pack.blocks[0].nbytes, dtype=torch.uint8)
        assert bytes(pack.read_block(0, memory)["a"].tolist()) == pb.pattern(600)
    assert FLAGS & getattr(os, "O_BINARY", 0) == getattr(os, "O_BINARY", 0) and FLAGS & os.O_CLOEXEC


@pytest.mark.parametrize(
    ("start", "match"),
    [
        (b"GGUF\3\0\0\0" + bytes(100), "this is a GGUF file"),
        (b"PK\3\4" + bytes(100), "this is a zip archive, likely a pickle checkpoint"),
        (b"\x80\2}q\0X\4\0\0\0" + bytes(100), "this is a pickle, which can run code"),
        (b"version https://git-lfs.github.com/spec/v1\n", "this is a Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "a header of"),
        (b"\0" * 100, "a header of 0 bytes"),
    ],
)
def test_other_files(tmp_path, start, match):
    path = tmp_path / "model.bin"
    path.write_bytes(start)
    with pytest.raises(PackError, match=match):
        Pack.open(path)


def test_no_files(tmp_path):
    """Folders and pipes are refused at once; so is a name that can't be one."""
    with pytest.raises(PackError, match="expected a safetensors file, got a folder"):
        Pack.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(PackError, match="expected a safetensors file, got not a regular file"):
            Pack.open(path)
    with pytest.raises(PackError, match="null"):
        Pack.open("a\0b")
    with pytest.raises(OSError):
        Pack.open(tmp_path / ("x" * 300))
    with pytest.raises(TypeError):
        Pack.open(None)
    with pytest.raises(OSError):
        Pack.open(10**6)


def test_failures_close_their_files(tmp_path):
    (tmp_path / "a").write_bytes(b"nothing")
    gc.collect()  # what earlier tests left would go in between
    before = len(os.listdir("/proc/self/fd"))
    for source in (tmp_path / "a", tmp_path):
        with pytest.raises(PackError):
            Pack.open(source)
        with pytest.raises(PackError):
            Pack.from_safetensors(source, [])
    assert len(os.listdir("/proc/self/fd")) == before


class TestReading:
    """c37: a read may be short, be interrupted, or end; the bytes are right or it is an error with a place."""

    def data(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(pb.pattern(100_000))
        return PackFile(path)

    def test_short_reads(self, tmp_path, monkeypatch):
        from specdec_kernels.stream import files

        calls = []

        def short(fd, view, offset):
            calls.append(offset)
            count = 1 + 7919 * len(calls) % 5000
            piece = os.pread(fd, min(count, len(view)), offset)
            view[: len(piece)] = piece
            return len(piece)

        monkeypatch.setattr(files, "pread", short)
        with self.data(tmp_path) as file:
            memory = bytearray(70_000)
            file.read_into(memory, 30_000)
            assert memory == pb.pattern(70_000, 30_000) and len(calls) > 10
            with pytest.raises(StreamError, match="data: the file ends at byte 100000"):
                file.read_into(bytearray(70_001), 30_000)

    def test_an_error(self, tmp_path, monkeypatch):
        from specdec_kernels.stream import files

        def broken(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(files, "pread", broken)
        with self.data(tmp_path) as file, pytest.raises(StreamError, match="byte 7 failed: Input/output error"):
            file.read_into(bytearray(5), 7)

    def test_without_positional_reads(self, tmp_path, monkeypatch):
        """As on Windows: the same bytes through seek and read."""
        import importlib

        from specdec_kernels.stream import files

        monkeypatch.delattr(os, "preadv")
        try:
            importlib.reload(files)
            self.data(tmp_path).close()
            with files.PackFile(tmp_path / "data") as file:
                memory = bytearray(50_000)
                file.read_into(memory, 50_000)
                assert memory == pb.pattern(50_000, 50_000)
        finally:
            monkeypatch.undo()
            importlib.reload(files)
