"""Packs: what is opened has the right blocks, parts, rows and checksums; what is wrong is refused."""

import os
import struct

import pytest
import torch

import pack_bytes as pb
from specdec_kernels import pack_int8
from specdec_kernels.stream import Pack, StreamError


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
