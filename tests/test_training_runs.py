"""``specloop train`` around the training itself: whose corpus and weights, who else is there, how it is ended."""

import contextlib
import json
import signal
from types import SimpleNamespace

import pytest
import torch

from specloop import cli
from specloop.errors import FormatError, ModelError, OptionError
from specloop.formats import safetensors
from specloop.loader import choose_device
from specloop.models.blueprint import DTYPES
from specloop.train import generate, lock, run, vocabulary
from specloop.train.corpus import shard_numbers, write_shard
from specloop.train.generate import Settings as Writing
from specloop.train.lock import alone
from specloop.train.manifest import begin, read_manifest
from specloop.train.samples import Samples
from specloop.train.seeds import Seed
from specloop.train.start import read as read_start
from specloop.train.trainer import CHECKPOINT, DRAFT
from test_training import stopping
from tiny_llama import CONFIG, build
from trainings import new_target, settings, some_texts, write_corpus
from versions import Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")
WRITING = Writing(texts=2, answer_tokens=8, prompt_tokens=60, made_up=0.0, repeats=1.0)
KEY = "specdec-training"
needs_locks = pytest.mark.skipif(lock.fcntl is None, reason="this system has no flock")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def loads(monkeypatch):
    """Models by their names, and prompts that are there at once; a list of what was loaded."""
    made, loaded = {"tiny": new_target, "other": lambda: SimpleNamespace(model=build("f32", seed=1, tied=False))}, []

    def load_model(name, **options):
        loaded.append(name)
        found = made.get(name, made["tiny"])()
        return found.model, Vocabulary("another" if name == "renamed" else "tiny"), None

    monkeypatch.setattr(run, "load_model", load_model)
    monkeypatch.setattr(generate, "seed_prompts", lambda seed: [Seed("chat", (f"say {i}",)) for i in range(40)])
    return loaded


def train(corpus, folder, told=None, **more):
    more = {"target": "tiny", "dtype": "f32", "device": "cpu", "measurements": 1} | more
    return run.train(corpus, folder, told or settings(steps=1), **more)


def write(folder, told=WRITING, **more):
    return run.write_corpus(folder, told, **{"target": "tiny", "device": "cpu"} | more)


def command(*arguments):
    return cli.run(["train", *map(str, arguments), "--target", "tiny", "--dtype", "f32", "--device", "cpu"])


FLAGS = ["--rows", "64", "--vocabulary", "100", "--precision", "f32"]


def changed(folder, change):
    """Changes what a state says."""
    tensors, metadata = safetensors.read(folder / CHECKPOINT)
    state = json.loads(metadata[KEY])
    change(state)
    safetensors.write(folder / CHECKPOINT, tensors, {KEY: json.dumps(state)})


# ---- the corpus ------------------------------------------------------------------------------------------------------


def test_an_interrupted_corpus_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SHARDS", 3)

    def ended(fraction):
        if shard_numbers(tmp_path):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        write(tmp_path, progress=ended)
    assert len(shard_numbers(tmp_path)) == 1
    assert write(tmp_path).kept == 4 and shard_numbers(tmp_path) == [0, 1, 2] and write(tmp_path) is None
    assert write(tmp_path, shards=4).kept == 2
    (tmp_path / "shard-00003.safetensors").unlink()
    assert write(tmp_path).kept == 2  # four are wanted from then on
    assert write(tmp_path, shards=2) is None and read_manifest(tmp_path)["shards"] == 2
    (tmp_path / "shard-00003.safetensors").unlink()
    assert write(tmp_path) is None
    told = json.loads((tmp_path / "corpus.json").read_text())
    del told["shards"], told["dtype"]  # as it was written once
    before = json.dumps(told)
    (tmp_path / "corpus.json").write_text(before)
    (tmp_path / "shard-00001.safetensors").unlink()
    assert write(tmp_path) is None and write(tmp_path, shards=1) is None
    assert (tmp_path / "corpus.json").read_text() == before
    (tmp_path / "corpus.json").write_text(json.dumps(told | {"shards": "many"}))
    with pytest.raises(FormatError, match=r"corpus\.json: shards: expected a number of shards, got 'many'"):
        write(tmp_path)


def test_settings_that_were_given_are_the_corpus_own(tmp_path, capsys):
    write(tmp_path, shards=1)
    other = Writing(answer_tokens=9, made_up=0.5)
    assert write(tmp_path, other) is None and write(tmp_path, WRITING, given=("answer_tokens", "temperatures")) is None
    with pytest.raises(OptionError, match="another corpus: answer_tokens: it has 8, asked for 9"):
        write(tmp_path, other, given=("answer_tokens",))
    for flags, words in (
        ("--made-up 0.5", "made_up: it has 0.0, asked for 0.5"),
        ("--answer-tokens 9", "has 8, asked"),
    ):
        assert command(tmp_path, "--out", tmp_path / "o", *flags.split(), *FLAGS) == 2
        assert words in capsys.readouterr().err


def test_the_dtype_of_the_target_is_the_corpus_own(corpus, tmp_path, monkeypatch):
    write(tmp_path, shards=1)
    assert read_manifest(tmp_path)["dtype"] == "f32"
    with pytest.raises(FormatError, match="dtype: expected 'int8', as the target's, got 'f32'"):
        train(tmp_path, tmp_path / "o", dtype="int8")
    monkeypatch.setattr(run, "load_model", lambda name, **_: (build("int8", kv="f32"), Vocabulary(), None))
    with pytest.raises(OptionError, match="dtype: it has 'f32', asked for 'int8'"):
        write(tmp_path, shards=2)
    before = write_corpus(tmp_path / "before")
    begin(tmp_path / "new", {"feature_size": CONFIG.hidden})
    told = json.loads((tmp_path / "new" / "corpus.json").read_text())
    assert told.pop("dtype") == "int8"
    (before / "corpus.json").write_text(json.dumps(told))
    whose = {"feature_size": CONFIG.hidden, "vocab": CONFIG.vocab}
    assert Samples(before, dtype="int8", **whose).train
    with pytest.raises(FormatError, match="dtype: expected 'f32', as the target's, got 'int8'"):
        Samples(before, dtype="f32", **whose)
    assert [build(dtype).weights.dtype for dtype in ("int8", "f32")] == ["int8", "f32"] and set(DTYPES) > {"int8"}


# ---- who else is there, and how it is ended --------------------------------------------------------------------------


@needs_locks
def test_one_training_at_a_time(corpus, tmp_path):
    seen = []

    def again(*_):
        with pytest.raises(OptionError, match="out: another training is running in"):
            train(corpus, tmp_path)
        seen.append(1)

    assert train(corpus, tmp_path, progress=again)[1] and seen
    with alone(tmp_path, "busy"):  # it has ended
        pass


@needs_locks
def test_one_at_a_time_writes_a_corpus(tmp_path):
    with alone(tmp_path, "busy"), pytest.raises(OptionError, match="corpus: another process is writing to"):
        write(tmp_path, shards=1)
    assert shard_numbers(tmp_path) == []

    def again(fraction):
        if fraction == 1:
            return
        with pytest.raises(OptionError, match="corpus: another process is writing to"):
            write(tmp_path, shards=1)

    assert write(tmp_path, shards=1, progress=again).kept == 2


@contextlib.contextmanager
def handled(number, handler):
    before = signal.signal(number, handler)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_and_ends(corpus, tmp_path, monkeypatch, name):
    number = getattr(signal, name)
    usual = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    with handled(number, usual):
        monkeypatch.setattr(cli, "_training", lambda *_: signal.raise_signal(number))
        assert command(corpus, "--out", tmp_path, "--steps", "9", *FLAGS) == 128 + number
        assert signal.getsignal(number) is usual
        state = json.loads(safetensors.read(tmp_path / CHECKPOINT)[1][KEY])
        assert state["step"] == 1
        new = [tmp_path / "c", "--shards", "1", "--made-up", "0", "--answer-tokens", "8"]
        assert command(*new, "--out", tmp_path / "o", *FLAGS) == 128 + number
    assert not (tmp_path / "o").exists() and shard_numbers(tmp_path / "c") == []


def test_a_signal_that_is_ignored_stays_so():
    with handled(signal.SIGINT, signal.SIG_IGN), handled(signal.SIGTERM, signal.SIG_DFL):
        with cli.Interrupts(lambda: None, signal.SIGTERM):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    ["--device gpu", "--threads 0", "--threads 9999", "--dtype int4", "--parameters nan", "--parameters inf",
     "--parameters 1e12", "--shards -1", "--shards 0", "--vocabulary 1", "--made-up nan"],
)  # fmt: skip
def test_flags_that_can_not_be(corpus, tmp_path, capsys, loads, flags):
    name = flags.split()[0][2:].replace("-", "_")
    arguments = ["train", str(corpus), "--out", str(tmp_path / "o"), "--target", "tiny", *flags.split()]
    assert cli.run(arguments) == 2 and not loads and not (tmp_path / "o").exists()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"specloop: {name}: expected") and err.count("\n") == 1


def test_devices():
    with pytest.raises(OptionError, match="device: expected one of auto, cpu, cuda, got 'gpu'"):
        choose_device("gpu")
    assert choose_device("cpu") == "cpu"


def test_a_target_that_streams(corpus, tmp_path, monkeypatch):
    streaming = SimpleNamespace(weights=SimpleNamespace(streams=True), config=CONFIG)
    monkeypatch.setattr(run, "load_model", lambda name, **_: (streaming, Vocabulary(), None))
    with pytest.raises(
        ModelError, match="target: expected a model whose weights are in memory, got tiny, which streams"
    ):
        train(corpus, tmp_path / "o")
    assert not (tmp_path / "o").exists()


# ---- weights of another training -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    """A training of 100 ids that was ended at once."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        loaded = new_target()
        patch.setattr(run, "load_model", lambda name, **_: (loaded.model, loaded.tokenizer, None))
        assert not train(corpus, folder, stop=lambda: True)[1]
    return folder


def test_a_start_has_its_own_number_of_ids(corpus, first, tmp_path, capsys):
    with pytest.raises(OptionError, match=r"vocabulary: expected at most 100 ids, as the start's .*, got 150"):
        train(corpus, tmp_path, settings(vocabulary=150), start=first)
    flags = ["--rows", "64", "--precision", "f32", "--steps", "1"]
    assert command(corpus, "--out", tmp_path, "--start", first, *flags) == 0
    ids = [safetensors.read(folder / CHECKPOINT)[0]["draft_ids"] for folder in (first, tmp_path)]
    assert torch.equal(*ids) and len(ids[0]) == 100
    assert command(corpus, "--out", tmp_path, "--start", first, *flags) == 0  # the same goes on
    assert command(corpus, "--out", tmp_path, "--start", first, *flags, "--vocabulary", "8192") == 2


def test_a_draft_file_is_a_start(corpus, first, tmp_path, monkeypatch):
    """Its weights are the averages as near as int8 has them."""
    file = tmp_path / "some.safetensors"
    file.write_bytes((first / DRAFT).read_bytes())
    about = json.loads(safetensors.read(first / CHECKPOINT)[1][KEY])["about"]
    found, whole = (read_start(start, kind="feature", about=about) for start in (file, first))
    assert torch.equal(found.ids, whole.ids) and found.vocabulary == 100 and found.about["file"] == file.name
    averages = {name: tensor for name, tensor in whole.tensors.items() if name.startswith("average.")}
    assert averages.keys() == found.tensors.keys()
    for name, average in averages.items():
        assert (found.tensors[name] - average).norm() <= 0.01 * average.norm(), name
    train(corpus, tmp_path / "o", stop=lambda: True, start=file)
    begun = safetensors.read(tmp_path / "o" / CHECKPOINT)[0]
    assert all(torch.equal(begun[name.replace("average", "weight")], found.tensors[name]) for name in averages)
    for more, words in (({"fingerprint": "x"}, "fingerprint"), ({"vocabulary": "x"}, "vocabulary")):
        with pytest.raises(OptionError, match=f"start: {words}: "):
            read_start(file, kind="feature", about=about | more)
    with pytest.raises(OptionError, match="start: kind: "):
        read_start(file, kind="model", about=about)
    with pytest.raises(ModelError, match="nowhere"):
        read_start(tmp_path / "nowhere", kind="feature", about=about)
    with pytest.raises(OptionError, match="start: no draft of kind feature for this target comes with the package"):
        read_start("builtin", kind="feature", about=about)
    monkeypatch.setattr("specloop.train.start.builtin_files", lambda: [file])
    assert torch.equal(read_start("builtin", kind="feature", about=about).ids, whole.ids)


def test_a_start_is_cut_to_the_ids_that_are_used_most(corpus, first, tmp_path):
    train(corpus, tmp_path / "o", settings(vocabulary=60), stop=lambda: True, start=first)
    whole, cut = (safetensors.read(folder / CHECKPOINT)[0] for folder in (first, tmp_path / "o"))
    kept = torch.isin(whole["draft_ids"], cut["draft_ids"])
    assert len(cut["draft_ids"]) == kept.sum() == 60
    assert torch.equal(cut["weight.head"], whole["average.head"][kept])
    counts = Samples(corpus, feature_size=CONFIG.hidden, vocab=CONFIG.vocab).counts()
    always = sorted(vocabulary.needed(Vocabulary(), CONFIG.vocab))
    left_out = counts[whole["draft_ids"][~kept]]
    assert left_out.max() <= min(counts[i] for i in cut["draft_ids"].tolist() if i not in always)


@pytest.mark.parametrize("target, name", [("other", "fingerprint"), ("renamed", "vocabulary")])
def test_a_start_of_another_target(first, tmp_path, target, name):
    (tmp_path / "corpus").mkdir()
    write_shard(tmp_path / "corpus", 0, some_texts(), {})  # which doesn't say whose it is
    with pytest.raises(OptionError, match=rf"start: {name}: .*checkpoint.* is of a training with '.*', got '"):
        train(tmp_path / "corpus", tmp_path / "o", target=target, start=first)


def test_a_start_is_looked_at(first, tmp_path):
    tensors, metadata = safetensors.read(first / CHECKPOINT)
    about = json.loads(metadata[KEY])["about"]

    def started(change=lambda state: None, *, kind="feature", **more):
        tmp_path.joinpath(CHECKPOINT).write_bytes((first / CHECKPOINT).read_bytes())
        changed(tmp_path, change)
        return read_start(tmp_path, kind=kind, about=about | more)

    assert len(started().ids) == 100
    assert len(started(lambda s: s["about"].pop("fingerprint"), fingerprint="x").ids) == 100  # it didn't say so once
    for change, more, words in (
        (lambda s: None, {"kind": "model"}, "start: kind: .* 'feature', got 'model'"),
        (lambda s: None, {"fingerprint": "x"}, "start: fingerprint"),
        (lambda s: s["about"]["model"].update(vocab=999), {}, "start: vocab: .* 999, got 203"),
        (lambda s: s.pop("about"), {}, "start: vocabulary: .* None, got 'tiny'"),
    ):
        with pytest.raises(OptionError, match=words):
            started(change, **more)
    state = json.loads(metadata[KEY])
    del state["crc32"]
    for ids, words in (
        (tensors["draft_ids"] + CONFIG.vocab, r"draft_ids: expected ids in \[0, 203\)"),
        (None, "no tensor"),
    ):
        kept = {name: t for name, t in (tensors | {"draft_ids": ids}).items() if t is not None}
        safetensors.write(tmp_path / CHECKPOINT, kept, {KEY: json.dumps(state)})
        with pytest.raises(ModelError, match=words):
            read_start(tmp_path, kind="feature", about=about)


# ---- contexts of speculative runs ------------------------------------------------------------------------------------


def test_logged_contexts_are_those_that_it_began_with(corpus, tmp_path):
    some = [text._replace(reached=torch.ones(text.answer, dtype=torch.uint8)) for text in some_texts()[:60]]
    logged = write_corpus(tmp_path / "logged", some[:8])
    told = settings(steps=2, logged_from=0.0)
    assert not train(corpus, tmp_path / "o", told, logged=logged, stop=stopping(1))[1]
    write_corpus(logged, some)
    assert shard_numbers(logged) == [0, 1]
    write_corpus(logged, some[:8])  # as it was
    trainer, done = train(corpus, tmp_path / "o", told, logged=logged)
    assert done and trainer.logged.names == ["shard-00000.safetensors"] and len(trainer.logged.train) == 8


def test_logged_contexts_are_of_speculative_runs(corpus, tmp_path):
    with pytest.raises(FormatError, match=r"shard-00000.*expected contexts of speculative runs, got no tensor reached"):
        train(corpus, tmp_path, logged=corpus)


def test_a_folder_without_answers(tmp_path):
    mute = [
        text._replace(
            prompt=len(text.ids), **{name: getattr(text, name)[:0] for name in ("lse", "top_ids", "top_log_p")}
        )
        for text in some_texts()[:3]
    ]
    write_corpus(tmp_path, mute)
    whose = {"feature_size": CONFIG.hidden, "vocab": CONFIG.vocab}
    with pytest.raises(FormatError, match=r"0 texts are too few: some are trained on$"):
        Samples(tmp_path, held_out=0, **whose)
    with pytest.raises(FormatError, match="trained on, one in 32 held out"):
        Samples(tmp_path, **whose)
