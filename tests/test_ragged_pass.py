"""Several requests in one pass: every row is the row that the request would get alone, bit for bit."""

import random

import pytest
import torch

import specdec_kernels as sk
from scripted import Scripted
from specdec_kernels import native
from specloop.models import llama
from specloop.models.base import Part, forward_parts
from specloop.models.buffers import REPEATED
from tiny_llama import CONFIG, build

pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
from specdec_kernels import stream
from specloop.loader import load_model
from specloop.models.buffers import needs
from test_loader import write
from test_streamed_model import packed

TOKENS = [int(t) for t in torch.randint(0, CONFIG.vocab, (400,), generator=torch.Generator().manual_seed(5))]
MIXES = ([1], [1, 1, 1], [1, 3, 9], [4, 1, 4, 2, 1], [70, 1, 2], [130, 3], [5, 200, 5])


def texts(count, rng, places):
    """Requests at different places: ids that are in the cache already."""
    return [TOKENS[rng.randrange(50) :][: rng.choice(places)] for _ in range(count)]


def started(model, text, capacity=None):
    cache = model.new_cache(capacity)
    if text:
        model.forward(text, cache, last=0)
    return cache


def check_mixes(model, mixes=MIXES, rounds=2, seed=0, places=(0, 1, 40, 63, 64, 65, 100)):
    """Rounds over requests, with rejections in between; ``last`` is anything from nothing to all rows."""
    rng = random.Random(seed)
    for mix in mixes:
        known = texts(len(mix), rng, places)
        caches = [started(model, text) for text in known]
        for _ in range(rounds):
            news = [[rng.randrange(CONFIG.vocab) for _ in range(n)] for n in rng.sample(mix, len(mix))]
            room = [256 - len(text) for text in known]
            news = [new[: most // rounds] for new, most in zip(news, room, strict=True)]
            lasts = [rng.choice((len(new), len(new), 1, 0)) for new in news]
            parts = [Part(*part) for part in zip(caches, news, lasts, strict=True)]
            got = model.forward_parts(parts).clone()
            assert got.shape == (sum(lasts), CONFIG.vocab)
            want = []
            for text, new, last in zip(known, news, lasts, strict=True):
                want.append(model.forward(new, started(model, text), last=last).clone())
            assert torch.equal(got, torch.cat(want)), f"rows {[len(new) for new in news]}, last {lasts}"
            for text, new, cache in zip(known, news, caches, strict=True):
                assert cache.length == len(text) + len(new)
                kept = rng.randrange(len(new) + 1)  # the others are rejected
                cache.truncate(len(text) + kept)
                text += new[:kept]


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_rows_are_those_of_requests_alone(dtype, kv):
    check_mixes(build(dtype, kv=kv, tied=dtype == "int8"))


@pytest.mark.parametrize("name", native.ISA_NAMES)
def test_every_instruction_set(name):
    if not native.cpu.set_isa(name):
        pytest.skip(f"this machine can't run {name}")
    try:
        check_mixes(build("int8"), MIXES[2:5])
    finally:
        native.cpu.set_isa(native.cpu.machine_isa())


def test_without_compiled_kernels():
    with sk.use_backend("reference"):
        check_mixes(build("f32"), [[1, 3, 2]], rounds=1, places=(0, 2, 5))


def test_a_head_and_embedding_of_their_own_while_captured_passes_come_and_go(monkeypatch):
    monkeypatch.setattr(llama, "SHAPES", 3)
    model = build("int8", tied=False)
    check_mixes(model, [[1, 2], [1, 3], [2, 2], [1, 2], [4], [1, 2]], rounds=3)
    assert len(model._shapes) == 3


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
@pytest.mark.parametrize("tied", [True, False])
def test_streamed_weights(tmp_path, monkeypatch, dtype, tied):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    path = packed(str(write(tmp_path / "tiny.gguf", tied=tied)), dtype)
    with stream.Pack.open(path) as pack:
        least = stream.plan(pack, reserved=needs(CONFIG, kv="int8", context=256)).minimum
    for budget in (least, 3 * least, None):
        model, _, _ = load_model(path, dtype=dtype, context=256, memory_budget=budget)
        assert model.streams == (budget == least)
        check_mixes(model, MIXES[2:4])
        model.close()


@pytest.mark.parametrize("counts", [(1, 1, 4), (1, 4, 1)])  # rows in order, and to be sorted
@pytest.mark.parametrize("more", [0, 60_000, 160_000])
def test_shapes_of_streamed_weights_that_come_back(tmp_path, monkeypatch, counts, more):
    """What lies in a slot is another block the next time, or already in the same pass, and must not be captured."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    path = packed(str(write(tmp_path / "tiny.gguf", tied=True)))
    with stream.Pack.open(path) as pack:
        least = stream.plan(pack, reserved=needs(CONFIG, kv="int8", context=256)).minimum
    model, _, _ = load_model(path, context=256, memory_budget=least + more)
    assert model.streams
    caches = [started(model, TOKENS[:n], 100) for n in (3, 70, 9)]
    news = [TOKENS[200 + i : 200 + i + n] for i, n in enumerate(counts)]
    want = torch.cat(
        [model.forward(new, cache, last=len(new)).clone() for new, cache in zip(news, caches, strict=True)]
    )
    for _ in range(4):
        for new, cache in zip(news, caches, strict=True):
            cache.truncate(cache.length - len(new))
        parts = [Part(cache, new, len(new)) for new, cache in zip(news, caches, strict=True)]
        assert torch.equal(model.forward_parts(parts), want)
    model.close()


def test_shapes_that_come_back_are_captured():
    model = build("int8")
    caches = [started(model, TOKENS[:n]) for n in (3, 70, 9)]
    made, rows = [], {}
    for _ in range(4):
        parts = [Part(cache, [5] * n, n) for cache, n in zip(caches, (1, 4, 1), strict=True)]
        made.append(model.forward_parts(parts).clone())
        rows = next(reversed(model._shapes.values()))
        for cache, n in zip(caches, (1, 4, 1), strict=True):
            cache.truncate(cache.length - n)
    assert all(torch.equal(made[0], other) for other in made[1:])
    assert len(rows.passes) == 2 and all(rows.passes.values())  # layers, and the head behind sorted rows


def test_many_rows_in_one_pass():
    """More logits than one request's rounds ever need: their buffer grows, and counts."""
    model = build("int8")
    before = model.memory_nbytes
    caches = [started(model, TOKENS[n : n + 20]) for n in range(9)]
    model.forward([1], model.new_cache(), last=1)
    parts = [Part(cache, TOKENS[100:104], 4) for cache in caches]
    assert sum(part.last for part in parts) > 2 * REPEATED
    got = model.forward_parts(parts).clone()
    alone = [model.forward(TOKENS[100:104], started(model, TOKENS[n : n + 20]), last=4).clone() for n in range(9)]
    assert torch.equal(got, torch.cat(alone))
    assert model.memory_nbytes - before >= 4 * CONFIG.vocab * (36 - REPEATED)
    there = model._logits.untyped_storage().data_ptr()  # nothing holds on to the smaller one
    assert {rows.logits.untyped_storage().data_ptr() for rows in model._shapes.values()} == {there}


def test_a_failed_pass_changes_nothing():
    model = build("int8")
    caches = [started(model, TOKENS[:n]) for n in (5, 9)]
    for bad, message in (
        ([Part(caches[0], [1], 1), Part(caches[1], [CONFIG.vocab], 1)], r"ids in \[0, 203\)"),
        ([Part(caches[0], [1], 1), Part(caches[1], [1], 2)], "last: expected 0 to 1"),
        ([Part(caches[0], [1], 1), Part(caches[1], [1] * 300, 2)], "room in the cache"),
        ([Part(caches[0], [1], 1), Part(caches[0], [1], 1)], "a cache of its own"),
        ([], "at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward_parts(bad)
        assert [cache.length for cache in caches] == [5, 9]


def test_models_without_passes_for_several():
    """One pass after the other; rows that are valid until the next pass are copied."""
    model = build("int8")

    class One:
        def forward(self, *args, **options):
            return model.forward(*args, **options)

    caches = [[started(model, TOKENS[:n]) for n in (5, 70)] for _ in range(2)]
    parts = [[Part(c[0], TOKENS[:3], 2), Part(c[1], [9], 1)] for c in caches]
    assert torch.equal(forward_parts(One(), parts[0]), model.forward_parts(parts[1]))
    alone = Part(model.new_cache(), [1, 2], 1)
    assert forward_parts(One(), [alone]).data_ptr() == model._logits.data_ptr()  # nothing to copy

    told = Scripted(lambda prefix: [len(prefix), sum(prefix)], 2)
    parts = [Part(told.new_cache(9), tokens, last) for tokens, last in (([1, 0, 1], 2), ([0], 0), ([1, 1], 1))]
    assert forward_parts(told, parts).tolist() == [[2, 1], [3, 2], [2, 2]]
