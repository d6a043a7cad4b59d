"""Arguments of the wrong kind to specdec_kernels.stream: errors that name the argument, before anything is done."""

import re
from types import SimpleNamespace

import pytest
import torch

from specdec_kernels import stream
from specdec_kernels.stream import Pack, PackWriter, WeightStream, map_pack, plan, seal
from test_mapping import compiled

ID = torch.zeros(1, dtype=torch.int64)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("arguments") / "a.pack"
    with PackWriter(path) as out:
        for i in range(3):
            out.add_block(f"b{i}", {"w": torch.ones(64, 64)})
        out.matrix("m", [("b0", "w")])
    return path


@pytest.fixture(scope="module")
def pack(path):
    with Pack.open(path) as opened:
        yield opened


def streaming(pack):
    return WeightStream(pack, plan(pack, budget=40000, slots=1))


def with_stream(call):
    def called(pack, value):
        with streaming(pack) as opened:
            return call(opened, value)

    return called


def with_writer(call):
    def called(pack, value):
        out = PackWriter(str(pack.path) + ".new")
        try:
            out.add_block("a", {"w": torch.ones(4, 4)})
            return call(out, value)
        finally:
            out.abort()

    return called


LAYOUT = [("a", [("w", ["b0.w"])])]


ROOM = torch.empty(1 << 15, dtype=torch.uint8)


def with_reader(call):
    def called(pack, value):
        with stream.Reader(pack.files) as reader:
            return call(reader, value)

    return called


def range_of(**fields):
    return [SimpleNamespace(**{"file": 0, "offset": 0, "nbytes": 4096, "at": 0} | fields)]


# name of the argument -> [(call, what it is given, error)]
CALLS = {
    "source": [
        (lambda pack, value: Pack.open(value), (None, 1.5, True, [], object()), TypeError),
        (lambda pack, value: Pack.open(value), (-1, 10**30), ValueError),
        (lambda pack, value: Pack.from_safetensors(value, []), (None, 5, {}, [None]), TypeError),
    ],
    "pack": [
        (lambda pack, value: plan(value), (None, 1.5, True, [], object()), TypeError),
        (lambda pack, value: plan(value), (-1, 10**30), ValueError),
        (lambda pack, value: WeightStream(value, plan(pack)), (None, 1.5, True, {}), TypeError),
        (lambda pack, value: seal(value), ("path", None, 5), TypeError),
        (lambda pack, value: map_pack(value), ("path", None, 5), TypeError),
    ],
    "reserved": [(lambda pack, value: plan(pack, reserved=value), (5, "kv", [("kv", 1)]), TypeError)],
    "device": [
        (lambda pack, value: plan(pack, device=value), (None, 1.5, [], 5), TypeError),
        (lambda pack, value: plan(pack, device=value), ("nope", "cpu:x", ""), ValueError),
    ],
    "host_budget": [(lambda pack, value: plan(pack, host_budget=value), (0, "12x", []), stream.BudgetError)],
    "index": [
        (lambda pack, value: pack.read_block(value, ROOM), (None, "b0", 1.0, True), TypeError),
        (lambda pack, value: pack.read_block(value, ROOM), (99, -1, 3, 10**30), ValueError),
        (lambda pack, value: pack.check_block(value, ROOM), (None, "b0"), TypeError),
        (lambda pack, value: pack.check_block(value, ROOM), (99, -1), ValueError),
    ],
    "memory": [
        (with_reader(lambda reader, value: reader.submit(range_of(), value)), (None, 5, "text"), TypeError),
        (with_reader(lambda reader, value: reader.submit(range_of(), value)), (b"x", ROOM[::2]), ValueError),
        (lambda pack, value: pack.read_block(0, value), (None, 5, "text", []), TypeError),
        (lambda pack, value: pack.read_block(0, value), (b"x" * 20000, bytearray(99), ROOM[:99]), ValueError),
        (lambda pack, value: pack.read_block(0, value), (ROOM[::2], torch.empty(9, device="meta")), ValueError),
        (lambda pack, value: pack.check_block(0, value), (None, 5), TypeError),
        (lambda pack, value: pack.check_block(0, value), (b"x", ROOM[:99]), ValueError),
    ],
    "matrix": [
        (lambda pack, value: pack.rows(value, ID), (None, 5, [], {}), TypeError),
        (lambda pack, value: pack.rows(value, ID), ("nope",), ValueError),
        (with_stream(lambda s, value: s.rows(value, ID, torch.empty(1, 64))), (None, []), TypeError),
        (with_stream(lambda s, value: s.rows(value, ID, torch.empty(1, 64))), ("nope",), ValueError),
    ],
    "ids": [
        (lambda pack, value: pack.rows("m", value), (None, 5, [0], torch.zeros(1)), TypeError),
        (lambda pack, value: pack.rows("m", value), (ID + 64, ID - 1, ID[None]), ValueError),
        (with_stream(lambda s, value: s.rows("m", value, torch.empty(1, 64))), (None, [0], torch.zeros(1)), TypeError),
        (with_stream(lambda s, value: s.rows("m", value, torch.empty(1, 64))), (ID + 64, ID - 1), ValueError),
    ],
    "out": [
        (lambda pack, value: pack.rows("m", ID, value), (5, "x", torch.empty(1, 64).int()), TypeError),
        (lambda pack, value: pack.rows("m", ID, value), (torch.empty(2, 64), torch.empty(64)), ValueError),
        (with_stream(lambda s, value: s.rows("m", ID, value)), (None, 5), TypeError),
        (with_stream(lambda s, value: s.rows("m", ID, value)), (torch.empty(2, 64),), ValueError),
    ],
    "layout": [
        (lambda p, value: Pack.from_safetensors([p.path], value), (None, 5, "ab", [1], [("a",)]), TypeError),
        (lambda p, value: Pack.from_safetensors([p.path], [("a", value)]), (None, 5, "ab", [1]), TypeError),
        (lambda p, value: Pack.from_safetensors([p.path], [("a", [("w", value)])]), (None, 5, "b0.w"), TypeError),
        (lambda p, value: Pack.from_safetensors([p.path], [("a", value)]), ([], [("w", [])]), ValueError),
    ],
    "order": [
        (lambda pack, value: Pack.from_safetensors([pack.path], LAYOUT, order=value), (5, "0", b"0"), TypeError),
        (lambda pack, value: Pack.from_safetensors([pack.path], LAYOUT, order=value), ([1], [-1], ["0"]), ValueError),
        (with_stream(lambda s, value: s.blocks(value)), (5, "0"), TypeError),
        (with_stream(lambda s, value: s.blocks(value)), ([99], [-1], [True], [[]]), ValueError),
    ],
    "matrices": [
        (lambda p, value: Pack.from_safetensors([p.path], LAYOUT, matrices=value), (5, "m", [1]), TypeError),
    ],
    "plan": [(lambda pack, value: WeightStream(pack, value), (None, 5, "x"), TypeError)],
    "progress": [(lambda pack, value: WeightStream(pack, plan(pack), progress=value), (5, "x", True), TypeError)],
    "engine": [(lambda pack, value: WeightStream(pack, plan(pack, budget=40000), engine=value), (5, []), ValueError)],
    "threads": [(lambda p, value: WeightStream(p, plan(p, budget=40000), threads=value), (0, "2", 1.5), ValueError)],
    "count": [
        (with_stream(lambda s, value: s.drop_slots(value)), (None, "1", 1.5, True), TypeError),
        (with_stream(lambda s, value: s.drop_resident(value)), (None, "1"), TypeError),
        (with_stream(lambda s, value: s.drop_slots(value)), (-1,), ValueError),
        (with_stream(lambda s, value: s.drop_resident(value)), (-1,), ValueError),
    ],
    "size": [
        (with_stream(lambda s, value: s.shrink(value)), (None, "1MB", 1.5), TypeError),
        (with_stream(lambda s, value: s.shrink(value)), (-1,), ValueError),
    ],
    "path": [(lambda pack, value: PackWriter(value), (None, 5, []), TypeError)],
    "config": [
        (lambda pack, value: PackWriter(f"{pack.path}.new", value), (b"x", object(), {1, 2}), TypeError),
        (lambda pack, value: PackWriter(f"{pack.path}.new", value), (float("nan"), float("inf")), ValueError),
    ],
    "header_room": [
        (lambda pack, value: PackWriter(f"{pack.path}.new", header_room=value), (None, "1", 1.5), TypeError),
        (lambda pack, value: PackWriter(f"{pack.path}.new", header_room=value), (-1,), ValueError),
    ],
    "parts": [
        (with_writer(lambda out, value: out.add_block("b", value)), (None, 5, [1], torch.ones(2)), TypeError),
        (with_writer(lambda out, value: out.add_block("b", value)), ({},), ValueError),
        (with_writer(lambda out, value: out.matrix("m", value)), (None, 5, "aw", ["aw"], [("a",)]), TypeError),
        (with_writer(lambda out, value: out.matrix("m", value)), ([], [("b", "w")], [([], "w")]), ValueError),
    ],
    "name": [
        (with_writer(lambda out, value: out.add_block(value, {"w": torch.ones(2)})), (None, 5, "a"), ValueError),
        (with_writer(lambda out, value: out.matrix(value, [("a", "w")])), (None, 5, []), TypeError),
    ],
    "files": [(lambda pack, value: stream.Reader(value), (None, 5, "path", ["path"]), TypeError)],
    "ranges": [
        (with_reader(lambda reader, value: reader.submit(value, ROOM)), (None, 5, "x", [5]), TypeError),
        (
            with_reader(lambda reader, value: reader.submit(value, ROOM)),
            (range_of(at=None), range_of(at=1.5)),
            TypeError,
        ),
        (
            with_reader(lambda reader, value: reader.submit(value, ROOM)),
            (range_of(file=1), range_of(at=-1)),
            ValueError,
        ),
    ],
    "timeout": [
        (with_reader(lambda reader, value: reader.submit(range_of(), ROOM).wait(value)), ("1", True), TypeError),
        (with_reader(lambda reader, value: reader.submit(range_of(), ROOM).wait(value)), (-1, 1e400), ValueError),
    ],
    "pread": [(lambda pack, value: stream.Reader(pack.files, pread=value), (5, "x"), TypeError)],
    "nbytes": [
        (lambda pack, value: stream.aligned_empty(value), (None, "1", 1.5, True), TypeError),
        (lambda pack, value: stream.aligned_empty(value), (-1,), ValueError),
        (lambda pack, value: stream.aligned_empty(value), (10**30,), MemoryError),
    ],
    "root": [(lambda pack, value: stream.available_memory(value), (None, 5), TypeError)],
    "read_bandwidth": [
        (lambda pack, value: plan(pack).predict(value, 1.0), (None, "1GB", True), TypeError),
        (lambda pack, value: plan(pack).predict(value, 1.0), (0, -1, float("nan")), ValueError),
    ],
    "compute_seconds": [
        (lambda pack, value: plan(pack).predict(1e9, value), (None, "1"), TypeError),
        (lambda pack, value: plan(pack).predict(1e9, value), (-1, float("nan"), float("inf")), ValueError),
    ],
    "between": [
        (lambda pack, value: plan(pack).predict(1e9, 1.0, value), (None, "1"), TypeError),
        (lambda pack, value: plan(pack).predict(1e9, 1.0, value), (-1, float("nan")), ValueError),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(pack, name):
    for call, values, error in CALLS[name]:
        for value in values:
            with pytest.raises(error) as caught:
                call(pack, value)
            assert caught.type in (error, stream.BudgetError), f"{value!r}: {caught.value!r}"
            assert re.match(rf"{name}\b.*: ", str(caught.value)), f"{value!r}: {caught.value}"
            assert ", got " in str(caught.value) or "can't be had" in str(caught.value) or name == "config"


@compiled
def test_blocks_of_a_mapping(pack):
    mapped = map_pack(pack)
    for call in (mapped.memory, mapped.load):
        for value in (99, -1):
            with pytest.raises(ValueError, match=r"^index: expected the number of one of 3 blocks, from 0, got"):
                call(value)
        with pytest.raises(TypeError, match=r"^index: expected an integer, got str"):
            call("b0")


@pytest.mark.parametrize("kind", [torch.Tensor, memoryview])
def test_memory_off_its_alignment(pack, kind):
    """A buffer's address is refused for what it is, and before a byte of it is written."""
    room = torch.zeros((1 << 15) + 64, dtype=torch.uint8)
    for off in (1, 16, 32, 63):
        with pytest.raises(ValueError, match=r"^memory: expected an address on 64 bytes, got 0x"):
            pack.read_block(0, room[off:] if kind is torch.Tensor else memoryview(room.numpy())[off:])
    assert not room.any()


def test_right_arguments(pack, tmp_path):
    """What was refused above is close to what is taken."""
    assert plan(str(pack.path), device=torch.device("cpu"), reserved={"kv": 5}, host_budget="1MB").reserved == {"kv": 5}
    assert pack.read_block(2, memoryview(ROOM.numpy()))["w"].sum() == 64 * 64
    pack.check_block(1, bytes(torch.ones(64 * 64).view(torch.uint8).tolist()))
    assert pack.rows("m", ID).sum() == 64
    with streaming(pack) as opened:
        out = torch.empty(1, 64)
        opened.rows("m", ID, out)
        assert out.sum() == 64
        assert [block.index for block in opened.blocks(i for i in (2, 0))] == [2, 0]
        assert opened.drop_slots(0) == opened.drop_resident(0) == opened.shrink(0) == 0
    layout, matrices = {"a": {"w": ["b0.w"]}}, {"m": [("a", "w")]}
    with Pack.from_safetensors([pack.path], layout, order=range(1), matrices=matrices) as some:
        assert some.rows("m", ID).sum() == 64
