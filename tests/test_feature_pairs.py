"""Pairs whose draft belongs to their target: how it is chosen, exchanged, given up, and what it takes."""

import gc
import shutil
import threading
import weakref

import pytest
import torch

import specdec_kernels as sk
import specloop
from specloop.errors import OptionError, OutOfMemory
from specloop.fingerprint import fingerprint
from specloop.layout import layer_shapes
from specloop.models.blueprint import int8_form
from specloop.models.config import LlamaConfig
from specloop.models.feature_head import FeatureHead, HeadWeights
from specloop.models.weights import Layer
from specloop.pair import Pair
from specloop.stage import opener
from test_feature_draft import LONG, OPENED, knowing, no_lookup, pair_with  # noqa: F401 (a fixture)
from tiny_drafts import draft_config, write
from tiny_llama import CONFIG, build
from versions import PROMPT, alone, parts


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """{seed of a target: the path of its head}"""
    folder = tmp_path_factory.mktemp("heads")
    for seed in (1, 2):
        write(folder / f"{seed}.safetensors", build(seed=seed), seed=seed)
    return {seed: str(folder / f"{seed}.safetensors") for seed in (1, 2)}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """An empty folder in the place of the package's drafts."""
    folder = tmp_path / "drafts"
    folder.mkdir()
    monkeypatch.setattr("specloop.draft_loader.FOLDER", str(folder))
    return folder


# ---- which one -------------------------------------------------------------------------------------------------------


def test_auto_takes_the_best_for_the_target(shipped, heads):
    write(shipped / "a.safetensors", build(seed=1), kind="model")
    with pair_with("auto") as pair:
        pair.ready()
        assert pair.draft == "builtin" and not pair.draft_reads_features
    shutil.copy(heads[1], shipped / "b.safetensors")
    write(shipped / "c.safetensors", build(seed=3))
    for name in ("auto", "builtin"):
        with pair_with(name) as pair:
            result = pair.generate(PROMPT, max_new_tokens=30)
            assert result.tokens == alone(1, PROMPT, 30) and set(result.stats.speculation.by_source) == {"feature"}
            assert pair.draft == "builtin" and pair.draft_name == str(shipped / "b.safetensors")
            assert result.stats.settings["draft"] == "builtin" and pair.draft_nbytes
            assert pair.generate(PROMPT, max_new_tokens=9, draft="lookup").stats.speculation.proposed == 0


def test_a_target_without_one(shipped, heads):
    for files in ((), (heads[1],)):
        for file in files:
            shutil.copy(file, shipped)
        with pair_with("auto", seed=2) as pair:
            assert pair.generate(PROMPT, max_new_tokens=9).tokens == alone(2, PROMPT, 9)
            assert pair.draft == "lookup" and pair.draft_failure is None and pair.draft_name is None
            with pytest.raises(OptionError, match="draft: expected one of auto, lookup, none, got 'builtin'"):
                pair.generate(PROMPT, draft="builtin")
        with (
            pair_with("builtin", seed=2) as pair,
            pytest.raises(OptionError, match="there is no builtin one for model"),
        ):
            pair.ready()


def test_a_broken_one(shipped, heads):
    """The target is there, and looks up."""
    data = open(heads[1], "rb").read()  # noqa: SIM115
    (shipped / "b.safetensors").write_bytes(data[:-3])
    with pair_with("auto") as pair:
        assert pair.generate(PROMPT, max_new_tokens=9).tokens == alone(1, PROMPT, 9)
        assert pair.draft == "lookup" and "truncated" in pair.draft_failure


def test_options_are_checked_before_the_target_is_there(shipped, heads):
    shutil.copy(heads[1], shipped)
    gate = threading.Event()

    def late():
        assert gate.wait(30)
        return parts(1)()

    with Pair(late, draft="auto", opened=opener(**OPENED)) as pair:
        assert pair.draft == "auto"
        for wrong in ({"k": -1}, {"temperature": "hot"}, {"tree": 0}):
            with pytest.raises(OptionError):
                pair.generate(PROMPT, **wrong)
        gate.set()
        assert pair.generate(PROMPT, max_new_tokens=9, tree=4).tokens == alone(1, PROMPT, 9)


def test_a_target_that_fails_ends_the_wait(shipped, heads):
    shutil.copy(heads[1], shipped)

    def broken():
        raise OSError("no such disk")

    before = threading.active_count()
    pair = Pair(broken, draft="auto", opened=opener(**OPENED))
    with pytest.raises(OSError, match="no such disk"):
        pair.ready()
    pair.close()
    assert threading.active_count() <= before

    gate = threading.Event()
    pair = Pair(lambda: gate.wait(30) and parts(1)(), draft="auto", opened=opener(**OPENED))
    assert pair.cancel_load()
    gate.set()
    pair.close()
    assert threading.active_count() <= before


# ---- exchanges -------------------------------------------------------------------------------------------------------


def test_a_head_goes_with_its_target_and_comes_back(heads):
    with pair_with(heads[1]) as pair:
        stream = pair.stream(PROMPT, max_new_tokens=40)
        tokens = [next(stream).token for _ in range(9)]
        gone = weakref.ref(pair._draft.version.model)
        pair.swap(target=parts(2))
        gc.collect()
        assert gone() is None and pair._draft.version is None
        assert "expected one for model" in pair.draft_failure and "could not be used" in pair.draft_failure
        tokens += [event.token for event in stream]
        assert stream.result.stats.speculation.off_reason == pair.draft_failure
        result = pair.generate(PROMPT, max_new_tokens=20)
        assert result.tokens == alone(2, PROMPT, 20) and result.stats.speculation.off_reason == pair.draft_failure
        pair.swap(target=parts(1, dtype="f32"))  # the same model, as something else
        assert pair.draft_failure is None and pair.draft == heads[1] and pair.draft_reads_features
        result = pair.generate(PROMPT, max_new_tokens=20)
        assert result.tokens == alone(1, PROMPT, 20, dtype="f32") and result.stats.speculation.proposed
        pair.swap(draft="lookup")
        pair.swap(target=parts(1))
        assert pair.draft == "lookup" and pair._draft.version is None


def test_auto_follows_the_target(shipped, heads):
    for path in heads.values():
        shutil.copy(path, shipped)
    with pair_with("auto") as pair:
        stream = pair.stream(LONG, max_new_tokens=40)
        for _ in range(9):
            next(stream)
        for seed in (2, 3, 1):
            pair.swap(target=parts(seed))
            assert pair.draft == ("lookup" if seed == 3 else "builtin") and pair.draft_failure is None
            result = pair.generate(PROMPT, max_new_tokens=20)
            assert result.tokens == alone(seed, PROMPT, 20)
            assert set(result.stats.speculation.by_source) == (set() if seed == 3 else {"feature"})
            if seed != 3:
                assert pair.draft_name.endswith(f"{seed}.safetensors")
        assert len(list(stream)) == 31


def test_a_head_that_comes_while_a_text_is_made(heads):
    """The target's cache has no features until then: it is filled anew, and the text goes on."""
    with pair_with("lookup") as pair:
        stream = pair.stream(LONG, max_new_tokens=60)
        tokens = [next(stream).token for _ in range(9)]
        pair.swap(draft=heads[1])
        tokens += [event.token for event in stream]
        assert tokens == alone(1, LONG, 60) and stream.result.stats.speculation.by_source["feature"].proposed
        with pytest.raises(OptionError, match="expected one for model"):
            pair.swap(draft=heads[2])
        assert pair.draft == heads[1] and pair.draft_reads_features
        stream = pair.stream(LONG, max_new_tokens=60)
        tokens = [next(stream).token for _ in range(9)]
        pair.swap(draft="lookup")
        assert tokens + [event.token for event in stream] == alone(1, LONG, 60)


def test_both_at_once(heads):
    with pair_with(heads[1]) as pair:
        stream = pair.stream(PROMPT, max_new_tokens=40)
        tokens = [next(stream).token for _ in range(5)]
        pair.swap(target=parts(2), draft=heads[2])
        tokens += [event.token for event in stream]
        kept = next(n for n in range(5, 12) if tokens[n:] == alone(2, PROMPT + tokens[:n], 40 - n))
        assert tokens[:kept] == alone(1, PROMPT, 40)[:kept]
        assert stream.result.stats.swaps == 1 and stream.result.stats.speculation.faults == []
        with pytest.raises(OptionError, match="expected one for model"):
            pair.swap(target=parts(1), draft=heads[2])
        assert pair.generate(PROMPT, max_new_tokens=20).tokens == alone(2, PROMPT, 20)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_that_runs_short_takes_the_head_and_the_features(heads):
    with pair_with(heads[1]) as pair:
        knowing(pair, PROMPT, lambda i: i % 5)
        stream, other = (pair.stream(PROMPT, max_new_tokens=40) for _ in range(2))
        tokens = [next(stream).token for _ in range(6)]
        next(other)
        seats = [seat for seat in pair.place.seats() if seat.nbytes]
        sizes = [seat.nbytes for seat in seats]
        assert len(seats) == 2 and all(seat.features[0] is not None for seat in seats)
        gone, forward, fails = weakref.ref(pair._draft.version.model), pair.model.forward, [2]

        def failing(new, cache, *, last):
            fails[0] -= 1
            if fails[0] >= 0:
                raise MemoryError
            return forward(new, cache, last=last)

        pair.model.forward = failing
        tokens += [next(stream).token for _ in range(6)]
        gc.collect()
        assert pair.draft == "none" and gone() is None and not pair.draft_reads_features
        for seat, size in zip(seats, sizes, strict=True):
            assert seat.features == (None, 0) and seat.nbytes == size - 2 * CONFIG.hidden * seat.capacity
        assert tokens + [event.token for event in stream] == alone(1, PROMPT, 40)
        assert [event.token for event in other] == alone(1, PROMPT, 40)[1:]
        released = {step["step"]: step["bytes"] for step in stream.result.stats.memory.released}
        assert released["draft"] > 2 * 2 * CONFIG.hidden * 40
        assert stream.result.stats.speculation.off_reason == "its memory was needed"
        assert pair.generate(PROMPT, max_new_tokens=20).tokens == alone(1, PROMPT, 20)


@pytest.fixture
def pack(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
    from test_swap_streamed import pack_of

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return pack_of(tmp_path, 0)


def head_of_file(model, path):
    pair = specloop.load(model, "none", context=64)
    write(path, pair.model, tokenizer=pair.tokenizer)
    plain = pair.generate(PROMPT, max_new_tokens=40).tokens
    pair.close()
    return str(path), plain


@pytest.mark.parametrize("name", ["path", "auto"])
def test_targets_that_stream_within_a_budget(pack, shipped, tmp_path, name, monkeypatch):
    from specdec_kernels import stream
    from specloop.draft_loader import size_in_memory
    from specloop.models.buffers import needs

    path, plain = head_of_file(pack, (shipped if name == "auto" else tmp_path) / "head.safetensors")
    draft = size_in_memory(path, kv="int8", context=128)
    reserved = needs(CONFIG, kv="int8", context=128) | {"draft": draft}
    with stream.Pack.open(pack) as opened:
        budget = stream.plan(opened, reserved=reserved).minimum + 100_000
    with specloop.load(pack, path if name == "path" else name, context=128, memory_budget=budget, k=3) as pair:
        assert pair.model.streams and pair.model.weights.plan.reserved["draft"] == draft
        request = pair.stream(PROMPT, max_new_tokens=40)
        tokens = []
        for event in request:
            tokens.append(event.token)
            assert pair.pressure.used(pair.model) <= budget
        assert tokens == plain and request.result.stats.speculation.by_source["feature"].proposed
        assert pair.model.memory_nbytes + pair._draft.version.model.memory_nbytes <= budget
        each = pair.model.cache_nbytes(64, features=True) + pair._draft.version.model.cache_nbytes(64)
        assert pair.place.room(64) <= pair.pressure._left(pair.model) // each
        found = {}  # the head looks ids up in the target's file while the target streams for others
        work = lambda i: found.update({i: pair.generate(PROMPT, max_new_tokens=12).tokens})
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(3)] == [plain[:12]] * 3
        own = fingerprint(pair.model, pair.tokenizer)
    with specloop.load(pack, "none", context=128) as pair:
        assert fingerprint(pair.model, pair.tokenizer) == own


def test_a_request_that_does_not_fit_with_features(heads):
    """The head goes before the request does."""
    with pair_with(heads[1], context=128) as pair:
        pair.generate(PROMPT, max_new_tokens=10, draft="none")
        model = pair.model
        model.drop_spare()
        model.weights.budget = pair.pressure.used(model) + model.cache_nbytes(100) + 2 * CONFIG.hidden * 50
        result = pair.generate(PROMPT, max_new_tokens=100)
        assert result.tokens == alone(1, PROMPT, 100) and pair.draft == "none"
        assert "draft" in {step["step"] for step in result.stats.memory.released}
        model.weights.budget = pair.pressure.used(model)
        model.drop_spare()
        with pytest.raises((OptionError, OutOfMemory)):
            model.weights.budget = model.weights.nbytes
            pair.generate(PROMPT, max_new_tokens=100)


SMOLLM2 = LlamaConfig(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, context=8192,
    rope_theta=1e5, rms_eps=1e-5,
)  # fmt: skip


def test_what_a_head_of_the_real_model_takes():
    """With 8,192 ids: at most a tenth of the target's int8 weights, and 15 % with all that 2,048 tokens need."""
    size = lambda n, k: sk.Int8Weight.nbytes_of(n, k, int8_form(k)[0])
    shapes = layer_shapes(SMOLLM2)
    layer = sum(size(*shape) if len(shape) == 2 else 4 * shape[0] for shape in shapes.values())
    target = SMOLLM2.layers * layer + size(SMOLLM2.vocab, SMOLLM2.hidden) + 4 * SMOLLM2.hidden

    def empty(n, k):
        group, rotated = int8_form(k)
        return sk.Int8Weight.empty(n, k, group, rotated=rotated)

    config = draft_config(SMOLLM2, draft_ids=tuple(range(0, 49152, 6)))
    parts = {name: empty(*shape) if len(shape) == 2 else torch.ones(shape) for name, shape in shapes.items()}
    d = SMOLLM2.hidden
    own = HeadWeights(None, torch.ones(d), empty(d, 2 * d), [Layer(**parts)], torch.ones(d), empty(8192, d))
    head = FeatureHead(config, own, context=2048)
    assert head.weights_nbytes <= 0.1 * target
    features = 2 * d * 2048  # that the target keeps
    assert head.memory_nbytes + head.cache_nbytes(2048) + features <= 0.15 * target
