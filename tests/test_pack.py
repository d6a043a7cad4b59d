"""Packs: what is opened has the right blocks, parts, rows and checksums; what is wrong is refused."""

import os
import struct

import pytest
import torch

import pack_bytes as pb
from specdec_kernels import pack_int8, record
from specdec_kernels.stream import Pack, PackError, StreamError


def write(tmp_path, data, name="model.pack"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.fixture
def weight():
    torch.manual_seed(1)
    return pack_int8(torch.randn(35, 64), group_size=32, rotate=True)


@pytest.fixture
def path(tmp_path, weight):
    return write(tmp_path, pb.example(weight).bytes())


def test_a_pack_by_hand(path, weight):
    """The reader against bytes that no writer of ours has touched."""
    with Pack.open(path) as pack:
        assert (pack.path, pack.config, pack.order) == (str(path), {"model": "example"}, (0, 1))
        assert [block.name for block in pack.blocks] == ["layer0", "layer1", "embedding"]
        assert pack.nbytes == sum(block.nbytes for block in pack.blocks) == path.stat().st_size - 3 * pb.PAGE
        assert pack.matrices == {"embedding": ((2, "rows"),), "w": ((0, "w"),)}
        for block in pack.blocks:
            (whole,) = block.ranges
            assert block.nbytes % 4096 == whole.offset % 4096 == whole.at == 0 and whole.nbytes == block.nbytes
        memory = [torch.empty(block.nbytes, dtype=torch.uint8) for block in pack.blocks]
        views = [pack.read_block(i, memory[i]) for i in range(3)]
        assert torch.equal(views[0]["w"].codes, weight.codes) and torch.equal(views[0]["w"].scale, weight.scale)
        assert (views[0]["w"].shape, views[0]["w"].group_size, views[0]["w"].rotated) == ((35, 64), 32, True)
        assert torch.equal(views[0]["norm"], torch.tensor([1.0, 2, 3, 4, 5]))
        assert views[1]["table"].tolist() == [list(row) for row in struct.iter_unpack("<4i", pb.pattern(48))]
        assert views[1]["flag"].shape == () and views[1]["flag"].item() is True
        assert views[2]["rows"].data_ptr() == memory[2].data_ptr()


def test_rows_have_the_bits_of_the_matrix(path, weight):
    ids = torch.tensor([34, 0, 15, 16, 16, 3])
    with Pack.open(path) as pack:
        out = torch.full((6, 64), float("nan"))
        assert pack.rows("w", ids, out) is out
        assert torch.equal(out, weight.rows(ids))
        panels, bytes_of_panel = 3, 64 * 16 + 2 * 16 * 4
        assert pack.row_bytes == panels * bytes_of_panel
        table = torch.frombuffer(bytearray(pb.pattern(108)), dtype=torch.bfloat16).view(9, 6)
        assert torch.equal(pack.rows("embedding", torch.tensor([8, 8, 0])), table[[8, 8, 0]].float())
        assert pack.rows("embedding", torch.empty(0, dtype=torch.int64)).shape == (0, 6)
        for wrong in (-1, 9):
            with pytest.raises(ValueError, match=r"ids: expected row numbers in 0\.\.8 of embedding, got"):
                pack.rows("embedding", torch.tensor([0, wrong]))
        with pytest.raises(ValueError, match="matrix: expected one of this pack's"):
            pack.rows("head", ids)


def test_rows_are_not_recorded(path):
    """What runs again later would use memory that is gone and ids of another time."""
    with Pack.open(path) as pack, record() as recording:
        pack.rows("w", torch.tensor([1]))
    assert not recording.complete and recording.reason == "rows were read from a file"


def test_sources(path):
    """A path, a descriptor (which stays the caller's), a pack."""
    fd = os.open(path, os.O_RDONLY)
    with Pack.open(fd) as pack:
        assert pack.path == str(path) and Pack.open(pack) is pack
        os.close(fd)
        pack.read_block(0, torch.empty(pack.blocks[0].nbytes, dtype=torch.uint8))
    with pytest.raises(StreamError, match="closed"):
        pack.rows("w", torch.tensor([0]))
    with pytest.raises(FileNotFoundError):
        Pack.open(path.parent / "missing")


def test_a_damaged_block(tmp_path, weight):
    data = bytearray(pb.example(weight).bytes())
    data[3 * pb.PAGE + 100] ^= 1
    damaged = pytest.raises(StreamError, match=r"block 0 \(layer0\) is damaged: expected crc32")
    with Pack.open(write(tmp_path, data)) as pack, damaged:
        pack.read_block(0, torch.empty(pack.blocks[0].nbytes, dtype=torch.uint8))


def block(i, **change):
    return lambda made: made.manifest["blocks"][i].update(change)


def part(i, j, **change):
    return lambda made: made.manifest["blocks"][i]["parts"][j].update(change)


def both(*changes):
    return lambda made: [change(made) for change in changes]


def swapped(made):
    blocks = made.manifest["blocks"]
    blocks[0], blocks[1] = blocks[1], blocks[0]


def dropped(i, key):
    return lambda made: made.manifest["blocks"][i].pop(key)


WRONG = {
    "no blocks": (lambda made: made.manifest.pop("blocks"), "description: lacks blocks"),
    "blocks not a list": (lambda made: made.manifest.update(blocks={}), "blocks: expected a list"),
    "block not an object": (lambda made: made.manifest.update(blocks=[1]), "block 0: expected an object"),
    "no crc": (dropped(0, "crc32"), "block 0: lacks crc32"),
    "crc of 33 bits": (block(0, crc32=2**32), "crc32: expected 32 bits"),
    "crc text": (block(0, crc32="0"), "crc32: expected 32 bits"),
    "name": (block(0, name=3), "name: expected a string"),
    "same names": (block(1, name="layer0"), "two have the same name"),
    "offset": (block(0, offset=3 * 4096 + 64), "expected multiples of 4096"),
    "nbytes": (block(0, nbytes=100), "expected multiples of 4096"),
    "negative": (block(0, offset=-4096), "expected multiples of 4096"),
    "empty": (block(0, nbytes=0), "expected multiples of 4096"),
    "huge": (block(0, nbytes=2**70), "expected multiples of 4096"),
    "no bool": (block(0, offset=False), "expected multiples of 4096"),
    "overlap": (block(0, nbytes=8192), "overlaps the block before"),
    "beyond the file": (block(2, nbytes=8192), r"expected bytes 12288 to 2\d+, got 20480 to 28672"),
    "in the header": (block(0, offset=4096, nbytes=3 * 4096), "expected bytes 12288 to .*, got 4096 to"),
    "reversed": (swapped, "overlaps the block before"),
    "no parts": (block(0, parts=[]), "expected one or more parts"),
    "part twice": (part(0, 1, name="w"), "parts with different names"),
    "kind": (part(0, 0, kind="pickle"), "kind: expected tensor or int8"),
    "no tensor": (part(1, 0, tensors=["other"]), "the file has no tensor 'other'"),
    "no string": (part(1, 0, tensors=[["x"]]), "the file has no tensor"),
    "not in the block": (part(1, 0, tensors=["embedding.rows"], shape=[9, 6]), "lies outside of the block"),
    "in two parts": (part(1, 1, tensors=["layer1.table"], shape=[3, 4]), "belongs to another part"),
    "too many tensors": (part(1, 0, tensors=["layer1.table"] * 2), "expected 1 tensors"),
    "one tensor for int8": (part(0, 0, tensors=["layer0.w.codes"]), "expected 2 tensors"),
    "codes and scale swapped": (part(0, 0, tensors=["layer0.w.scale", "layer0.w.codes"]), "codes and scale: expected"),
    "shape": (part(1, 0, shape=[4, 3]), "shape: expected .*3, 4.* as of its tensor"),
    "int8 shape": (part(0, 0, shape=[49, 64]), "codes and scale: expected"),
    "int8 of one dimension": (part(0, 0, shape=[35]), "expected shape"),
    "group": (part(0, 0, group_size=64), "codes and scale: expected"),
    "group of another K": (part(0, 0, group_size=33), "group_size: expected a divisor"),
    "group of zero": (part(0, 0, group_size=0), "group_size: expected a divisor"),
    "rotated": (part(0, 0, rotated=1), "rotate: expected a bool"),
    "layout": (part(0, 0, layout="i8-panel16x4/1"), "layout: expected i8-panel16x4/2, got 'i8-panel16x4/1'"),
    "order": (lambda made: made.manifest.update(order=[0, 3]), "order: expected indexes of 3 blocks, got 3"),
    "order bool": (lambda made: made.manifest.update(order=[True]), "order: expected indexes"),
    "matrices": (lambda made: made.manifest.update(matrices=[]), "matrices: expected an object"),
    "matrix of nothing": (lambda made: made.manifest.update(matrices={"m": []}), "equally many columns"),
    "matrix of a vector": (
        lambda made: made.manifest.update(matrices={"m": [[0, "norm"]]}),
        "expected a matrix of int8 or floats",
    ),
    "matrix of ints": (
        lambda made: made.manifest.update(matrices={"m": [[1, "table"]]}),
        "expected a matrix of int8 or floats, got .* of torch.int32",
    ),
    "matrix elsewhere": (lambda made: made.manifest.update(matrices={"m": [[3, "w"]]}), "of this pack, got"),
    "columns": (lambda made: made.manifest.update(matrices={"m": [[0, "w"], [2, "rows"]]}), "equally many columns"),
    "version": (lambda made: made.metadata.update(version="2"), "pack version 1 is read, got version '2'"),
    "format": (lambda made: made.metadata.update(format="pt"), "no pack, but a plain safetensors file"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_description(tmp_path, weight, wrong):
    change, match = WRONG[wrong]
    made = pb.example(weight)
    change(made)
    path = write(tmp_path, made.bytes())
    with pytest.raises(PackError, match=match) as caught:
        Pack.open(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_part_off_its_cache_line(tmp_path, weight):
    made = pb.PackBytes([("b", [("a", "U8", [32], bytes(32)), ("pad", "U8", [32], bytes(32))])])
    made.header["b.pad"], made.header["_pad.0"] = made.header["_pad.0"], made.header["b.pad"]
    with pytest.raises(PackError, match=r"'b\.pad': expected a multiple of 64 from the block's start"):
        Pack.open(write(tmp_path, made.bytes()))


def test_a_description_that_is_no_json(tmp_path, weight):
    made = pb.example(weight)
    for text in ("", "{", "[" * 10**4, '{"config": 1, "config": 2}'):
        header = {"__metadata__": {**made.metadata, "pack": text}, **made.header}
        with pytest.raises(PackError, match="description"):
            Pack.open(write(tmp_path, pb.raw(header, bytes(made.data))))


def test_truncated_packs(tmp_path, weight):
    """C 24 for packs: refused when they are opened, whatever is missing."""
    data = pb.example(weight).bytes()
    for keep in (0, 7, 8, 100, 3 * pb.PAGE, len(data) // 2, len(data) - 4096, len(data) - 4095, len(data) - 1):
        with pytest.raises(PackError, match="truncated"):
            Pack.open(write(tmp_path, data[:keep]))


def test_c28_a_file_that_changes(path, tmp_path, weight):
    """(a) renamed over and (d) deleted: the old bytes; (b) written to and (c) grown: an error."""
    data = path.read_bytes()
    with Pack.open(path) as pack:
        other = write(tmp_path, bytes(len(data)), "other")
        os.replace(other, path)
        pack.check_unchanged()
        path.unlink()
        pack.check_unchanged()
        assert torch.equal(pack.rows("w", torch.arange(35)), weight.rows(torch.arange(35)))
    write(tmp_path, data)
    with Pack.open(path) as pack:
        with open(path, "r+b") as file:
            file.seek(3 * pb.PAGE)
            file.write(b"new")
        with pytest.raises(StreamError, match="its content was rewritten"):
            pack.check_unchanged()
    with Pack.open(path) as pack:
        with open(path, "ab") as file:
            file.write(b"more")
        with pytest.raises(StreamError, match=f"its size went from {len(data)} to {len(data) + 4} bytes"):
            pack.check_unchanged()
    write(tmp_path, data)
    with Pack.open(path) as pack:
        os.truncate(path, 3 * pb.PAGE)
        with pytest.raises(StreamError, match="the file ends at byte 12288"):
            pack.rows("w", torch.tensor([0]))


def test_views_need_fit_memory(path):
    with Pack.open(path) as pack:
        block = pack.blocks[0]
        for memory in (
            torch.empty(block.nbytes - 1, dtype=torch.uint8),
            torch.empty(2 * block.nbytes, dtype=torch.uint8)[::2],
            torch.empty(block.nbytes + 64, dtype=torch.uint8)[1:],
        ):
            with pytest.raises(ValueError, match="memory: expected"):
                block.views(memory)
        with pytest.raises(TypeError, match="memory: expected dtype uint8"):
            block.views(torch.empty(block.nbytes))
        larger = torch.empty(block.nbytes + 4096, dtype=torch.uint8)
        assert block.views(larger)["norm"].shape == (5,)


def test_rows_of_many_kinds(tmp_path):
    """int8 with and without rotation, odd group sizes, f32, f16, bf16; more ids than are read at once."""
    torch.manual_seed(2)
    for n, k, group, rotate in ((200, 96, None, False), (2000, 128, 32, True), (17, 20, 10, False)):
        weight = pack_int8(torch.randn(n, k), group_size=group, rotate=rotate)
        floats = {t: torch.randn(n, k).to(d) for t, d in pb.TAGS.items() if t in ("F32", "F16", "BF16") for d in d[:1]}
        parts = [(t, t, [n, k], v.view(torch.uint8).numpy().tobytes()) for t, v in floats.items()]
        made = pb.PackBytes([("b", [("int8", weight), *parts])])
        made.manifest["matrices"] = {name: [[0, name]] for name in ("int8", *floats)}
        with Pack.open(write(tmp_path, made.bytes())) as pack:
            for ids in (torch.arange(n), torch.randint(n, (300,)), torch.tensor([n - 1])):
                assert torch.equal(pack.rows("int8", ids), weight.rows(ids))
                for name, values in floats.items():
                    assert torch.equal(pack.rows(name, ids), values[ids].float())


def test_rows_from_several_parts(tmp_path):
    """A tall matrix is cut into blocks; its rows are found in all of them, from several threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(3)
    values = torch.randn(100, 32)
    pieces = [pack_int8(values[:48]), pack_int8(values[48:64]), pack_int8(values[64:])]
    made = pb.PackBytes([(f"b{i}", [("w", piece)]) for i, piece in enumerate(pieces)])
    made.manifest["matrices"] = {"m": [[i, "w"] for i in range(3)]}
    whole = pack_int8(values)
    with Pack.open(write(tmp_path, made.bytes())) as pack:
        ids = torch.randint(100, (64,))
        with ThreadPoolExecutor(4) as pool:
            for result in pool.map(lambda _: pack.rows("m", ids), range(20)):
                assert torch.equal(result, whole.rows(ids))
        one = pack.row_bytes
        pack.rows("m", ids)
        assert (pack.row_bytes - one) * 20 == one
