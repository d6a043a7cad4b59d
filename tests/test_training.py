"""Training itself: gradients however they are made, states that are gone on from, and what stops it."""

import errno
import json
import os

import pytest
import torch

from specloop import cli
from specloop.draft_loader import load_draft
from specloop.errors import FormatError, OptionError, TrainingError
from specloop.fingerprint import fingerprint
from specloop.formats.draft_file import DraftFile
from specloop.formats.safetensors import DiskError, read, write
from specloop.train import batch_size, checkpoint, run, vocabulary
from specloop.train.export import export
from specloop.train.losses import LOSSES
from specloop.train.plan import Order, Settings, precision, runs
from specloop.train.samples import Samples
from specloop.train.trainer import CHECKPOINT, DRAFT, LOG, Trainer
from trainings import (
    CONFIG,
    IDS,
    feature_head,
    new_target,
    samples,
    settings,
    some_texts,
    standalone,
    target,
    teacher_head,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def made(corpus, folder, told=None, draft=None, **more):
    """A trainer on the toy."""
    told = told or settings()
    draft = draft or (feature_head() if told.kind == "feature" else standalone())
    t = target()
    about = {"name": "tiny", "fingerprint": fingerprint(t.model, t.tokenizer)}

    def write(path, values, recipe):
        named = {"kind": told.kind, "target": about, "vocabulary": t.tokenizer.fingerprint}
        export(path, draft, values=values, recipe=recipe, dtype="f32", **named)

    more = {"measurements": 2} | more
    return Trainer(draft, samples(corpus), told, teacher_head(), folder, about={"a": 1}, export=write, **more)


def gradients(t):
    """Of one step."""
    found = {}
    keep = lambda *_: found.update({n: p.grad.clone() for n, p in t.parameters.items() if p.grad is not None})
    t.optimizer.register_step_pre_hook(keep)
    t.micro_rows = t.micro_rows or 10**6
    t._train_step()
    return found


def compared(one, other, off=1e-5):
    assert one.keys() == other.keys() and len(one) > 8
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= off * max(1.0, value.abs().max().item()), name


@pytest.mark.parametrize("kind", ["feature", "model"])
def test_gradients_do_not_depend_on_how_they_are_made(corpus, tmp_path, kind):
    """Accumulated over parts, with activations made again, with the parts on several threads."""
    told = {"kind": kind, "rows": 200, "head_from": 0.0}
    base = gradients(made(corpus, tmp_path, settings(**told)))
    compared(base, gradients(made(corpus, tmp_path, settings(**told, checkpointing=True))))
    compared(base, gradients(made(corpus, tmp_path, settings(**told, micro_rows=50))))
    torch.set_num_threads(2)
    compared(base, gradients(made(corpus, tmp_path, settings(**told, micro_rows=50))))
    assert torch.get_num_threads() == 2
    other = gradients(made(corpus, tmp_path, settings(**told, decay=0.1 if kind == "feature" else 0.8, seed=1)))
    with pytest.raises(AssertionError):
        compared(base, other)


def test_gradients_are_those_of_finite_differences(corpus, tmp_path):
    """Of the whole of it, along random directions: unrolled depths, attention, norms, the head."""
    t = made(corpus, tmp_path, settings(losses={"kl": 1.0, "ce": 0.3}, rows=60))
    g = torch.Generator().manual_seed(3)
    noise = lambda p: torch.randn(p.shape, generator=g) / p.numel() ** 0.5
    with torch.no_grad():  # no parameter at a special value
        for p in t.draft.parameters():
            p.add_(3 * noise(p))
    run, scale, trained = [0, 1, 2], torch.tensor([[1.0], [0.8], [0.64]]) / 60, list(t.draft.parameters())
    loss = lambda: t._gradients(run, scale, trained)
    slopes, step = loss()[1], 2e-3

    @torch.no_grad()
    def move(by, direction):
        for p, d in zip(trained, direction, strict=True):
            p.add_(by * d)

    for _ in range(4):
        direction = [noise(p) for p in trained]
        along = sum((s * d).sum() for s, d in zip(slopes, direction, strict=True)).item()
        values = []
        for by in (step, -2 * step):
            move(by, direction)
            values.append(loss()[0])
        move(step, direction)
        size = sum(s.square().sum() for s in slopes).sqrt().item()
        assert abs((values[0] - values[1]) / (2 * step) - along) < 5e-3 * size, along


@pytest.mark.parametrize("name", LOSSES)
def test_training_lowers_its_own_loss(corpus, tmp_path, name):
    t = made(corpus, tmp_path, settings(losses={name: 1.0}, steps=14, rows=128, rate=3e-3, ema=0.8, depths=2))
    assert t.run()
    first, last = t.measured[0], t.measured[-1]
    assert sum(last["loss"]) < sum(first["loss"]) and last["step"] == 14
    assert last["rows"] == [sum(x) for x in zip(*([n, n - 1] for n in t.samples.lengths(t.held.places)), strict=True)]


def stopping(after):
    calls = iter(range(10**6))
    return lambda: next(calls) >= after


@pytest.mark.parametrize("kind", ["feature", "model"])
def test_a_training_that_was_killed_ends_as_one_that_was_not(corpus, tmp_path, kind):
    told = settings(kind=kind, steps=7, head_from=0.5, seed=3)
    whole = made(corpus, tmp_path / "whole", told)
    assert whole.run()
    for after in (2, 3):  # before the head thaws, and then behind it
        assert not made(corpus, tmp_path / "parts", told, stop=stopping(after)).run()
    last = made(corpus, tmp_path / "parts", told)
    assert last.run() and last.step == 7
    (mine, about), (other, others) = (read(tmp_path / name / CHECKPOINT) for name in ("whole", "parts"))
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
    assert any(name.startswith("exp_avg.head") for name in mine)
    for text in (about, others):
        state = json.loads(text["specdec-training"])
        assert state["step"] == 7 and state["visits"] == whole.visits
    drafts = [read(tmp_path / name / DRAFT)[0] for name in ("whole", "parts")]
    assert all(torch.equal(drafts[0][name], drafts[1][name]) for name in drafts[0])


def test_logged_contexts_take_part_in_the_end(corpus, tmp_path):
    """And where it was killed they go on, too; before their time nobody looks at them."""
    logged = Samples(corpus, feature_size=CONFIG.hidden, vocab=CONFIG.vocab, held_out=0)
    assert len(logged.train) == len(some_texts()) and not logged.held_out
    told = settings(steps=6, logged_from=0.5, logged_share=0.25)
    whole, taken = made(corpus, tmp_path / "whole", told, logged=logged), []
    chosen = whole._next
    whole._next = lambda: taken.append(chosen()) or taken[-1]
    assert whole.run()
    by_step = [{n >= len(whole.samples.train) for n in step} for step in taken]
    assert by_step == [{False}] * 3 + [{False, True}] * 3
    made(corpus, tmp_path / "parts", told, logged=logged, stop=stopping(4)).run()
    last = made(corpus, tmp_path / "parts", told, logged=logged)
    assert last.run() and all(torch.equal(last.ema[name], whole.ema[name]) for name in whole.ema)
    with pytest.raises(OptionError, match="logged"):
        made(corpus, tmp_path / "parts", told).run()


def test_another_training_is_not_gone_on_with(corpus, tmp_path):
    made(corpus, tmp_path, stop=stopping(1)).run()
    with pytest.raises(OptionError, match=r"seed: .*checkpoint.* is of a training with 0, got 5"):
        made(corpus, tmp_path, settings(seed=5)).run()
    other = made(corpus, tmp_path)
    other.about = {"a": 2}
    with pytest.raises(OptionError, match=r"a: .*training with 1, got 2"):
        other.run()


def test_damaged_states_are_refused(corpus, tmp_path):
    made(corpus, tmp_path, stop=stopping(1)).run()
    path = tmp_path / CHECKPOINT
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[len(data) - 1000] ^= 16
    for bad in (data[:-1], data[: len(data) // 2], b"", bytes(damaged), b"\x80\x04" + data[2:]):
        path.write_bytes(bad)
        with pytest.raises(FormatError, match=CHECKPOINT):
            made(corpus, tmp_path).run()
    tensors, metadata = read_back(data, tmp_path)
    del tensors["weight.fc"]
    state = json.loads(metadata["specdec-training"]) | {"crc32": checkpoint.checksum(tensors)}
    write(path, tensors, {"specdec-training": json.dumps(state)})
    with pytest.raises(FormatError, match=r"weight\.fc"):
        made(corpus, tmp_path).run()


def read_back(data, folder):
    (folder / "again").write_bytes(data)
    return read(folder / "again")


def test_a_loss_that_is_no_number_ends_it(corpus, tmp_path):
    t = made(corpus, tmp_path, settings(steps=9), save_every=0.0)
    step, calls = t._gradients, []

    def poisoned(*args):
        calls.append(1)
        if t.step == 4:
            with torch.no_grad():
                t.draft.fc[0, 0] = torch.nan
        return step(*args)

    t._gradients = poisoned
    with pytest.raises(
        TrainingError, match=r"loss is no finite number \(step 4, epoch \d.*shard-.*\); .*step 4, is .*"
    ):
        t.run()
    tensors, state = checkpoint.load(tmp_path / CHECKPOINT)
    assert state["step"] == 4 and all(v.isfinite().all() for v in tensors.values() if v.is_floating_point())
    again = made(corpus, tmp_path, settings(steps=9))
    assert again.run() and again.step == 9


def test_no_number_and_nothing_saved(corpus, tmp_path):
    draft = feature_head()
    with torch.no_grad():
        draft.head[0, 0] = torch.inf
    with pytest.raises(TrainingError, match="no state that was saved"):
        made(corpus, tmp_path, draft=draft).run()


def test_a_full_disk(corpus, tmp_path, monkeypatch):
    from specdec_kernels.stream.newfile import NewFile

    made(corpus, tmp_path, stop=stopping(2)).run()
    before = {name: (tmp_path / name).read_bytes() for name in (CHECKPOINT, DRAFT)}

    def full(self, data, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "write", full)
        with pytest.raises(DiskError, match=r"checkpoint\.safetensors failed: the disk is full"):
            made(corpus, tmp_path).run()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert made(corpus, tmp_path).run()


def test_by_the_clock(corpus, tmp_path):
    t = made(corpus, tmp_path, settings(steps=None, minutes=0.02))
    assert t.run() and t.fraction == 1 and t.step > 0 and t.elapsed < 30
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert lines[-1]["step"] == t.step and len(lines[-1]["alpha"]) == 3


def test_bf16_learns_too(corpus, tmp_path):
    t = made(corpus, tmp_path, settings(precision="bf16", steps=10, rows=128, rate=3e-3, ema=0.8))
    assert t.run() and t.draft.compute is torch.bfloat16
    assert t.measured[-1]["loss"][0] < t.measured[0]["loss"][0]
    assert all(p.dtype is torch.float32 for p in t.parameters.values())


@pytest.mark.parametrize("kind", ["feature", "model"])
def test_the_command(corpus, tmp_path, monkeypatch, capsys, kind):
    """From a folder to a file that loads as the target's draft, in two goes."""
    loaded = new_target()
    monkeypatch.setattr(run, "load_model", lambda name, **options: (loaded.model, loaded.tokenizer, None))
    out = tmp_path / "out"
    flags = ["--kind", kind, "--rows", "64", "--vocabulary", "100", "--precision", "f32", "--parameters", "60000"]

    def command(*more, folder=corpus):
        code = cli.run(["train", str(folder), "--out", str(out), "--target", "tiny", "--dtype", "f32", *flags, *more])
        return code, capsys.readouterr()

    code, said = command("--steps", "3", "--loss", "kl=1", "--loss", "contrastive=0.2")
    assert code == 0 and "acceptance on held-out text" in said.out and str(out / DRAFT) in said.out
    draft = DraftFile.open(out / DRAFT)
    assert draft.kind == kind and len(draft.config.draft_ids) == 100
    assert draft.recipe["settings"]["losses"] == {"kl": 1.0, "contrastive": 0.2} and draft.recipe["step"] == 3
    assert 0.4 < draft.recipe["coverage"] < 1 and draft.recipe["held_out"]["alpha"][0] > 0.1
    assert load_draft(out / DRAFT, target(), kv="f32", context=64)[0].draft_ids == draft.config.draft_ids
    for more, words in (
        (["--loss", "x=1"], "losses: expected weights of kl"),
        (["--loss", "kl=much"], "loss: expected NAME=WEIGHT"),
        (["--steps", "3", "--minutes", "1"], "minutes, steps: expected one of them"),
        (["--steps", "5"], "steps"),  # another training's state is there
    ):
        code, said = command(*more)
        assert code == 2 and words in said.err and said.err.count("\n") == 1
    larger = write_corpus(tmp_path / "larger", [*some_texts(), *some_texts()[:40]])
    first = out, out.with_name("next")
    out = first[1]
    code, said = command("--steps", "1", "--start", str(first[0]), folder=larger)
    before, after = (read(folder / CHECKPOINT)[0] for folder in first)
    assert code == 0 and torch.equal(before["draft_ids"], after["draft_ids"])
    moved = max((after[name] - before[name]).abs().max() for name in before if name.startswith("average."))
    assert 0 < moved < 0.01  # one step of the warm-up away
    bad = write_corpus(tmp_path, some_texts())
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    code, said = command("--steps", "3", folder=bad)
    assert code == 2 and "shard-00001" in said.err and "truncated" in said.err


def test_order():
    order = Order([3, 5, 2, 4], seed=1)
    first = [order.next(1)[0] for _ in range(8)]
    assert sorted(first[:4]) == sorted(first[4:]) == [0, 1, 2, 3]
    again = Order([3, 5, 2, 4], 1, 1, 2)
    assert [again.next(1)[0] for _ in range(2)] == first[6:]
    assert sum([3, 5, 2, 4][i] for i in order.next(11)) >= 11


def test_runs_have_as_much_to_do():
    lengths = [30, 5, 20, 40, 7, 33, 21, 4]
    for workers, rows, count in ((1, 140, 1), (1, 100, 2), (2, 160, 2), (2, 50, 4), (4, 160, 4), (2, 1, 8)):
        found = runs(range(8), lengths, rows, workers)
        assert len(found) == count and sorted(i for run in found for i in run) == list(range(8))
        loads = [sum(lengths[i] for i in run) for run in found]
        if count < 8:
            assert max(loads) <= max(1.1 * sum(lengths) / count, 40), loads
    assert runs([1, 1], [3, 50], 7) == [[1], [1]] and runs([2], [1, 1, 9], 100, 2) == [[2]]


def test_learning_rate():
    s = Settings(steps=1)
    assert s.rate_at(0) < s.rate_at(0.02) < s.rate_at(0.03) == s.rate == 1e-3
    assert s.rate_at(0.5) < s.rate and abs(s.rate_at(1) - 1e-4) < 1e-12


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "x"}, {"minutes": 0}, {"minutes": float("nan")}, {"steps": 1.5}, {"minutes": 1, "steps": 1},
        {"rows": 0},
        {"depths": True}, {"losses": {}}, {"losses": {"kl": -1}}, {"losses": {"x": 1}}, {"ema": 1.5}, {"rate": -1},
        {"precision": "f8"}, {"vocabulary": 1}, {"micro_rows": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong):
    told = {"steps": 5} | wrong if set(wrong) != {"minutes"} else wrong
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Settings(**told)
    assert Settings.from_dict(json.loads(json.dumps(Settings(steps=5).as_dict()))) == Settings(steps=5)


def test_held_out_prompts_are_apart(corpus, tmp_path):
    found = samples(corpus)
    prompts = [{tuple(found.text(p).ids[: found.text(p).prompt].tolist()) for p in side} for side in
               (found.train, found.held_out)]  # fmt: skip
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
    with pytest.raises(FormatError, match="too few"):
        samples(write_corpus(tmp_path, some_texts()[:1]))


def test_vocabulary():
    counts = torch.zeros(CONFIG.vocab, dtype=torch.int64)
    counts[100:200] = torch.arange(100) + 1
    tokenizer = target().tokenizer
    needed = vocabulary.needed(tokenizer, CONFIG.vocab)
    assert needed >= {2, ord("\n"), *range(ord("0"), ord("9") + 1)} and ord("a") not in needed
    chosen = vocabulary.choose(counts, tokenizer, 50)
    ids = set(chosen.ids.tolist())
    assert len(ids) == 50 and needed <= ids and chosen.ids.tolist() == sorted(ids)
    best = {199 - i for i in range(50 - len(needed - set(range(100, 200))))}
    assert best <= ids and abs(chosen.coverage - counts[chosen.ids].sum() / counts.sum()) < 1e-6
    assert len(vocabulary.choose(counts, tokenizer, 10**6).ids) == CONFIG.vocab
    assert set(vocabulary.choose(counts, tokenizer, 2).ids.tolist()) == needed


def test_batch_size():
    config = target().model.config
    each = batch_size.row_bytes(config, 3, False)
    assert batch_size.row_bytes(config, 3, True) < each
    fits = lambda free, **more: batch_size.choose(config, 3, False, 4096, free, **more)
    assert fits(10**12) == 4096 and fits(10**12, workers=2) == 2048
    assert fits(4 * 1024 * each, workers=1) == 2048 and fits(1) == batch_size.LEAST
    assert batch_size.free_bytes("cpu") > 10**6


def test_precision():
    cpu = torch.device("cpu")
    assert precision("f32", cpu) is torch.float32 and precision("fp16", cpu) is torch.float16
    assert precision("auto", cpu) in (torch.float32, torch.bfloat16)
    assert len(IDS) < CONFIG.vocab
