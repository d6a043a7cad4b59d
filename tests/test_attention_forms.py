"""Every form of a call: dtypes of rows and caches, head sizes, D unlike Dv, strides of the caches."""

import pytest
import torch

import specdec_kernels as sk
from attention_cases import FLOATS, LAYOUTS, Filled, plain

CACHES = (torch.int8, *FLOATS)
EPS = {torch.int8: 1 / 127, torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SIZES = ((2, 2), (46, 46), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (64, 24), (6, 17), (256, 256))


def name(value):
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("cache", CACHES, ids=name)
@pytest.mark.parametrize("x", FLOATS, ids=name)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_is_plain_attention(backend, x, cache):
    """Against float64 over the values before they were rounded for the cache: off by what the two dtypes lose."""
    with sk.use_backend(backend):
        case = Filled(cache, x=x)
        got = case.attend(5)
    assert got.dtype is x and got.shape == (1, 5, 9, 64)
    error = (got.double() - plain(case, 5)).abs().max()
    assert error < 2 * (EPS[cache] + EPS[x]), f"off by {error:.1e}"


@pytest.mark.parametrize("dims", SIZES, ids=str)
@pytest.mark.parametrize("cache", [torch.int8, torch.float32], ids=name)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_head_sizes(backend, cache, dims):
    with sk.use_backend(backend):
        case = Filled(cache, dim=dims[0], values=dims[1], tokens=37)
        got = case.attend(3)
    assert got.shape == (1, 3, 9, dims[1])
    error = (got.double() - plain(case, 3)).abs().max()
    assert error < 4 * EPS[cache], f"off by {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("cache", CACHES, ids=name)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_strides_of_the_cache_change_no_bit(backend, cache, layout):
    """Block-major, head-major, page-last, and rows inside a larger tensor, whose other values stay as they are."""
    with sk.use_backend(backend):
        want, got = Filled(cache, values=40), Filled(cache, values=40, layout=layout)
        for a, b in zip(want.cache, got.cache, strict=True):
            assert a is None or (torch.equal(a, b) and not b.is_contiguous())
        assert torch.equal(want.attend(5), got.attend(5))
    if layout == "gap":
        for tensor in got.cache:
            if tensor is not None:
                whole, used = tensor._base.double(), tensor.double()
                assert whole.abs().sum() == used.abs().sum(), "something was written between the rows"
