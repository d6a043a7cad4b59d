"""Shards of a training corpus: what was written comes back, and what is not whole or not ours is refused by name."""

import errno
import json
from pathlib import Path

import pytest
import torch

from specloop.errors import FormatError, OptionError, SpecloopError
from specloop.formats import safetensors
from specloop.train import corpus, manifest
from specloop.train.corpus import Shard, Text, shard_numbers, shard_path, write_shard
from specloop.train.manifest import begin, read_manifest

SIZE, VOCAB, ABOUT = 12, 50, {"target": "ours", "vocabulary": "v"}


def texts(count=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = lambda *shape: torch.randint(0, VOCAB, shape, generator=g, dtype=torch.int32)
    numbers = lambda *shape: torch.randn(*shape, generator=g)
    for i in range(count):
        prompt, answer = 3 + i, 1 + 2 * i
        yield Text(
            ids(prompt + answer),
            prompt,
            numbers(prompt + answer, SIZE).bfloat16(),
            numbers(answer),
            ids(answer, corpus.TOP),
            -numbers(answer, corpus.TOP).abs().half(),
            0.5 * i,
            i - 1,
        )


@pytest.fixture
def shard(tmp_path):
    write_shard(tmp_path, 3, list(texts()), ABOUT)
    return shard_path(tmp_path, 3)


def opened(path, **options):
    return Shard(path, SIZE, VOCAB, **options)


def test_what_was_written_comes_back(shard):
    found = opened(shard, target="ours")
    assert found.count == 5
    for i, text in enumerate(texts()):
        for mine, stored in zip(text, found.text(i), strict=True):
            tensor = isinstance(mine, torch.Tensor)
            assert (mine.dtype is stored.dtype and torch.equal(mine, stored)) if tensor else mine == stored
        assert torch.equal(found.prompt(i), text.ids[: text.prompt])
    assert found.text(4).answer == 9 and found.answers == [1, 3, 5, 7, 9]
    said = torch.cat([text.ids[text.prompt :] for text in texts()])
    assert torch.equal(found.counts(), torch.bincount(said, minlength=VOCAB))
    with pytest.raises(IndexError):
        found.text(5)


def test_a_shard_of_other_hands_without_sums(shard):
    """The form says nothing of metadata or the order of tensors."""
    tensors, _ = safetensors.read(shard)
    tensors |= {name: tensors[name][:, :0] for name in ("top_ids", "top_logprobs")}
    safetensors.write(shard, tensors, {})
    assert opened(shard).text(2).top_ids.shape == (5, 0)
    assert torch.equal(opened(shard, target="ours").text(2).features, list(texts())[2].features)


def test_numbers(tmp_path, shard):
    write_shard(tmp_path, 12, list(texts()), ABOUT)
    (tmp_path / ".shard-00001.safetensors.1234abcd.tmp").write_bytes(b"x")
    (tmp_path / "shard-00002.safetensors.tmp").write_bytes(b"x")
    assert shard_numbers(tmp_path) == [3, 12]
    with pytest.raises(FormatError, match="nowhere"):
        shard_numbers(tmp_path / "nowhere")


def test_damaged_numbers_are_noticed(shard):
    data = Path(shard).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in range(header, len(data), 97):
        damaged = bytearray(data)
        damaged[at] ^= 4
        Path(shard).write_bytes(damaged)
        with pytest.raises(FormatError, match=r"shard-00003.*the file is damaged"):
            opened(shard)
    assert len(data) - header > 2000


@pytest.mark.parametrize("kept", [0, 7, 300, -1])
def test_a_cut_shard(shard, kept):
    Path(shard).write_bytes(Path(shard).read_bytes()[:kept])
    with pytest.raises(FormatError, match=r"shard-00003.*truncated"):
        opened(shard)


def edited(shard, **changes):
    """The shard with other tensors, and no sums that would give it away."""
    tensors, _ = safetensors.read(shard)
    safetensors.write(shard, {k: v for k, v in {**tensors, **changes}.items() if v is not None}, {})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lse", None, "no tensor lse"),
        ("weights", torch.ones(2), "tensor 'weights' is no part"),
        ("features", torch.ones(5, SIZE), r"features: expected bfloat16 \[50, 12\], got float32 \[5, 12\]"),
        ("starts", torch.tensor([0, 4, 11, 21, 36, 49]), "starts: expected 0 to 50, ascending, got 0 to 49"),
        ("starts", torch.tensor([0, 11, 4, 21, 34, 50]), "starts: expected 0 to 50, ascending"),
        ("prompts", torch.tensor([3, 4, 5, 6, 8], dtype=torch.int32), "text 4: expected a prompt and an answer"),
        ("tokens", torch.full((50,), VOCAB, dtype=torch.int32), r"tokens: expected ids in \[0, 50\), got 50 to 50"),
        ("top_ids", torch.full((25, 16), -1, dtype=torch.int32), r"top_ids: expected ids in \[0, 50\)"),
        ("lse", torch.full((25,), torch.nan), "lse, top_logprobs: expected numbers"),
    ],
)
def test_what_does_not_fit_together(shard, name, change, message):
    edited(shard, **{name: change})
    with pytest.raises(FormatError, match=message) as raised:
        opened(shard)
    assert "shard-00003" in str(raised.value)


def test_a_foreign_shard(shard, tmp_path):
    with pytest.raises(FormatError, match="expected one of the target 'theirs', got one of 'ours'"):
        opened(shard, target="theirs")
    with pytest.raises(FormatError, match=r"features: expected bfloat16 \[50, 16\], got bfloat16 \[50, 12\]"):
        Shard(shard, 16, VOCAB)
    other = shard_path(tmp_path, 4)
    safetensors.write(other, {"weight": torch.ones(3)}, {})
    with pytest.raises(FormatError, match="expected a shard of a corpus, got no tensor tokens"):
        opened(other)
    with pytest.raises(FormatError, match="form 1, got 7"):
        tensors, _ = safetensors.read(shard)
        safetensors.write(shard, tensors, {corpus.KEY: json.dumps({"form": 7})})
        opened(shard)


def test_one_that_is_written_to_meanwhile(shard):
    found = opened(shard)
    with open(shard, "r+b") as file:
        file.write(b"\0")
    with pytest.raises(SpecloopError, match="changed while it was open"):
        found.text(0)


def test_a_manifest_goes_on_with_the_same_alone(tmp_path):
    folder = tmp_path / "new" / "corpus"
    begin(folder, {"seed": 1, "settings": {"texts": 4, "temperatures": ((0.0, 1.0),)}})
    begin(folder, {"seed": 1, "settings": {"texts": 4, "temperatures": ((0.0, 1.0),)}})
    assert read_manifest(folder)["settings"]["texts"] == 4
    with pytest.raises(OptionError, match=r"holds another corpus: settings.texts: it has 4, asked for 5"):
        begin(folder, {"seed": 1, "settings": {"texts": 5, "temperatures": ((0.0, 1.0),)}})
    for shards in (3, 5):  # what is wanted is no part of it
        begin(folder, {"seed": 1, "settings": {"texts": 4, "temperatures": ((0.0, 1.0),)}}, shards)
        assert read_manifest(folder)["shards"] == shards
    (folder / manifest.MANIFEST).write_text("[1]")
    with pytest.raises(FormatError, match="manifest of a corpus"):
        begin(folder, {"seed": 1})
    (folder / manifest.MANIFEST).unlink()
    write_shard(folder, 0, list(texts()), ABOUT)
    with pytest.raises(OptionError, match=r"shards without corpus\.json"):
        begin(folder, {"seed": 1})


def test_a_full_disk_leaves_what_is_complete(shard, tmp_path, monkeypatch):
    from specdec_kernels.stream.newfile import NewFile

    def full(self, data, offset):
        if offset > 500:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data, offset)

    write = NewFile.write
    monkeypatch.setattr(NewFile, "write", full)
    with pytest.raises(safetensors.DiskError, match=r"shard-00004.safetensors failed: the disk is full"):
        write_shard(tmp_path, 4, list(texts(seed=1)), ABOUT)
    with pytest.raises(safetensors.DiskError, match="the disk is full"):
        write_shard(tmp_path, 3, list(texts(seed=1)), ABOUT)
    monkeypatch.undo()
    assert shard_numbers(tmp_path) == [3] and len(list(tmp_path.iterdir())) == 1
    assert torch.equal(opened(shard).text(1).ids, list(texts())[1].ids)
