"""Plain safetensors models as packs: the index is checked, blocks gather what the layout names.

Numbers in names are those of the list of field reports that the cases come from.
"""

import json

import pytest
import torch

import pack_bytes as pb
from specdec_kernels.stream import Pack, PackError, WeightStream, plan

NAMES = ("m1", "m2", "m3")


def shards(tmp_path, weight_map, **files):
    for name, tensors in files.items():
        (tmp_path / f"{name}.safetensors").write_bytes(pb.file([(tensor, "F32", [2]) for tensor in tensors]))
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index(tmp_path):
    shards(tmp_path, {n: f"{n}.safetensors" for n in NAMES}, **{n: [n] for n in NAMES})
    with Pack.from_safetensors(tmp_path, [("b", [("w", ["m2"]), ("all", ["m1", "m3"])])]) as pack:
        assert len(pack.files) == 3 and pack.blocks[0].crc32 is None
        memory = torch.empty(4096, dtype=torch.uint8)
        whole = torch.frombuffer(bytearray(pb.pattern(8)), dtype=torch.float32)
        views = pack.read_block(0, memory)
        assert torch.equal(views["w"].view(torch.int32), whole.view(torch.int32))
        assert torch.equal(views["all"].view(torch.int32), whole.repeat(2).view(torch.int32))


def test_c34_missing_shards(tmp_path):
    shards(tmp_path, {n: f"{n}.safetensors" for n in NAMES}, m1=["m1"])
    with pytest.raises(PackError, match=r"missing: 'm2.safetensors', 'm3.safetensors'"):
        Pack.from_safetensors(tmp_path, [])


def test_c35_a_wrong_index(tmp_path):
    shards(tmp_path, {"m1": "m1.safetensors", "m2": "m1.safetensors"}, m1=["m1"])
    with pytest.raises(PackError, match=r"tensor 'm2' is in 'm1.safetensors'; it is nowhere"):
        Pack.from_safetensors(tmp_path, [])
    shards(tmp_path, {"m1": "m2.safetensors", "m2": "m1.safetensors"}, m1=["m1"], m2=["m2"])
    with pytest.raises(PackError, match=r"tensor 'm1' is in 'm2.safetensors'; it is in 'm1.safetensors'"):
        Pack.from_safetensors(tmp_path, [])


def test_a_tensor_in_two_files(tmp_path):
    shards(tmp_path, {"m1": "m1.safetensors", "m2": "m2.safetensors"}, m1=["m1"], m2=["m1", "m2"])
    with pytest.raises(PackError, match=r"'m1' is in .*m1.safetensors, too"):
        Pack.from_safetensors(tmp_path, [])


@pytest.mark.parametrize(
    "name",
    [
        "../m1.safetensors",
        "/etc/passwd",
        "a/m1.safetensors",
        "m1.bin",
        "..",
        "",
        ".m1.safetensors",
        "C:m1.safetensors",
        "a\0.safetensors",
        3,
    ],
)
def test_paths_in_an_index(tmp_path, name):
    shards(tmp_path, {"m1": name}, m1=["m1"])
    with pytest.raises(PackError, match="weight_map: expected"):
        Pack.from_safetensors(tmp_path, [])


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"weight_map":{}}', b'{"weight_map":[]}', b"\xff", b"[" * 10**5])
def test_broken_indexes(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(PackError, match=r"index\.json"):
        Pack.from_safetensors(tmp_path, [])


def test_pickles(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4")
    with pytest.raises(PackError, match=r"pytorch_model\.bin belongs to pickle files, which are not read"):
        Pack.from_safetensors(tmp_path, [])


def test_a_layout_that_does_not_fit(tmp_path):
    files = pb.file([("a", "F32", [2, 3]), ("b", "F32", [2, 4]), ("c", "BF16", [2, 3]), ("d", "F32", [])])
    (tmp_path / "model.safetensors").write_bytes(files)

    def opened(*blocks, **more):
        with Pack.from_safetensors(tmp_path, list(blocks), **more) as pack:
            return pack

    for other in ("b", "c", "d"):
        with pytest.raises(PackError, match="expected tensors that can be stacked, got 'a'"):
            opened(("x", [("p", ["a", other])]))
    with pytest.raises(PackError, match="the model has no tensor 'e'"):
        opened(("x", [("p", ["e"])]))
    for layout in ([("x", [])], [("x", [("p", [])])], [("x", [("p", ["a"]), ("p", ["b"])])]):
        with pytest.raises(ValueError, match="layout: "):
            opened(*layout)
    with pytest.raises(ValueError, match="expected blocks with different names"):
        opened(("x", [("p", ["a"])]), ("x", [("p", ["b"])]))
    with pytest.raises(ValueError, match="order: expected indexes of 1 blocks, got 1"):
        opened(("x", [("p", ["a"])]), order=[1])
    with pytest.raises(ValueError, match="matrix 'm'"):
        opened(("x", [("p", ["a"]), ("q", ["b"])]), matrices={"m": [("x", "p"), ("x", "q")]})


def test_rows_across_files(tmp_path):
    """A part whose tensors lie in different files, read by rows; neighbours in one file are one range."""
    torch.manual_seed(0)
    save = pytest.importorskip("safetensors.torch", reason="the official library is the authority").save_file
    one, two, three = torch.randn(5, 8), torch.randn(4, 8), torch.randn(3, 8)
    save({"a": one, "b": two}, tmp_path / "1.safetensors")
    save({"c": three}, tmp_path / "2.safetensors")
    layout = [("block", [("w", ["a", "b", "c"])])]
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    with Pack.from_safetensors(files, layout, matrices={"m": [("block", "w")]}) as pack:
        assert len(pack.blocks[0].ranges) == 2 and pack.order == (0,)
        whole = torch.cat([one, two, three])
        assert torch.equal(pack.rows("m", torch.arange(12)), whole)
        memory = torch.empty(pack.blocks[0].nbytes, dtype=torch.uint8)
        assert torch.equal(pack.read_block(0, memory)["w"], whole)


def test_streaming_without_a_conversion(tmp_path):
    """A plain model under a budget: blocks gathered from two files at odd offsets, bit for bit, once per pass."""
    torch.manual_seed(0)
    save = pytest.importorskip("safetensors.torch", reason="the official library is the authority").save_file
    parts = {f"l{i}.{part}": torch.randn(30, 70 + i).bfloat16() for i in range(6) for part in "qkv"}
    save({name: value for name, value in parts.items() if name[-1] != "k"}, tmp_path / "1.safetensors")
    save({name: value for name, value in parts.items() if name[-1] == "k"}, tmp_path / "2.safetensors")
    layout = [(f"l{i}", [("qkv", [f"l{i}.{part}" for part in "qkv"])]) for i in range(6)]
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    with Pack.from_safetensors(files, layout) as pack:
        planned = plan(pack, budget=3 * pack.blocks[0].nbytes, slots=2)
        with WeightStream(pack, planned, poison=True) as stream:
            for _ in range(3):
                for block in stream.blocks():
                    whole = torch.cat([parts[f"{block.name}.{part}"] for part in "qkv"])
                    assert torch.equal(block.tensors["qkv"], whole)
            assert stream.stats.active and stream.stats.bytes_read > 2 * planned.bytes_per_pass * 0.9
