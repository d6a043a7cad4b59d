"""Contexts of speculative runs: where a draft was asked, how far it was judged, and a training that ends with them."""

import functools
import json

import pytest
import torch

from specloop import cli
from specloop.errors import FormatError, ModelError, OptionError
from specloop.fingerprint import fingerprint
from specloop.formats import safetensors
from specloop.formats.draft_file import DraftFile
from specloop.pair import Pair
from specloop.stage import opener
from specloop.train import logged, run
from specloop.train.corpus import Shard, shard_numbers, shard_path
from specloop.train.export import export
from specloop.train.generate import Settings as Writing
from specloop.train.logged import log_contexts, reached
from specloop.train.manifest import read_manifest
from specloop.train.samples import Samples, is_held_out
from specloop.train.seeds import seed_prompts
from specloop.train.trainer import CHECKPOINT, DRAFT
from test_training import compared, gradients, made, stopping
from trainings import CONFIG, batch, feature_head, new_target, settings, some_texts, target, write_corpus

K = 3
WRITING = Writing(texts=5, answer_tokens=24, prompt_tokens=90, temperatures=((0.0, 0.4), (1.0, 0.6)), repeats=0.9)
OPENED = {"dtype": "f32", "kv": "f32", "context": 128, "device": "cpu", "threads": None, "memory_budget": None}


@pytest.fixture(autouse=True, scope="module")
def quietly():
    """One thread; the prompts are drawn once, which takes a second; other work on the machine is no fault."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logged, "seed_prompts", functools.cache(seed_prompts))
        patch.setattr("specloop.drafts.model.SLOW_SECONDS", 60.0)
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)


def about():
    t = target()
    return {"target": {"name": "tiny", "fingerprint": fingerprint(t.model, t.tokenizer)},
            "vocabulary": t.tokenizer.fingerprint}  # fmt: skip


def a_head(path, seed=0, recipe=None):
    """As training begins with it: right now and then."""
    export(path, feature_head(seed=seed), kind="feature", recipe=recipe or {}, dtype="f32", **about())
    return str(path)


def pair_with(draft, k=K, **options):
    loads = new_target()  # the pair closes it
    return Pair(lambda: (loads.model, loads.tokenizer, None), draft=draft, k=k, opened=opener(**OPENED), **options)


class Seen(list):
    """(prompt, options, result, flags of its events) of all that a pair was asked for."""

    def __init__(self, pair):
        self._generate = pair.generate_batch
        pair.generate_batch = self._of

    def _of(self, prompts, *, each, callback, **options):
        events = [[] for _ in prompts]

        def told(event):
            if event.token is not None:
                events[event.index].append(event.from_draft)
            callback(event)

        results = self._generate(prompts, each=each, callback=told, **options)
        self.extend(zip(prompts, each, results, events, strict=True))
        return results


def texts_of(folder):
    shards = [Shard(shard_path(folder, n), CONFIG.hidden, CONFIG.vocab) for n in shard_numbers(folder)]
    return [shard.text(i) for shard in shards for i in range(shard.count)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, what was seen, the draft's path, a report)"""
    folder = tmp_path_factory.mktemp("runs")
    path = a_head(folder / "head.safetensors")
    with pair_with(path) as pair:
        pair.ready()
        seen = Seen(pair)
        report = log_contexts(pair, folder / "logged", shards=2, settings=WRITING, k=K)
    return folder / "logged", seen, path, report


def test_what_was_reached_is_what_the_loop_counted(runs):
    folder, seen, _, report = runs
    found = {tuple(text.ids.tolist()): text for text in texts_of(folder)}
    assert len(found) == report.kept >= 4
    several, lookups = 0, 0
    for prompt, _, result, flags in seen:
        text = found.get((*prompt, *result.tokens))
        if text is None:
            continue
        counts = result.stats.speculation
        mine = counts.by_source["feature"]
        assert counts.faults == [] and text.reached.count_nonzero() == mine.rounds
        assert text.reached.sum() == mine.evaluated and text.reached.max() <= K
        lookups += counts.rounds - counts.rounds_without_draft - mine.rounds
        starts = [0] + [j + 1 for j, drafted in enumerate(flags) if not drafted]  # a round ends with one of its own
        for j in text.reached.nonzero()[:, 0].tolist():
            assert j in starts
            accepted = next((i for i, drafted in enumerate(flags[j:]) if not drafted), len(flags) - j)
            room = WRITING.answer_tokens - j - 1  # for drafts
            assert text.reached[j] == min(accepted + 1, K, room, len(flags) - j)
            several += accepted > 0
    assert several > 3 and lookups


def test_which_rounds_are_counted():
    sources, proposed, accepted = ["feature", "lookup", None, "feature", "feature"], [3, 3, 0, 3, 2], [1, 2, 0, 3, 2]
    assert reached(sources, proposed, accepted, 13) == [2, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0]
    assert reached(sources[-1:], [2], [2], 1) == [1]  # what lies behind an end is no text


def test_texts_are_those_of_plain_decoding(runs):
    folder, seen, path, _ = runs
    model, greedy = target().model, 0
    keys = {tuple(prompt): own for prompt, own, *_ in seen}
    with pair_with(path) as pair:
        for text in texts_of(folder):
            prompt, ids = text.ids[: text.prompt].tolist(), text.ids.tolist()
            assert not is_held_out(text.ids[: text.prompt]) and keys[tuple(prompt)]["temperature"] == text.temperature
            assert text.seed >= 0
            cache = model.new_cache(128, features=True)
            rows = model.forward(ids, cache, last=text.answer + 1)[:-1]
            assert torch.equal(text.features, cache.features[: len(ids)])
            assert torch.allclose(text.lse, rows.logsumexp(1), atol=1e-5)
            assert torch.equal(text.top_ids, rows.topk(16).indices.int())
            if text.temperature == 0:
                greedy += 1
                plain = pair.generate(prompt, draft="none", k=0, max_new_tokens=WRITING.answer_tokens)
                assert plain.tokens == ids[text.prompt :]
    assert greedy and len(set(map(str, keys.values()))) == len(keys)


def test_shards_are_a_function_of_settings_draft_and_number(runs, tmp_path):
    folder = runs[0]

    def ended(fraction):
        if fraction >= 0.5:
            raise InterruptedError

    again = a_head(tmp_path / "again.safetensors", recipe={"seconds": 7})  # the same numbers
    with pair_with(again) as pair:
        with pytest.raises(InterruptedError):
            log_contexts(pair, tmp_path / "l", shards=2, settings=WRITING, k=K, progress=ended)
        log_contexts(pair, tmp_path / "l", shards=2, settings=WRITING, k=K)
        for name in ("corpus.json", "shard-00000.safetensors", "shard-00001.safetensors"):
            assert (tmp_path / "l" / name).read_bytes() == (folder / name).read_bytes()
        with pytest.raises(OptionError, match="holds another corpus: k: it has 3, asked for 2"):
            log_contexts(pair, folder, shards=3, settings=WRITING, k=2)
    with (
        pair_with(a_head(tmp_path / "other.safetensors", seed=1)) as pair,
        pytest.raises(OptionError, match="holds another corpus: draft"),
    ):
        log_contexts(pair, folder, shards=3, settings=WRITING, k=K)
    assert read_manifest(folder)["settings"]["made_up"] == 0


def test_pairs_without_a_head(tmp_path):
    for draft in ("lookup", str(tmp_path / "bad.safetensors")):
        (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
        with pair_with(draft) as pair, pytest.raises(ModelError, match="pair: expected one with"):
            log_contexts(pair, tmp_path / "l", shards=1, settings=WRITING)
    assert not (tmp_path / "l").exists()


# ---- what of them counts ---------------------------------------------------------------------------------------------


def marked(text, *rows):
    return text._replace(reached=torch.tensor([*rows, *[0] * (text.answer - len(rows))], dtype=torch.uint8))


def test_only_what_was_reached_counts(tmp_path):
    first, second, plain = some_texts()[:3]
    found = [marked(first, 2, 0, 3), plain, marked(second, *[0] * (second.answer - 1), 3)]
    counted, at = batch(found).counted(K), 0
    for text in found:
        for depth in range(K):
            for j in range(text.answer):
                start = j - depth
                want = start >= 0 and (text.reached is None or text.reached[start] > depth)
                assert counted[depth, at + j] == want
        at += text.answer
    assert counted[:, : first.answer].nonzero().tolist() == [[0, 0], [0, 2], [1, 1], [1, 3], [2, 4]]
    write_corpus(tmp_path, [marked(first, 2, 0, 3), marked(second, *[0] * (second.answer - 1), 3)])
    kept = Samples(tmp_path, feature_size=CONFIG.hidden, vocab=CONFIG.vocab, held_out=0)
    assert [kept.counted(place, K) for place in kept.train] == [[2, 2, 1], [1, 0, 0]]


def test_rows_that_were_not_reached_have_no_gradient(tmp_path):
    t = made(write_corpus(tmp_path), tmp_path, settings(losses={"kl": 1.0}), held_rows=1)
    trained, scale = list(t.draft.parameters()), torch.tensor([[1.0], [0.8], [0.64]])

    def slopes(text):
        t._texts = lambda run: [text]
        return t._gradients([0], scale, trained)[1]

    def spoiled(text, row):
        lse = text.lse.clone()
        lse[row] += 1
        return text._replace(lse=lse)

    text = marked(some_texts()[0], 2, 0, 3)
    base = slopes(text)
    same = lambda row: all(torch.equal(a, b) for a, b in zip(base, slopes(spoiled(text, row)), strict=True))
    assert [same(row) for row in (0, 3, 4, 5, 9)] == [False] * 3 + [True] * 2
    assert not any(slope.any() for slope in slopes(marked(text)))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A corpus, and one of speculative runs with rounds here and there."""
    folder = tmp_path_factory.mktemp("corpora")
    g = torch.Generator().manual_seed(0)
    some = [marked(t, *torch.randint(0, K + 1, (t.answer,), generator=g).tolist()) for t in some_texts()[:40]]
    return write_corpus(folder / "all"), write_corpus(folder / "runs", some)


def test_gradients_are_means_of_what_counts(corpora, tmp_path):
    """However they are accumulated; and a step has the weight of its rows that count."""
    corpus, some = corpora
    told = {"rows": 200, "head_from": 0.0, "logged_from": 0.0, "losses": {"ce": 1.0}}
    own = Samples(some, feature_size=CONFIG.hidden, vocab=CONFIG.vocab, held_out=0)
    base = gradients(made(corpus, tmp_path, settings(**told), logged=own))
    for micro_rows in (30, 70):
        compared(base, gradients(made(corpus, tmp_path, settings(**told, micro_rows=micro_rows), logged=own)))
    t = made(corpus, tmp_path, settings(**told, depths=1), logged=own)
    taken = t._next()
    t._next = lambda: taken
    counted = t._batch(t._texts(taken)).counted(1)
    total = t._gradients(taken, torch.ones(1, 1), list(t.draft.parameters()))[0]
    gradients(t)
    assert 0 < counted.sum() < 0.95 * counted.numel()
    assert t._recent["loss"] == pytest.approx(total / int(counted.sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.int(), r"reached: expected uint8 \[\d+\], got int32"),
        (lambda t: t[1:], r"reached: expected uint8 \[\d+\], got uint8"),
        (lambda t: t[None], r"reached: expected uint8 \[\d+\], got uint8 \[1, "),
    ],
)
def test_bad_files(corpora, tmp_path, change, message):
    tensors, _ = safetensors.read(corpora[1] / "shard-00000.safetensors")
    path = shard_path(tmp_path, 0)
    safetensors.write(path, tensors | {"reached": change(tensors["reached"]).contiguous()}, {})
    with pytest.raises(FormatError, match=message):
        Shard(path, CONFIG.hidden, CONFIG.vocab)
    with pytest.raises(ValueError, match="reached of all or of none"):
        write_corpus(tmp_path, [some_texts()[0], marked(some_texts()[1], 1)])


# ---- a training that logs its own ------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch):
    loaded = new_target()
    monkeypatch.setattr(run, "load_model", lambda name, **options: (loaded.model, loaded.tokenizer, None))
    asked = []

    def load(name, draft, **options):
        asked.append(options)
        return pair_with(draft, options["k"], require_draft=options["require_draft"])

    monkeypatch.setattr(run, "load", load)
    return asked


def test_a_training_that_logs_its_own_contexts(corpora, tmp_path, loads):
    """Killed before, while and after contexts are logged, it ends with the same bits."""
    told = settings(steps=6, logged_from=0.5, logged_shards=2, depths=2)

    def train(folder, settings=told, **more):
        named = {"target": "tiny", "dtype": "f32", "device": "cpu", "writing": WRITING, "measurements": 2}
        return run.train(corpora[0], folder, settings, **named, **more)

    whole, done = train(tmp_path / "whole")
    assert done and whole.step == 6 and len(loads) == 1 and loads[0]["k"] == 2
    texts = texts_of(tmp_path / "whole" / "logged")
    assert len(whole.logged.train) == len(texts) and max(text.reached.max() for text in texts) == 2
    assert DraftFile.open(tmp_path / "whole" / DRAFT).recipe["logged"] == {"shards": 2, "texts": len(texts)}

    def killed(fraction, text):
        if "logged: 60%" in text:
            raise InterruptedError

    parts = tmp_path / "parts"
    for stop in (2, 3):  # before; and 2 steps later in the first of the texts
        assert not train(parts, stop=stopping(stop))[1]
    assert json.loads(safetensors.read(parts / CHECKPOINT)[1]["specdec-training"])["step"] == 3
    assert not shard_numbers(parts / "logged")
    with pytest.raises(InterruptedError):
        train(parts, progress=killed)
    assert shard_numbers(parts / "logged") == [0]
    assert not train(parts, stop=stopping(2))[1]  # in the texts again
    with pytest.raises(OptionError, match="logged_shards"):
        train(parts, settings(steps=6, logged_from=0.5, depths=2))
    calls = len(loads)
    seen = []
    assert not train(parts, stop=lambda: "step 5" in "".join(seen), progress=lambda _, text: seen.append(text))[1]
    assert len(loads) == calls + 1
    last, done = train(parts)
    assert done and len(loads) == calls + 1  # they are there
    assert all(torch.equal(last.ema[name], whole.ema[name]) for name in whole.ema)
    for name in ("corpus.json", "shard-00000.safetensors", "shard-00001.safetensors"):
        assert (parts / "logged" / name).read_bytes() == (tmp_path / "whole" / "logged" / name).read_bytes()
    with pytest.raises(OptionError, match="logged: expected none where a training logs some itself"):
        train(parts, logged=corpora[1])


def test_the_command(corpora, tmp_path, loads, capsys, monkeypatch):
    monkeypatch.setattr("specloop.train.generate.Settings.prompt_tokens", 100)
    monkeypatch.setattr("specloop.train.generate.Settings.texts", 6)
    flags = ["--rows", "64", "--vocabulary", "100", "--precision", "f32", "--depths", "2", "--logged-shards", "1"]
    flags += ["--answer-tokens", "20", "--target", "tiny", "--dtype", "f32", "--device", "cpu"]
    code = cli.run(["train", str(corpora[0]), "--out", str(tmp_path / "o"), "--steps", "3", *flags])
    assert code == 0 and "acceptance on held-out text" in capsys.readouterr().out
    code = cli.run(["train", str(corpora[0]), "--out", str(tmp_path / "m"), "--steps", "3", *flags, "--kind", "model"])
    assert code == 2 and "logged_shards: expected 0 for a model of its own" in capsys.readouterr().err


def test_a_state_from_before_there_were_logged_shards(corpora, tmp_path):
    made(corpora[0], tmp_path, stop=stopping(1)).run()
    tensors, metadata = safetensors.read(tmp_path / CHECKPOINT)
    state = json.loads(metadata["specdec-training"])
    del state["settings"]["logged_shards"]
    safetensors.write(tmp_path / CHECKPOINT, tensors, {"specdec-training": json.dumps(state)})
    assert made(corpora[0], tmp_path).run()
