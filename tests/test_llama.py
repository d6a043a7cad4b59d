"""The decoder: right against textbook float64, and every row bit-equal to the row computed alone."""

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native
from specloop.errors import ModelError
from specloop.models.config import LlamaConfig
from tiny_llama import CONFIG, build, plain_float64

TOKENS = [int(t) for t in torch.randint(0, CONFIG.vocab, (150,), generator=torch.Generator().manual_seed(3))]


def run(model, pieces, last=None):
    """Feeds the pieces one after another and returns all logits rows."""
    cache, rows = model.new_cache(), []
    for piece in pieces:
        rows.append(model.forward(piece, cache, last=last or len(piece)).clone())
    assert cache.length == sum(len(p) for p in pieces)
    return torch.cat(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_f32_equals_textbook(backend, tied):
    model = build("f32", tied=tied)
    with sk.use_backend(backend):
        got = run(model, [TOKENS[:40]])
    torch.testing.assert_close(got.double(), plain_float64(model, TOKENS[:40]), rtol=1e-4, atol=1e-4)


def test_int8_is_close_to_f32_and_to_the_reference_backend():
    model, exact = build("int8"), plain_float64(build("f32"), TOKENS[:40])
    got = run(model, [TOKENS[:40]])
    error = (got.double() - exact).norm() / exact.norm()
    assert error < 0.03, f"int8 logits are {error:.3f} away from float64"
    with sk.use_backend("reference"):
        same = run(model, [TOKENS[:40]])
    assert (got - same).norm() / same.norm() < 2e-3


@pytest.mark.parametrize("dtype", ["int8", "f32"])
@pytest.mark.parametrize("name", native.ISA_NAMES)
def test_rows_are_bit_equal_alone_and_together(dtype, name):
    if not native.cpu.set_isa(name):
        pytest.skip(f"this machine can't run {name}")
    try:
        model = build(dtype)
        alone = run(model, [[t] for t in TOKENS[:60]])
        for width in (2, 3, 4, 5, 8, 9, 17, 60):
            together = run(model, [TOKENS[i : min(i + width, 60)] for i in range(0, 60, width)])
            assert torch.equal(alone, together), f"rows of a pass of {width} differ from rows alone"
    finally:
        native.cpu.set_isa(native.cpu.machine_isa())


@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_prompts_longer_than_a_chunk(dtype):
    model = build(dtype)
    whole = run(model, [TOKENS])
    assert torch.equal(whole, run(model, [TOKENS[:1], TOKENS[1:140], TOKENS[140:]]))
    for last in (0, 1, 2, 21, 22, 23, 150):  # on both sides of the chunk border at 128
        cache = model.new_cache()
        assert torch.equal(model.forward(TOKENS, cache, last=last), whole[len(whole) - last :])


@pytest.mark.parametrize("dtype", ["int8", "f32"])
def test_rollback_leaves_no_trace(dtype):
    model = build(dtype)
    clean = run(model, [[t] for t in TOKENS[:20]])
    cache = model.new_cache()
    model.forward(TOKENS[:10], cache, last=1)
    model.forward([5, 6, 7, 8, 9], cache, last=5)  # rejected drafts
    cache.truncate(10)
    again = torch.cat([model.forward([t], cache, last=1).clone() for t in TOKENS[10:20]])
    assert torch.equal(again, clean[10:])


def test_threads_do_not_change_bits():
    model, before = build("int8"), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(model, [TOKENS[:50]])
        torch.set_num_threads(2)
        assert torch.equal(one, run(model, [TOKENS[:50]]))
    finally:
        torch.set_num_threads(before)


def test_passes_of_few_rows_are_captured_once():
    model, captured = build("int8"), []
    passes = lambda: [again for rows in model._shapes.values() for again in rows.passes.values()]
    cache = model.new_cache(100)
    for tokens in ([1], [2], [3, 4], [5, 6], TOKENS[:17], TOKENS[:17]):
        model.forward(tokens, cache, last=1)
        captured.append(len(passes()))
    assert captured == [1, 1, 2, 2, 2, 2] and all(passes())
    pages, table = cache.pages, cache.table
    other = model.new_cache()  # has other pages, and the same passes
    del cache
    taken = model.new_cache(100)
    assert taken.pages == pages and taken.table is not table and taken.length == 0 and taken.capacity == 100
    want = run(build("int8"), [[7], [8, 9]])
    for cache in (taken, other):
        got = torch.cat([model.forward(t, cache, last=len(t)).clone() for t in ([7], [8, 9])])
        assert torch.equal(got, want) and len(passes()) == 3


def test_to_keeps_a_tied_head_tied():
    model = build("int8")
    assert model.to("cpu") is model
    moved = model.to("meta")
    assert (
        moved.weights.embedding is moved.weights.head
        and moved.weights.layers[0].qkv.codes.is_meta
        and moved._buffers.hidden.is_meta
    )


def test_bad_calls():
    model = build("int8", context=64)
    cache = model.new_cache()
    with pytest.raises(ValueError, match="last: expected 0 to 2"):
        model.forward([1, 2], cache, last=3)
    with pytest.raises(ValueError, match="last"):
        model.forward([], cache, last=1)
    with pytest.raises(ValueError, match="room in the cache"):
        model.forward(list(range(65)), cache, last=1)
    for bad in (-1, CONFIG.vocab):
        with pytest.raises(ValueError, match=r"ids in \[0, 203\)"):
            model.forward([0, bad], cache, last=1)
    assert cache.length == 0
    with pytest.raises(ValueError, match="length"):
        cache.truncate(1)


GOOD = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 100,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture: expected llama, qwen2 or qwen3, got 'mamba'"),
        ({"general.architecture": None}, "general.architecture"),
        ({"llama.block_count": "two"}, "llama.block_count: expected a number"),
        ({"llama.block_count": 2.5}, "llama.block_count: expected an integer"),
        ({"llama.block_count": 0}, "layers of at least 1"),
        ({"llama.context_length": 2**31}, "context of at least 1 and at most 2147483647, got 2147483648"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e300}, r"rms_eps from 0 to 1, got 1e\+300"),
        ({"llama.attention.layer_norm_rms_epsilon": -1e-9}, "rms_eps from 0 to 1, got -1e-09"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_eps from 0 to 1, got nan"),
        ({"llama.rope.freq_base": 1e300}, r"rope_theta from 1 to 1e\+15, got 1e\+300"),
        ({"llama.rope.freq_base": 0.5}, "rope_theta from 1 to"),
        ({"llama.attention.head_count": 5}, "divisor of 64"),
        ({"llama.attention.head_count": 0}, "divisor of 64"),
        ({"llama.attention.head_count_kv": 3}, "multiple of kv_heads"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.original_context_length"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -1.0}, "factor: expected a positive"),
    ],
)
def test_metadata_that_can_not_be_served(change, message):
    assert LlamaConfig.from_gguf(GOOD, 10).head_dim == 16
    with pytest.raises(ModelError, match=message):
        LlamaConfig.from_gguf({**GOOD, **change}, 10)
