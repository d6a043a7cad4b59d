"""Features in a model's cache: what the head was multiplied with, for every row of every pass, bit for bit.

The models here have the unit matrix for a head, so their logits *are* the features in float32.
"""

import random
from dataclasses import replace

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native
from specloop.errors import BudgetError
from specloop.models.base import Part, paths_to
from specloop.models.llama import Llama
from specloop.models.weights import Resident
from test_ragged_pass import TOKENS
from test_tree_pass import BUSHY, DEEP
from tiny_llama import CONFIG, build
from versions import PROMPT, pair_of

HIDDEN = replace(CONFIG, vocab=CONFIG.hidden, tied=False)
IDS = [token % HIDDEN.vocab for token in TOKENS]


def showing(dtype="int8", **options):
    """A model whose logits are its features."""
    model = build(dtype, config=HIDDEN, tied=False, **options)
    w = model.weights
    weights = Resident(w.embedding, w.layers, w.norm, torch.eye(HIDDEN.hidden))
    return Llama(HIDDEN, weights, context=256, kv=model.kv)


def wanted(model, ids):
    """Features of ``ids``, by passes over one id without features."""
    cache = model.new_cache()
    return torch.cat([model.forward([token], cache, last=1).clone() for token in ids]).bfloat16()


def same(cache, want):
    assert cache.length == len(want)
    return torch.equal(cache.features[: cache.length], want)


@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_however_a_text_is_cut_into_passes(dtype):
    model, ids = showing(dtype, kv="int8"), IDS[:200]
    want = wanted(model, ids)
    for cuts in ([200], [3, 130, 1, 1, 60, 5], [16] * 12 + [8]):
        for last in (0, 1, 1000):  # rows whose logits nobody wants have features, too
            cache, at = model.new_cache(features=True), 0
            for n in cuts:
                for _ in range(2):  # captured passes, too: what was refused leaves nothing behind
                    cache.truncate(at)
                    logits = model.forward(ids[at : at + n], cache, last=min(last, n))
                at += n
                assert torch.equal(logits.bfloat16(), want[at - min(last, n) : at])
            assert same(cache, want), (cuts, last)


@pytest.mark.parametrize("name", native.ISA_NAMES)
def test_every_instruction_set(name):
    if not native.cpu.set_isa(name):
        pytest.skip(f"this machine can't run {name}")
    try:
        whole_and_in_pieces(20)
    finally:
        native.cpu.set_isa(native.cpu.machine_isa())


def test_without_compiled_kernels():
    with sk.use_backend("reference"):
        whole_and_in_pieces(5)


def whole_and_in_pieces(count):
    model = showing()
    cache = model.new_cache(features=True)
    model.forward(IDS[:count], cache, last=2)
    assert same(cache, wanted(model, IDS[:count]))


@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_logits_are_what_they_are_without(dtype):
    """With the head that the model has, which takes what is kept: exactly in float32, bf16 is for keeping."""
    for tied in (True, False):
        model = build(dtype, tied=tied)
        cache, plain = model.new_cache(features=True), model.new_cache()
        for n in (1, 1, 4, 4, 40):
            tokens = TOKENS[cache.length : cache.length + n]
            for last in (1, n):
                cache.truncate(plain.length)
                got = model.forward(tokens, cache, last=last).clone()
            assert torch.equal(got, model.forward(tokens, plain, last=n))
        head = model.weights.head
        again = (sk.linear_int8 if dtype == "int8" else sk.linear_f32)(cache.features[10:50].float(), head)
        assert (again - got).norm() / got.norm() < (2**-7 if dtype == "int8" else 2**-8)


def test_requests_that_share_a_pass():
    """Some with features, some without, with wanted rows here and there."""
    model, rng = showing(), random.Random(1)
    for _ in range(8):
        count = rng.choice((2, 3, 5))
        texts = [IDS[rng.randrange(50) :][: rng.choice((1, 5, 63, 64, 90))] for _ in range(count)]
        caches = [model.new_cache(features=rng.random() < 0.7) for _ in range(count)]
        at = [0] * count
        while any(a < len(text) for a, text in zip(at, texts, strict=True)):
            parts = []
            for i, text in enumerate(texts):
                new = text[at[i] : at[i] + rng.choice((1, 2, 2, 7, 70))]
                at[i] += len(new)
                if new:
                    parts.append(Part(caches[i], new, rng.choice((0, 1, len(new)))))
            model.forward_parts(parts)
        for cache, text in zip(caches, texts, strict=True):
            assert cache.features is None or same(cache, wanted(model, text))


def test_paths_of_trees():
    """Before a path is accepted the features are those of the text; then its nodes' come behind, others never."""
    model, rng = showing(), random.Random(2)
    for start in (0, 5, 62, 64):
        for parents in ([-1, -1, 0], BUSHY, DEEP):
            for path in rng.sample([[], *paths_to(parents)], 2):
                text, chain = IDS[:start], IDS[start : start + rng.choice((1, 1, 3, 20))]
                nodes = [rng.randrange(HIDDEN.vocab) for _ in parents]
                cache, other = (model.new_cache(features=True) for _ in range(2))
                if text:
                    model.forward(text, cache, last=0)
                parts = [Part(cache, chain + nodes, len(nodes) + 1, parents), Part(other, IDS[:2], 1)]
                rng.shuffle(parts)
                model.forward_parts(parts)
                assert same(cache, wanted(model, text + chain)) and same(other, wanted(model, IDS[:2]))
                cache.accept(path)
                assert same(cache, wanted(model, text + chain + [nodes[i] for i in path]))
                model.forward([3], cache, last=0)
                assert torch.equal(
                    cache.features[cache.length - 1], wanted(model, [*text, *chain, *[nodes[i] for i in path], 3])[-1]
                )


def test_several_trees_in_a_pass():
    model, rng = showing(), random.Random(4)
    caches = [model.new_cache(features=True) for _ in range(3)]
    chains = [[5], [6], IDS[:9]]
    trees = [BUSHY, DEEP, [-1, 0]]
    nodes = [[rng.randrange(HIDDEN.vocab) for _ in parents] for parents in trees]
    parts = [Part(*part) for part in zip(caches, map(list.__add__, chains, nodes), [9, 13, 3], trees, strict=True)]
    model.forward_parts(parts)
    for cache, chain, tree, parents in zip(caches, chains, nodes, trees, strict=True):
        path = rng.choice(paths_to(parents))
        cache.accept(path)
        assert same(cache, wanted(model, chain + [tree[i] for i in path]))


def test_nothing_is_kept_and_nothing_is_done_without(monkeypatch):
    model = build()
    calls = []
    norm = sk.rms_norm
    monkeypatch.setattr(sk, "rms_norm", lambda *a, **o: calls.append(1) or norm(*a, **o))
    plain = model.new_cache(100)
    for tokens in (TOKENS[:30], [1], [2], [3, 4]):
        model.forward(tokens, plain, last=1)
    assert plain.features is None and not calls and plain.nbytes == model.cache_nbytes(100)
    kept = model.new_cache(100, features=True)
    assert kept.nbytes == model.cache_nbytes(100, features=True) == plain.nbytes + 100 * 2 * CONFIG.hidden
    for tokens in ([1], [2], [3]):
        model.forward(tokens, kept, last=1)
    assert len(calls) == 1  # captured, then done again without a call


def test_no_room_for_features_gives_the_pages_back(monkeypatch):
    model = build()
    with monkeypatch.context() as m:
        m.setattr(torch, "empty", lambda *a, **o: (_ for _ in ()).throw(MemoryError("none")))
        with pytest.raises(MemoryError):
            model.new_cache(100, features=True)
    assert model._pool.used == 0 and model.new_cache(100, features=True).nbytes


def test_budgets_count_them():
    pair = pair_of(1, draft="none")
    model = pair.model
    place = pair.place
    model.weights.budget = pair.pressure.used(model) + model.cache_nbytes(64)
    with place.lock:
        with pytest.raises(BudgetError, match=f"takes {model.cache_nbytes(64, features=True)} bytes"):
            place.seat(64, features=True).cache_of(model)
        seat = place.seat(64)
        assert seat.cache_of(model) is not None and seat.features == (None, 0)
        seat.leave()
        model.weights.budget += model.cache_nbytes(64, features=True)
        seat = place.seat(64, features=True)
        seat.forward(PROMPT, seat, last=1)
        features, length = seat.features
        assert length == len(PROMPT) and features.shape == (64, CONFIG.hidden)
        seat.leave()
        assert seat.features == (None, 0)
    pair.close()


def test_weights_that_stream(tmp_path, monkeypatch):
    """Passes without a head, too, for which the last norm has to be there."""
    pytest.importorskip("gguf", reason="the gguf package writes the test files: pip install '.[test]'")
    from specloop.loader import load_model
    from test_loader import write
    from test_streamed_model import packed, smallest

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    source = str(write(tmp_path / "tiny.gguf"))
    path = packed(source)
    resident = load_model(source, context=64)[0]
    for budget in (smallest(path), smallest(path) + 20_000, None):
        model = load_model(path, context=64, memory_budget=budget)[0]
        caches = [m.new_cache(features=True) for m in (model, resident)]
        for n, last in ((20, 0), (1, 1), (1, 0), (9, 9), (3, 1)):
            for m, cache in zip((model, resident), caches, strict=True):
                m.forward(TOKENS[cache.length : cache.length + n], cache, last=last)
            assert same(caches[0], caches[1].features[: caches[1].length])
        parts = [[Part(cache, [7, 1, 2, 3], 4, [-1, 0, -1])] for cache in caches]
        for m, part in zip((model, resident), parts, strict=True):
            m.forward_parts(part)
            part[0].cache.accept([0, 1])
        assert same(caches[0], caches[1].features[: caches[1].length])
        assert [torch.equal(a, b) for a, b in zip(model.weights.norms(), resident.weights.norms(), strict=True)]
        assert model.weights.last_norm.dtype is torch.float32
        model.close()
