"""rope_write_kv_int8 with ``hadamard``: every backend's bits, the products that must not change, what it is for."""

import pytest
import torch

import specdec_kernels as sk
from attention_cases import make_cache, tables
from int8_backends import OTHERS, each_dtype, randn, running, same
from specdec_kernels.attention import hadamard_factors
from verify_cases import EMULATED

ROTATING = [name for name in OTHERS if name != EMULATED]  # the CUDA and HIP kernels leave it to others


def written(dim, dtype=torch.float32, cache_dtype=torch.int8, hadamard=True, tokens=7):
    q, k, v = (randn(tokens, n, dim, dtype=dtype, seed=n) for n in (4, 2, 3))
    cache = make_cache(3, 4, 2, dim, cache_dtype)
    sk.rope_write_kv_int8(k, v[:, :2], *tables(tokens, dim), *cache, torch.arange(tokens), q=q, hadamard=hadamard)
    return [t for t in (q, *cache) if t is not None]


@each_dtype
@pytest.mark.parametrize("name", ROTATING)
def test_equals_the_reference(name, dtype):
    for dim in (2, 4, 16, 64, 128, 256):
        for cache_dtype in (torch.int8, torch.float32):
            results = []
            for place in ("reference", name):
                with running(place):
                    results.append(written(dim, dtype, cache_dtype))
            same(*results)


def test_no_product_of_a_query_and_a_key_changes():
    for dim in (2, 64, 128):
        q, k, _ = written(dim, cache_dtype=torch.float32)
        plain_q, plain_k, _ = written(dim, cache_dtype=torch.float32, hadamard=False)
        got, want = (torch.einsum("thd,psgd->thpsg", a.double(), b.double()) for a, b in ((q, k), (plain_q, plain_k)))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert (q.norm() / plain_q.norm()).log2().abs() <= 0.51  # neither side grows with the dimension


def test_factors_are_powers_of_two():
    for steps in range(1, 13):
        of_q, of_k = hadamard_factors(2**steps)
        assert of_q * of_k * 2**steps == 1 and of_q in (of_k, 2 * of_k)


def test_a_large_channel_costs_the_others_less():
    """One channel of 100 among values of size 1: alone it sets the step to 0.8 and most others to code 0 or 1."""
    k = randn(1, 1, 64)
    k[0, 0, 5] = 100.0
    angles = torch.ones(1, 32), torch.zeros(1, 32)
    errors = []
    for hadamard in (False, True):
        cache = make_cache(1, 1, 1, 64, torch.int8)
        q = torch.eye(64)[None]  # every channel, read back as a product
        sk.rope_write_kv_int8(k, k, *angles, *cache, torch.tensor([0]), q=q, hadamard=hadamard)
        got = q[0] @ (cache[0][0, 0, 0] * cache[1][0, 0, 0])
        errors.append((got - k[0, 0]).norm().item())
    assert errors[1] < 0.5 * errors[0]


def test_only_powers_of_two():
    x, cache = randn(1, 1, 46), make_cache(1, 1, 1, 46, torch.int8)
    with pytest.raises(ValueError, match="hadamard: expected a head dimension that is a power of two, got 46"):
        sk.rope_write_kv_int8(x, x, *tables(1, 46), *cache, torch.tensor([0]), hadamard=True)


def test_what_leaves_it_to_others_says_so():
    with running(EMULATED), pytest.raises(sk.BackendUnavailable, match=r"rope_write_kv_int8: .*hadamard=True"):
        written(16)
