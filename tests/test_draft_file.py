"""Draft files: what is written comes back bit for bit, and what is malformed is refused with its name."""

import json
import os

import pytest
import torch

import specdec_kernels as sk
from specloop.errors import FormatError, ModelError
from specloop.formats.draft_file import DraftFile, is_draft_file, packed, write_draft
from tiny_drafts import CUT, draft_config, in_dtype, random_weights, write
from tiny_llama import CONFIG, build


@pytest.fixture(scope="module")
def target():
    return build("int8")


@pytest.mark.parametrize("kind", ["feature", "model"])
@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_there_and_back(tmp_path, target, kind, dtype):
    file = write(tmp_path / "one.safetensors", target, kind=kind, dtype=dtype)
    wanted = in_dtype(random_weights(kind, draft_config(), len(CUT)), dtype)
    told = []
    weights = DraftFile.open(tmp_path / "one.safetensors").weights(told.append)
    assert weights.keys() == wanted.keys() and told == sorted(told) and told[-1] <= 1
    for name, weight in weights.items():
        pairs = [(weight, wanted[name])]
        if isinstance(weight, sk.Int8Weight):
            assert (weight.group_size, weight.rotated) == (wanted[name].group_size, wanted[name].rotated)
            assert weight.codes.data_ptr() % 64 == weight.scale.data_ptr() % 64 == 0
            pairs = [(weight.codes, wanted[name].codes), (weight.scale, wanted[name].scale)]
        assert all(torch.equal(a, b) for a, b in pairs), name
    assert file.kind == kind and file.config.draft_ids == tuple(CUT) and not file.config.tied
    assert file.recipe == {"seed": 0} and file.target["name"] == "tiny"
    assert file.nbytes == sum(weight.nbytes for weight in wanted.values()) + 4 * len(CUT)
    assert is_draft_file(tmp_path / "one.safetensors") and not is_draft_file(tmp_path / "none")
    assert os.listdir(tmp_path) == ["one.safetensors"]


def parts_of(path):
    """(header, data) of a file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def rewrite(path, change):
    """The file with another header; ``change`` gets it and its metadata's object."""
    header, data = parts_of(path)
    about = json.loads(header["__metadata__"]["specdec"])
    data = change(header, about) or data
    header["__metadata__"]["specdec"] = about if isinstance(about, str) else json.dumps(about)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def put(*keys, value):
    def change(header, about):
        at = about
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return change


def drop(key):
    return lambda header, about: about.pop(key) and None


def rename(old, new):
    def change(header, about):
        header[new] = header.pop(old)

    return change


def shape_of(name, shape, dtype=None):
    def change(header, about):
        header[name] |= {"shape": shape} | ({"dtype": dtype} if dtype else {})

    return change


WRONG = {
    "form": (put("form", value=2), "expected form 1"),
    "keys": (drop("recipe"), "expected form 1 with"),
    "more keys": (put("licence", value="x"), "expected form 1 with"),
    "kind": (put("kind", value="medusa"), "kind: expected feature or model, got 'medusa'"),
    "kinds": (put("kind", value=[]), r"kind: expected feature or model, got \[\]"),
    "other kind": (put("kind", value="model"), "tensor 'embedding': expected float32"),
    "config": (put("config", value=7), "config: expected the numbers of a model"),
    "config field": (put("config", "draft_ids", value=[1]), "config: expected the numbers"),
    "config lacks": (lambda h, a: a["config"].pop("heads") and None, "config: .*heads"),
    "config number": (put("config", "heads", value=7), "heads to be a multiple"),
    "config size": (put("config", "hidden", value=192), r"tensor '\w+.*expected .*192"),
    "config NaN": (put("config", "rms_eps", value=float("nan")), "NaN is no JSON"),
    "layers": (put("config", "layers", value=2), "a head of one layer, got 2"),
    "target": (put("target", value="tiny"), "target: expected name and fingerprint"),
    "fingerprint": (put("target", "fingerprint", value="x" * 201), "fingerprint: expected a short text"),
    "vocabulary": (put("vocabulary", value=None), "vocabulary: expected a short text, got None"),
    "name": (put("target", "name", value="a\nb"), "name: expected a short text"),
    "missing": (rename("norm", "norms"), "tensor 'norm': expected float32 .96., got none"),
    "strange": (rename("fc.codes", "fc.code"), "tensor 'fc': expected float32"),
    "no scale": (rename("fc.scale", "other"), "tensor 'fc.scale': expected float32 .*, got none"),
    "no ids": (rename("draft_ids", "ids"), "draft_ids: expected a vector of int32, got none"),
    "ids": (shape_of("draft_ids", [len(CUT), 1]), "draft_ids: expected a vector of int32, got int32"),
    "ids' type": (shape_of("draft_ids", [len(CUT)], "F32"), "draft_ids: expected a vector of int32, got float32"),
    "codes": (shape_of("norm", [1, 96]), "tensor 'norm': expected float32 .96., got float32 .1, 96."),
    "codes' type": (
        lambda h, a: h["fc.codes"].update(dtype="I8"), "tensor 'fc.codes': expected uint8 .*, got int8"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(tmp_path, target, case):
    path = tmp_path / "one.safetensors"
    write(path, target)
    change, message = WRONG[case]
    rewrite(path, change)
    with pytest.raises(FormatError, match=message) as caught:
        DraftFile.open(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*CUT[:-1], CONFIG.vocab], r"ids in \[0, 203\), got 203 at"),
        ([-1, *CUT[1:]], "got -1 at 0"),
        ([CUT[0], CUT[0], *CUT[2:]], "got 0 twice at 1"),
        (CUT[::-1], "expected ascending ids, got"),
        (CUT[:-1], "tensor 'head': expected 134 rows, got more"),
        (CUT[:-16], "tensor 'head.codes': expected uint8"),
    ],
)
def test_ids_that_are_no_map(tmp_path, target, ids, message):
    """Out of range, twice, not ascending, and too few: nothing maps them by position."""
    path = tmp_path / "one.safetensors"
    write(path, target)
    ids = torch.tensor(ids, dtype=torch.int32)

    def change(header, about):
        begin, end = header["draft_ids"]["data_offsets"]
        _, data = parts_of(path)
        assert end == len(data)
        header["draft_ids"] |= {"shape": [len(ids)], "data_offsets": [begin, begin + ids.nbytes]}
        return data[:begin] + bytes(ids.view(torch.uint8).tolist())

    rewrite(path, change)
    with pytest.raises(ModelError, match=message):
        DraftFile.open(path).weights()
    if len(ids) == len(CUT) - 1:  # seen by the rows that are left over, when they are read
        return
    weights = in_dtype(random_weights("feature", draft_config(), len(CUT)), "int8")
    about = {"target": {"name": "a", "fingerprint": "b"}, "vocabulary": "c"}
    with pytest.raises(ModelError):
        write_draft(tmp_path / "two", kind="feature", config=draft_config(), draft_ids=ids, weights=weights, **about)
    assert os.listdir(tmp_path) == ["one.safetensors"]


def test_files_that_are_cut_or_are_none(tmp_path, target):
    path = tmp_path / "one.safetensors"
    write(path, target)
    data = path.read_bytes()
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError, match=r"truncated|header|at least 8 bytes|belong"):
            DraftFile.open(path)
    for junk in (b"GGUF" + bytes(100), bytes(100), b"\xff" * 100):
        path.write_bytes(junk)
        with pytest.raises(FormatError):
            DraftFile.open(path)
        assert not is_draft_file(path)
    with pytest.raises(ModelError, match="No such file"):
        DraftFile.open(tmp_path / "none")
    with pytest.raises(FormatError, match="a folder"):
        DraftFile.open(tmp_path)


def test_numbers_that_are_not_finite(tmp_path, target):
    path = tmp_path / "one.safetensors"
    for dtype, name in (("f32", "norm"), ("f32", "layer.0.down"), ("int8", "fc.scale")):
        file = write(path, target, dtype=dtype)
        header, data = parts_of(path)
        at = len(path.read_bytes()) - len(data) + header[name]["data_offsets"][0]
        with open(path, "r+b") as out:
            out.seek(at)
            out.write(b"\x00\x00\xc0\x7f")
        with pytest.raises(FormatError, match=f"tensor '{name}': expected finite numbers"):
            file.weights()


def test_a_file_that_became_another(tmp_path, target):
    path = tmp_path / "one.safetensors"
    file = write(path, target)
    write(path, target, ids=CUT[:-3])
    with pytest.raises(FormatError, match="another one than it was"):
        file.weights()


def test_every_damaged_byte_of_the_header_is_survived(tmp_path, target):
    """Another byte in the header: it is refused, or it is harmless; nothing else happens."""
    path = tmp_path / "one.safetensors"
    write(path, target, dtype="f32")
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    for at in range(0, end, 31):
        kept, data[at] = data[at], data[at] ^ (1 << at % 8)
        path.write_bytes(data)
        try:
            DraftFile.open(path).weights()
        except ModelError as error:
            assert "\n" not in str(error)
        data[at] = kept


def test_what_no_reader_would_take_is_not_written(tmp_path):
    weights = in_dtype(random_weights("feature", draft_config(), len(CUT)), "int8")
    about = {"kind": "feature", "config": draft_config(), "draft_ids": CUT, "vocabulary": "v"}
    about["target"] = {"name": "tiny", "fingerprint": "f"}
    for name, weight, message in (
        ("fc", sk.pack_int8(torch.zeros(96, 192)), "fc: expected groups and rotation"),
        ("norm", torch.ones(96, dtype=torch.bfloat16), "tensor 'norm': expected float32"),
        ("head", packed(torch.zeros(5, 96)), "tensor 'head.codes'"),
        ("more", torch.ones(3), "tensor 'more': no draft of this kind"),
    ):
        with pytest.raises(FormatError, match=message):
            write_draft(tmp_path / "x", weights=weights | {name: weight}, **about)
    with pytest.raises(ValueError, match="Out of range"):
        write_draft(tmp_path / "x", weights=weights, recipe=float("inf"), **about)
    assert os.listdir(tmp_path) == []
