"""What a training meets on its way: states of before, other machines, little memory, full disks, no numbers."""

import errno
import json
import math
import os

import pytest
import torch

from specloop.errors import OptionError, OutOfMemory
from specloop.formats.safetensors import DiskError, read, write
from specloop.train import log, measure, trainer
from specloop.train.trainer import CHECKPOINT, DRAFT, LOG
from test_training import made, stopping
from trainings import POSITIONS, settings, some_texts, standalone, write_corpus

pytestmark = pytest.mark.usefixtures("one_thread")
KEY = "specdec-training"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def changed(folder, **changes):
    """Changes what a state says; None = it doesn't say it."""
    tensors, metadata = read(folder / CHECKPOINT)
    told = json.loads(metadata[KEY]) | changes
    write(folder / CHECKPOINT, tensors, {KEY: json.dumps({k: v for k, v in told.items() if v is not None})})


# ---- states ----------------------------------------------------------------------------------------------------------


def test_how_a_step_is_made_may_change(corpus, tmp_path):
    made(corpus, tmp_path, settings(micro_rows=50), stop=stopping(1)).run()
    same = made(corpus, tmp_path, settings(), stop=stopping(1))
    assert not same.run() and same.micro_rows == 50
    other = made(corpus, tmp_path, settings(micro_rows=20, checkpointing=True))
    assert other.run() and other.micro_rows == 20


def test_products_stay_what_they_were(corpus, tmp_path, monkeypatch):
    """However they were chosen; a state of before doesn't say, but for what a scaled loss leaves there."""
    made(corpus, tmp_path, stop=stopping(1)).run()
    for wrong in ("bf16", "fp16"):
        with pytest.raises(OptionError, match=f"precision: .* of a training with 'f32', got '{wrong}'"):
            made(corpus, tmp_path, settings(precision=wrong)).run()
    monkeypatch.setattr(trainer, "precision", lambda name, device: torch.float32)
    assert not made(corpus, tmp_path, settings(precision="auto"), stop=stopping(1)).run()
    changed(tmp_path, products=None)
    assert not made(corpus, tmp_path, settings(precision="auto"), stop=stopping(1)).run()
    changed(tmp_path, products=None)
    with pytest.raises(OptionError, match=r"precision: .* with 'auto', got 'f32'"):
        made(corpus, tmp_path, settings(precision="f32")).run()
    monkeypatch.setattr(trainer, "precision", lambda name, device: torch.float16)
    with pytest.raises(OptionError, match=r"precision: .* with 'f32 or bf16', got 'fp16'"):
        made(corpus, tmp_path, settings(precision="auto")).run()


def test_states_of_before(corpus, tmp_path):
    """They say less of what they belong to; what they say is compared."""
    t = made(corpus, tmp_path, stop=stopping(1))
    t.run()
    changed(tmp_path, products=None)
    again = made(corpus, tmp_path, stop=stopping(1))
    again.about = {"a": 1, "fingerprint": "f", "start": None}
    assert not again.run() and again.step == 2
    again = made(corpus, tmp_path)
    again.about = {"a": 1, "fingerprint": "g", "start": None}
    with pytest.raises(OptionError, match=r"fingerprint: .* with 'f', got 'g'"):
        again.run()


# ---- fp16 ------------------------------------------------------------------------------------------------------------


def test_fp16(corpus, tmp_path):
    """A scaled loss: steps are made, one whose gradients overflow is not, and a state has the scale."""
    told = settings(precision="fp16", steps=4)
    whole = made(corpus, tmp_path / "whole", told)
    before = {name: p.detach().clone() for name, p in whole.parameters.items()}
    assert whole.run() and whole.draft.compute is torch.float16
    assert any((p - before[name]).abs().max() > 0 for name, p in whole.parameters.items())
    assert all(p.isfinite().all() for p in whole.parameters.values())
    parts = tmp_path / "parts"
    made(corpus, parts, told, stop=stopping(2)).run()
    last = made(corpus, parts, told)
    assert last.run() and last.scaler.state_dict() == whole.scaler.state_dict()
    assert all(torch.equal(last.ema[name], whole.ema[name]) for name in whole.ema)


def test_fp16_that_overflows(corpus, tmp_path):
    t = made(corpus, tmp_path, settings(precision="fp16", steps=2), stop=stopping(1))
    t.scaler.load_state_dict(t.scaler.state_dict() | {"scale": 2.0**60})
    before = {}
    t.optimizer.register_step_pre_hook(
        lambda *_: before.update({n: p.detach().clone() for n, p in t.parameters.items()})
    )
    assert not t.run() and t.step == 1 and t.scaler.get_scale() == 2.0**59
    assert all(torch.equal(p, before[name]) for name, p in t.parameters.items())
    line = (tmp_path / LOG).read_text()
    assert strictly(line)["training"]["norm"] is None and not math.isfinite(t._recent["norm"])
    again = made(corpus, tmp_path, settings(precision="fp16", steps=2))
    assert again.run() and again.scaler.get_scale() == 2.0**58


# ---- little memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at x.cpp] . DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
        ),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        MemoryError(),
    ],
)
def test_too_little_memory(corpus, tmp_path, error):
    def fails(*_):
        raise error

    t = made(corpus, tmp_path, settings(micro_rows=40))
    t._gradients = fails
    with pytest.raises(OutOfMemory, match=r"with 40 rows at once: fewer \(--micro-rows 20\) or --checkpointing need"):
        t.run()


def test_other_errors_are_themselves(corpus, tmp_path):
    t = made(corpus, tmp_path)
    t._gradients = lambda *_: torch.ones(2) @ torch.ones(3)
    with pytest.raises(RuntimeError) as raised:
        t.run()
    assert not isinstance(raised.value, MemoryError)


# ---- full disks ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_for_the_log(corpus, tmp_path):
    (tmp_path / LOG).symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"log\.jsonl failed: the disk is full"):
        made(corpus, tmp_path).run()


def test_a_disk_that_is_full_within_a_line(tmp_path, monkeypatch):
    import io

    class Nearly(io.FileIO):
        room = 7

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done, self.room = super().write(data[: self.room]), 0
            return done

    path = tmp_path / LOG
    log.append(path, {"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(log, "open", lambda path, mode, buffering: Nearly(path, mode), raising=False)
        with pytest.raises(DiskError, match=r"log\.jsonl failed: the disk is full"):
            log.append(path, {"step": 2, "more": "words"})
    log.append(path, {"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_full_disk_for_the_draft(corpus, tmp_path, monkeypatch):
    """The state is there, and the draft of before."""
    from specdec_kernels.stream.newfile import NewFile

    made(corpus, tmp_path, stop=stopping(1)).run()
    before, whole = (tmp_path / DRAFT).read_bytes(), NewFile.write

    def full(self, data, offset):
        if self.path.endswith(DRAFT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(self, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "write", full)
        with pytest.raises(DiskError, match=r"draft\.safetensors failed: the disk is full"):
            made(corpus, tmp_path, stop=stopping(1)).run()
    assert (tmp_path / DRAFT).read_bytes() == before
    assert json.loads(read(tmp_path / CHECKPOINT)[1][KEY])["step"] == 2 and made(corpus, tmp_path).run()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def strictly(line):
    """JSON as others read it."""

    def refused(word):
        raise AssertionError(word)

    return json.loads(line, parse_constant=refused)


def test_numbers_that_json_has_no_word_for(corpus, tmp_path):
    log.append(tmp_path / LOG, {"a": float("inf"), "b": [1.5, float("nan")], "c": {"d": (-float("inf"), True, "x")}})
    assert strictly((tmp_path / LOG).read_text()) == {"a": None, "b": [1.5, None], "c": {"d": [None, True, "x"]}}
    t = made(corpus, tmp_path / "o", stop=stopping(1))
    t.held.measure = lambda *_: {"alpha": [float("nan")] * 3, "agreed": [0.0] * 3, "loss": [float("inf")] * 3}
    t.run()
    assert strictly((tmp_path / "o" / LOG).read_text())["loss"] == [None] * 3
    assert strictly(json.dumps(t.recipe()))["held_out"]["alpha"] == [None] * 3


def test_texts_that_are_longer_than_the_table(tmp_path):
    """Some hundred ids in front of a prompt that has its answer; its last chains go on behind its end."""
    found = list(some_texts()[:60])
    more = torch.full((POSITIONS,), 7)
    for i in range(2):
        text, none = found[i], found[i].features.new_zeros(POSITIONS, found[i].features.shape[1])
        ids, features = torch.cat([more.int(), text.ids]), torch.cat([none, text.features])
        found[i] = text._replace(ids=ids, features=features, prompt=text.prompt + POSITIONS)
    corpus = write_corpus(tmp_path / "corpus", found)
    for kind in ("feature", "model"):
        t = made(corpus, tmp_path / kind, settings(kind=kind, steps=1, fit_texts=0), held_rows=1)
        long = [n for n, (_, place) in enumerate(t.places) if len(t.samples.text(place).ids) > POSITIONS]
        t._next = lambda taken=long: taken
        cos = t.draft.cos[:POSITIONS].clone()
        assert len(t.draft.cos) == t.samples.longest + t.depths > POSITIONS
        assert long and t.run() and torch.equal(t.draft.cos[:POSITIONS], cos)
    assert torch.equal(standalone().cos, cos)


def test_lengths_are_known_without_a_text(corpus, tmp_path, monkeypatch):
    read, kept = [], measure.Held.__init__
    t = made(corpus, tmp_path)
    text = t.samples.text
    monkeypatch.setattr(t.samples, "text", lambda place: read.append(place) or text(place))
    kept(t.held, t.samples, t.column_of, t.held._head[:, :96], t.depths, t.settings.losses, 10**6)
    assert not read and t.held.places == t.samples.held_out
    t.held.measure(t.draft, t.ema)
    assert sorted(read) == sorted(t.held.places)
