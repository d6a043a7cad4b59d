"""attend_int8 of the GPU backends for float caches: torch's attention on CPU tensors against the reference."""

import pytest
import torch

import specdec_kernels as sk
from attention_cases import FLOATS, LAYOUTS, Filled
from specdec_kernels import registry
from specdec_kernels.gpu.attention import attend_int8


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """The public function runs CPU tensors on it."""
    key = registry._key("attend_int8", "cpu")
    monkeypatch.setitem(registry._chosen, key, (("sdpa", attend_int8),))


def reference(q, cache, *arguments, **options):
    with sk.use_backend("reference"):
        return sk.attend_int8(q.double().float(), *cache, *arguments, **options)


def close(got, want, dtype):
    limit = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.float(), want.float(), rtol=limit, atol=limit, equal_nan=True)


def two_requests(dtype, x, **options):
    """Queries, a cache, the table of two requests of different length, their lengths."""
    filled = Filled(dtype, tokens=70, x=x, **options)
    table = torch.cat([filled.table, filled.table.flip(1)])
    lengths = torch.tensor([70, 37], dtype=torch.int32)
    q = torch.randn(2, 5, *filled.q.shape[1:], generator=torch.Generator().manual_seed(1)).to(x)
    return q, filled.cache, table, lengths


@pytest.mark.parametrize("cache", FLOATS, ids=str)
@pytest.mark.parametrize("x", FLOATS, ids=str)
def test_equals_the_reference(x, cache):
    q, caches, table, lengths = two_requests(cache, x)
    with sk.use_backend("reference"):
        want = sk.attend_int8(q, *caches, table, lengths)
    got = sk.attend_int8(q, *caches, table, lengths)
    assert got.dtype == x
    close(got, want, min((x, cache), key=lambda d: -torch.finfo(d).eps))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(1, 1, 4, 4), (3, 9, 46, 46), (2, 2, 80, 24), (4, 8, 2, 130)])
def test_head_sizes_and_strides(layout, dims):
    heads, q_heads, dim, values = dims
    sizes = {"heads": heads, "q_heads": q_heads, "dim": dim, "values": values, "layout": layout}
    q, caches, table, lengths = two_requests(torch.float32, torch.float32, **sizes)
    for scale in (None, 0.3):
        close(
            sk.attend_int8(q, *caches, table, lengths, scale=scale),
            reference(q, caches, table, lengths, scale=scale),
            torch.float32,
        )


def test_a_tree_mask(served):
    q, caches, table, lengths = two_requests(torch.float32, torch.float32)
    mask = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    close(
        sk.attend_int8(q, *caches, table, lengths, mask=mask),
        reference(q, caches, table, lengths, mask=mask),
        torch.float32,
    )
    lengths[1] = 5  # no older keys: a row without a mark sees nothing
    mask[1, 2] = False
    got = sk.attend_int8(q, *caches, table, lengths, mask=mask)
    assert got[1, 2].isnan().all() and not got[1, [0, 1, 3, 4]][mask[1].any(1)[[0, 1, 3, 4]]].isnan().any()
    close(got[:1], reference(q[:1], caches, table[:1], lengths[:1], mask=mask[:1]), torch.float32)


def test_what_lies_behind_the_keys_does_not_matter():
    q, caches, table, lengths = two_requests(torch.float32, torch.float32)
    want = sk.attend_int8(q[:1], *caches, table[:1], lengths[1:])
    rest = [(int(table[0, i // 16]), i % 16) for i in range(37, 80)]
    for cache in (caches[0], caches[2]):
        for page, slot in rest:
            cache[page, slot] = torch.nan
    table[0, 3:] = -7  # pages that the request does not use
    assert torch.equal(sk.attend_int8(q[:1], *caches, table[:1], lengths[1:]), want)
    assert not want.isnan().any()


@pytest.mark.parametrize("bad", ["short", "negative", "long", "page", "negative page"])
def test_bad_values_cost_only_their_request(bad):
    q, caches, table, lengths = two_requests(torch.float32, torch.float32)
    want = sk.attend_int8(q, *caches, table, lengths)
    if "page" in bad:
        table[1, 1] = -1 if "negative" in bad else caches[0].shape[0]
    else:
        lengths[1] = {"short": 4, "negative": -(2**31), "long": table.shape[1] * 16 + 1}[bad]
    got = sk.attend_int8(q, *caches, table, lengths)
    assert torch.equal(got[0], want[0]) and got[1].isnan().all()


def test_int8_caches_are_for_others():
    filled = Filled(torch.int8, tokens=20)
    with pytest.raises(sk.BackendUnavailable, match="serves float caches only, got int8"):
        sk.attend_int8(filled.q[None, -2:], *filled.cache, filled.table, torch.tensor([20], dtype=torch.int32))


def test_nothing_to_do():
    q, caches, table, lengths = two_requests(torch.float32, torch.float32)
    assert sk.attend_int8(q[:0], *caches, table[:0], lengths[:0]).shape[0] == 0
    assert sk.attend_int8(q[:, :0], *caches, table, lengths).shape[1] == 0
