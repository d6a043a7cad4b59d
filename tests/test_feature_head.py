"""A head on its target's hidden states: right against textbook float64, whatever is read at once and however far."""

from dataclasses import replace

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native
from specloop.models.base import Part
from specloop.models.llama import Llama
from test_llama import TOKENS
from tiny_drafts import CUT, head_on, plain_rows
from tiny_llama import CONFIG, build


def features_of(target, ids):
    cache = target.new_cache(features=True)
    target.forward(ids, cache, last=0)
    return cache.features


def rows_of(head, pieces, given=(None, 0)):
    """(logits of all rows, own features)"""
    cache, made = head.new_cache(), []
    for piece in pieces:
        cache.given = given
        made.append(head.forward(piece, cache, last=len(piece)).clone())
    return torch.cat(made), cache.features[: cache.length]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_are_those_of_the_formula(backend):
    """With true features as far as they go, and with its own behind them, from the first position on, too."""
    target = build("f32")
    head = head_on(target)
    with sk.use_backend(backend):
        features = features_of(target, TOKENS[:20])
        for reach, count in ((8, 12), (12, 12), (0, 4), (1, 1)):
            want, own = plain_rows(head, TOKENS[:count], features[:reach])
            got, kept = rows_of(head, [TOKENS[:count]], (features, reach))
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(kept.double(), own, rtol=2**-7, atol=1e-3)
    assert got.shape[1] == len(CUT) == head.config.columns


@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_rows_do_not_depend_on_the_passes(dtype):
    target = build(dtype)
    head = head_on(target, dtype=dtype)
    features = features_of(target, TOKENS)
    want, kept = rows_of(head, [[t] for t in TOKENS], (features, 140))
    for cuts in ([150], [1, 149], [128, 22], [139, 1, 10], [140, 10], [141, 9], [5] * 30):
        pieces, at = [], 0
        for n in cuts:
            pieces.append(TOKENS[at : at + n])
            at += n
        got, own = rows_of(head, pieces, (features, 140))
        assert torch.equal(got, want) and torch.equal(own, kept), cuts


@pytest.mark.parametrize("name", native.ISA_NAMES)
def test_every_instruction_set(name):
    if not native.cpu.set_isa(name):
        pytest.skip(f"this machine can't run {name}")
    try:
        target = build("int8")
        head = head_on(target, dtype="int8")
        features = features_of(target, TOKENS[:20])
        one = rows_of(head, [[t] for t in TOKENS[:25]], (features, 20))[0]
        assert torch.equal(one, rows_of(head, [TOKENS[:3], TOKENS[3:25]], (features, 20))[0])
    finally:
        native.cpu.set_isa(native.cpu.machine_isa())


def test_a_rolled_back_guess_leaves_no_trace():
    target = build("int8")
    head = head_on(target, dtype="int8")
    features = features_of(target, TOKENS[:40])
    want = rows_of(head, [TOKENS[:40]], (features, 40))[0]
    cache, at = head.new_cache(), 0
    for n in (1, 7, 3, 12, 17):
        cache.given = features, at + n - 1
        got = head.forward(TOKENS[at : at + n], cache, last=n).clone()
        assert torch.equal(got, want[at : at + n])
        at += n
        for token in (9, 9, 8):  # guesses
            head.forward([token], cache, last=1)
        cache.truncate(at)


def test_it_is_a_model_with_a_cut_vocabulary():
    target = build("int8")
    head = head_on(target, dtype="int8")
    assert head.draft_ids == tuple(CUT) and head.feature_size == CONFIG.hidden and head.reads_features
    cache = head.new_cache(10)
    assert cache.nbytes == head.cache_nbytes(10) == Llama.cache_nbytes(head, 10) + 10 * 2 * CONFIG.hidden
    assert head.forward([], cache, last=0).shape == (0, len(CUT))
    with pytest.raises(ValueError, match="takes no trees"):
        head.forward_parts([Part(cache, [1, 2], 2, [-1])])
    with pytest.raises(ValueError, match="last: expected 0 to 1"):
        head.forward([1], cache, last=2)
    with pytest.raises(ValueError, match="room in the cache"):
        head.forward([1] * 11, cache, last=1)
    assert cache.length == 0
    other = head.new_cache(10)
    both = head.forward_parts([Part(cache, [1, 2, 3], 2), Part(other, [4], 1)])
    want = [rows_of(head, [[1, 2, 3]])[0][1:], rows_of(head, [[4]])[0]]
    assert torch.equal(both, torch.cat(want))


def test_the_embedding_is_the_targets():
    """In memory once, and not counted twice."""
    target = build("int8")
    head = head_on(target, dtype="int8")
    own = [head.weights.fc, head.weights.head, head.weights.norm, head.weights.embedding_norm]
    own += head.weights.layers[0].parts().values()
    assert head.nbytes == head.weights_nbytes == sum(part.nbytes for part in own)
    assert head.memory_nbytes > head.nbytes
    head.close()
    assert target.weights.embedding is not None
    assert target.forward([1], target.new_cache(), last=1).shape == (1, CONFIG.vocab)


def test_a_whole_vocabulary():
    target = build("f32")
    head = head_on(target, ids=range(CONFIG.vocab))
    assert head.draft_ids is None and rows_of(head, [[1, 2]])[0].shape == (2, CONFIG.vocab)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_layers_of_other_families(architecture):
    """Biases and norms of heads come with the configuration; only what is read must fit."""
    config = replace(
        CONFIG, architecture=architecture, qkv_bias=architecture == "qwen2", qk_norm=architecture == "qwen3"
    )
    target = build("f32")
    target.config = config
    head = head_on(target)
    got, _ = rows_of(head, [TOKENS[:9]])
    assert torch.equal(got, rows_of(head, [[t] for t in TOKENS[:9]])[0]) and bool(got.isfinite().all())
