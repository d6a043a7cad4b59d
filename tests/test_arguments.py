"""What every operation asks of its tensors: values as they lie in memory, outputs of their own, no stride if empty."""

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from attention_cases import make_cache, tables
from int8_backends import randn

WEIGHT = sk.pack_int8(randn(16, 32), group_size=16)
NORM = torch.ones(32)


def attention(tokens=2):
    """(k, v, cos, sin, caches, slots), q and what attend_int8 takes after the caches."""
    k, v, q = (randn(tokens, 1, 16, seed=i) for i in range(3))
    pages, lengths = torch.tensor([[0]], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    return (k, v, *tables(tokens, 16)), make_cache(1, 4, 1, 16, torch.int8), torch.arange(tokens), q, (pages, lengths)


CALLS = {
    "quantize_int8": lambda x: sk.quantize_int8(x),
    "rms_norm": lambda x: sk.rms_norm(x, NORM, 1e-5),
    "layer_norm": lambda x: sk.layer_norm(x, NORM, 1e-5, bias=x[0]),
    "silu_mul": lambda x: sk.silu_mul(x),
    "gelu_mul": lambda x: sk.gelu_mul(x),
    "linear_int8": lambda x: sk.linear_int8(x, WEIGHT),
    "bias": lambda x: sk.linear_int8(randn(1, 32), WEIGHT, x[0, :16]),
    "pack_int8": lambda x: sk.pack_int8(x),
    "linear_f32": lambda x: sk.linear_f32(x, randn(4, 32)),
    "rms_norm_linear": lambda x: sk.rms_norm_linear(x, NORM, 1e-5, WEIGHT),
    "out": lambda x: sk.silu_mul(randn(4, 64), out=x),
    "verify": lambda x: sk.sample(x, temperature=0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_view_that_only_promises_its_signs_is_refused(name):
    """torch negates such a view when it is read; a kernel would read the other sign."""
    with pytest.raises(ValueError, match="expected a tensor with its signs in memory, got a negated view"):
        CALLS[name](torch._neg_view(randn(4, 32)))


def test_empty_tensors_of_numpy():
    """Their strides are 0, and nothing is read."""
    empty = torch.from_numpy(np.empty((0, 32), np.float32))
    assert empty.stride() == (0, 0)
    codes, scale = torch.from_numpy(np.empty((0, 32), np.int8)), torch.from_numpy(np.empty((0, 2), np.float32))
    assert sk.linear_int8(empty, WEIGHT).shape == (0, 16)
    assert sk.linear_int8((codes, scale), WEIGHT).shape == (0, 16)
    assert sk.linear_f32(empty, randn(3, 32)).shape == (0, 3)
    assert sk.pack_int8(empty).shape == sk.pack_int8((codes, scale)).shape == (0, 32)
    assert sk.quantize_int8(empty)[0].shape == sk.rms_norm(empty, NORM, 1e-5).shape == (0, 32)
    assert sk.rms_norm_linear(empty, NORM, 1e-5, WEIGHT).shape == (0, 16)


def overlaps(name, other):
    return pytest.raises(ValueError, match=f"{name}: expected memory of its own, got a tensor that overlaps {other}")


def test_outputs_of_products():
    x, buffer = randn(2, 32), randn(2, 16)
    with overlaps("out", "bias"):
        sk.linear_int8(x, WEIGHT, buffer[1], out=buffer)
    q, scale = sk.quantize_int8(x, group_size=16)
    shared = torch.zeros(2, 16)
    shared[:, :2] = scale
    with overlaps("out", "scale"):
        sk.linear_int8((q, shared[:, :2]), WEIGHT, out=shared)
    own = sk.pack_int8(randn(16, 32), group_size=16)
    before = own.scale.clone()
    for out in (own.scale.view(-1, 16)[:2], own.codes.view(-1).view(torch.float32)[:32].view(2, 16)):
        with overlaps("out", "the weight"):
            sk.linear_int8(x, own, out=out)
        with overlaps("out", "weight"):
            sk.rms_norm_linear(x, NORM, 1e-5, own, out=out)
    assert torch.equal(own.scale, before)
    plain = randn(32, 32)
    with overlaps("out", "weight"):
        sk.linear_f32(x, plain, out=plain[:2])
    with overlaps("out", "weight"):
        sk.rms_norm_linear(x, NORM, 1e-5, plain, out=plain[:2])
    with overlaps("out", "down"):
        sk.gated_mlp(x, NORM, 1e-5, randn(64, 32), plain, out=plain[4:6])


def test_outputs_of_attention():
    new, cache, slots, q, rest = attention()
    floats = randn(1, 4, 1, 16), None, randn(1, 4, 1, 16, seed=1), None
    with overlaps("out", "v_cache"):
        sk.attend_int8(q[None], *floats, *rest, out=floats[2].view(-1)[:32].view(1, 2, 1, 16))
    with overlaps("out", "k_scale"):
        scales = torch.ones(32)
        views = cache[0], scales[:4].view(1, 4, 1), cache[2], cache[3]
        sk.attend_int8(q[None], *views, *rest, out=scales.view(1, 2, 1, 16))
    with overlaps("q", "k"):
        sk.rope_write_kv_int8(*new, *cache, slots, q=new[0])
    with overlaps("v_cache", "k_cache"):
        sk.rope_write_kv_int8(*new, floats[0], None, floats[0], None, slots)
    with overlaps("k_cache", "v"):
        sk.rope_write_kv_int8(new[0], floats[0][0, :2], *new[2:], *floats, slots)
    fused = torch.randn(2, 48).split(16, 1)  # q, k and v of a row side by side share nothing
    q, k, v = (part.unflatten(1, (1, 16)) for part in fused)
    sk.rope_write_kv_int8(k, v, *new[2:], *cache, slots, q=q)


def test_numbers_beyond_floats_and_indices_beyond_64_bits():
    with pytest.raises(ValueError, match="eps: expected a finite number >= 0"):
        sk.rms_norm(randn(1, 32), NORM, 10**400)
    with pytest.raises(ValueError, match=r"stochastic_offset: expected an index in \[0, 2\^64\)"):
        sk.quantize_int8(randn(1, 32), stochastic_seed=1, stochastic_offset=2**70)
    q, scale = sk.quantize_int8(randn(2, 32), group_size=16)
    for group in (16.0, "a"):
        with pytest.raises(TypeError, match="group_size: expected an integer, got"):
            sk.pack_int8((q, scale), group_size=group)
    with pytest.raises(TypeError, match="state: expected a dict as state_dict"):
        sk.Int8Weight.from_state_dict(None)


def test_large_pages():
    memory = sk.LargePages()
    with pytest.raises(ValueError, match=r"shape: expected sizes >= 0, got \[4, -1\]"):
        memory.empty((4, -1), torch.float32)
    with pytest.raises(ValueError, match="memory: expected None for a weight on meta, got LargePages"):
        sk.Int8Weight.empty(16, 32, device="meta", memory=memory)
