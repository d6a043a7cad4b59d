"""Chains of guesses in compiled code: the same tokens, rows and features as pass by pass, and nothing out of bounds."""

from types import SimpleNamespace

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import guesses, native
from specdec_kernels.guesses import Guesses
from specdec_kernels.stream.memory_rows import MemoryRows
from specloop.drafts.lookup import LookupDraft
from specloop.drafts.model import ModelDraft
from specloop.models.feature_head import HeadWeights
from specloop.pair import Pair
from specloop.stage import opener
from tiny_drafts import CUT, draft_config, head_on, write
from tiny_llama import CONFIG, build
from versions import PROMPT, parts

pytestmark = pytest.mark.skipif(native.cpu is None, reason=f"needs the compiled module: {native.cpu_reason}")
OPENED = {"dtype": "int8", "kv": "int8", "context": 256, "device": "cpu", "threads": None, "memory_budget": None}
DRAWN = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 3}


@pytest.fixture(autouse=True)
def no_lookup(monkeypatch):
    monkeypatch.setattr(LookupDraft, "outlook", lambda self: (0, 0))
    monkeypatch.setattr("specloop.drafts.model.SLOW_SECONDS", 60.0)  # other work on the machine is no fault


@pytest.fixture(scope="module", params=["feature", "model", "whole vocabulary"])
def path(request, tmp_path_factory):
    """A draft's file: a head, a model that says some ids, and one that says all."""
    target, folder = build(seed=1), tmp_path_factory.mktemp("drafts")
    kind = "feature" if request.param == "feature" else "model"
    ids = range(CONFIG.vocab) if request.param == "whole vocabulary" else CUT
    write(folder / "draft.safetensors", target, kind=kind, ids=list(ids), config=draft_config(target.config))
    return str(folder / "draft.safetensors")


def told(path, monkeypatch, compiled, **options):
    """(what every chain proposed, with rows and features; the text; how many guesses were compiled)"""
    proposals, follows, propose, follow = [], [], ModelDraft.propose, Guesses.follow

    def noted(self, k):
        found = propose(self, k)
        rows = None if found.logits is None else found.logits.clone()
        cache = self.seat._cache
        features = None if cache.features is None else cache.features[: cache.length].clone()
        proposals.append((found.tokens, rows, features, cache.length, list(self._held)))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ModelDraft, "propose", noted)
        patch.setattr(Guesses, "follow", lambda self: (follows.append(1), follow(self)))
        with Pair(parts(1), draft=path, opened=opener(**OPENED)) as pair:
            pair.ready()
            if not compiled:
                pair._draft.version.model.guesses = None
            text = pair.generate(PROMPT, max_new_tokens=40, **options).tokens
    return proposals, text, len(follows)


@pytest.mark.parametrize(
    "options", [{"k": 5}, {"k": 4, "confidence": 0.02}, {"k": 5, **DRAWN}, {"k": 8, **DRAWN, "top_k": 1}]
)
def test_the_same_as_pass_by_pass(path, options, monkeypatch, one_thread):
    (mine, text, follows), (others, same, none) = (told(path, monkeypatch, way, **options) for way in (True, False))
    assert text == same and len(mine) == len(others) > 4 and none == 0
    assert follows == sum(max(0, len(tokens) - 1) for tokens, *_ in others) > 4
    for (tokens, rows, features, *cache), (tokens2, rows2, features2, *cache2) in zip(mine, others, strict=True):
        assert tokens == tokens2 and cache == cache2
        for a, b in ((rows, rows2), (features, features2)):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


def test_who_has_none(monkeypatch):
    """With an embedding that is not int8, on a backend that can't be recorded, without the compiled module."""
    cache = (model := build(seed=1, dtype="f32")).new_cache()
    model.forward([1, 2], cache, last=1)
    assert model.guesses(cache, None, CONFIG.vocab) is None
    cache = (model := build(seed=1, dtype="int8")).new_cache()
    model.forward([1, 2], cache, last=1)
    with sk.use_backend("reference"):
        assert model.guesses(cache, None, CONFIG.vocab) is None
    assert isinstance(model.guesses(cache, None, CONFIG.vocab), Guesses)
    assert model.guesses(cache, None, 7) is not (made := model.guesses(cache, None, CONFIG.vocab))
    assert model.guesses(cache, None, CONFIG.vocab) is made
    model._pool.moves += 1  # everything that was captured is
    assert model.guesses(cache, None, CONFIG.vocab) is not made
    monkeypatch.setattr(native, "cpu", None)
    model._forget_passes()
    assert model.guesses(cache, None, CONFIG.vocab) is None


def test_a_row_without_a_candidate():
    cache = (model := build(seed=1, dtype="int8")).new_cache()
    logits = model.forward([1, 2], cache, last=1)
    for bad in (torch.nan, -torch.inf):
        chain = model.guesses(cache, None, CONFIG.vocab)
        logits[0] = bad
        chain.begin(1, cache.capacity)
        assert chain.pick() == -1
        with pytest.raises(RuntimeError, match="nothing was picked"):
            chain.follow()
        model._forget_passes()


@pytest.mark.parametrize("capacity", [2, 3])
def test_no_pass_beyond_the_cache(capacity):
    cache = (model := build(seed=1, dtype="int8")).new_cache(capacity)
    model.forward([1, 2], cache, last=1)
    chain = model.guesses(cache, None, CONFIG.vocab)
    chain.begin(1, capacity)
    assert chain.pick() >= 0
    for _ in range(capacity - 2):
        chain.follow()
    with pytest.raises(RuntimeError, match="no room"):
        chain.follow()


def test_what_a_chain_begins_with_is_looked_at():
    target = build(seed=1, dtype="int8")
    head = head_on(target, dtype="int8")
    seen, cache = target.new_cache(features=True), head.new_cache(8)
    target.forward([1, 2, 3], seen, last=0)
    cache.given = seen.features, 2
    head.forward([1, 2], cache, last=1)
    assert head.guesses(cache, None, len(CUT)) is None  # the next row would read the target's feature
    head.forward([3], cache, last=1)
    chain = head.guesses(cache, None, len(CUT))
    good = {"last": 2, "capacity": 8, "features": cache.features}
    rows = torch.empty(2, len(CUT))
    for change, words in (
        ({"last": 8}, "last: expected 0 to 7"),
        ({"features": None}, "features: expected a torch.Tensor"),
        ({"features": cache.features[:7]}, r"features: expected \[8, "),
        ({"features": cache.features.float()}, "features: expected dtype bfloat16"),
        ({"temperature": 1.0}, "rows: expected a torch.Tensor"),
        ({"temperature": torch.nan}, "temperature: expected a number of at least 0, got nan"),
        ({"temperature": 1.0, "rows": rows[:, 1:]}, "rows: expected rows of"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            chain.begin(**good | change)
    chain.begin(**good, temperature=1.0, rows=rows, top_k=2**40)
    chain.pick(), chain.follow()
    with pytest.raises(ValueError, match="rows: expected one for each"):
        chain.follow()
    chain.begin(**good, temperature=1e-46, rows=rows.fill_(-1))  # 0 in float32
    chain.pick(), chain.end()
    assert torch.equal(rows[0], head._logits[0]) and bool((rows[1] == -1).all())
    with pytest.raises(RuntimeError, match="no room"):
        chain.follow()


def test_a_pass_that_was_broken_off_is_recorded_again(monkeypatch):
    cache = (model := build(seed=1, dtype="int8")).new_cache()
    model.forward([1, 2], cache, last=1)
    chain = model.guesses(cache, None, CONFIG.vocab)
    chain.begin(1, cache.capacity)
    chain.pick()
    with monkeypatch.context() as patch:
        patch.setattr(chain, "_run", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            chain.follow()
    assert model.guesses(cache, None, CONFIG.vocab) is chain


def test_an_embedding_in_parts_is_not_recorded():
    """Which of them is read depends on the id."""
    whole = torch.randn(64, 64)
    rows, ids, out = MemoryRows([sk.pack_int8(part) for part in whole.split(32)]), torch.tensor([3]), torch.empty(1, 64)
    with sk.record() as recording:
        rows.write(ids, out)
    assert not recording.complete
    weights = SimpleNamespace(embeds_in_place=False, embed=None)
    assert not HeadWeights(weights.embed, *[torch.ones(2)] * 2, [], *[torch.ones(2)] * 2).embeds_in_place
    target = build(seed=1, dtype="int8")
    assert target.weights.embeds_in_place and head_on(target).weights.embeds_in_place
    assert not build(seed=1, dtype="f32").weights.embeds_in_place


def test_arguments():
    number = lambda dtype=torch.int64: torch.zeros(1, dtype=dtype)
    row = lambda n, dtype=torch.float32: torch.zeros(1, n, dtype=dtype)
    good = {"logits": row(9), "columns": 8, "ids": torch.arange(8, dtype=torch.int32), "id": number(), "slot": number()}
    good |= {"position": number(), "length": number(torch.int32), "table": row(2, torch.int32), "page": 64}
    good |= {"rotary": torch.zeros(5, 4), "turned": row(4), "state": row(3), "feature": row(3)}
    assert guesses.Guesses(print, **good).hidden == 3
    for change, words in (
        ({"columns": 10}, "columns: expected 1 to 9, got 10"),
        ({"ids": torch.arange(7, dtype=torch.int32)}, r"ids: expected shape \[8\]"),
        ({"id": number(torch.int32)}, "id: expected dtype int64"),
        ({"table": torch.zeros(2, 2, dtype=torch.int32)}, "table: expected one row"),
        ({"rotary": torch.zeros(5, 3)}, "rotary: expected contiguous rows of 4"),
        ({"feature": torch.zeros(1, 2)}, "feature: expected 3 values, as many as state has, got 2"),
        ({"feature": None}, "feature: expected 3 values"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            guesses.Guesses(print, **good | change)
