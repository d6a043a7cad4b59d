"""rope_write_kv_int8 and rows_int8 interpreted: the bits of the reference."""

import pytest
import torch

import specdec_kernels as sk
from attention_cases import FLOATS, LAYOUTS, make_cache, tables
from guard import guarded
from int8_backends import randn, same
from specdec_kernels import registry
from specdec_kernels.triton_kernels import rope
from verify_cases import running

CACHES = (torch.int8, *FLOATS)
SIZES = ((3, 64, 64), (2, 46, 80), (1, 2, 1), (9, 128, 96), (2, 192, 128))  # heads, D, Dv
SLOTS = [3, -1, 0, 3, 23, 7, 0, -1, 5]


def written(backend, x, cache, layout, size, slots, q_heads=4, **options):
    heads, dim, values = size
    tokens, g = len(slots), torch.Generator().manual_seed(heads)
    counts = (q_heads, dim), (heads, dim), (heads, values)
    widths = [n * d for n, d in counts]
    row = torch.randn(tokens, sum(widths), generator=g).to(x)  # q, k and v of a token lie side by side
    views = row.split(widths, 1)
    q, k, v = (view.unflatten(1, count) for view, count in zip(views, counts, strict=True))
    caches = make_cache(6, 4, heads, dim, cache, values=values, layout=layout)
    with running(backend):
        slots = torch.as_tensor(slots)
        sk.rope_write_kv_int8(k, v, *tables(tokens, dim), *caches, slots, q=q if q_heads else None, **options)
    return [row, *(part for part in caches if part is not None)]


def agrees(*args, **options):
    same(written("triton", *args, **options), written("reference", *args, **options))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_head_size(size):
    agrees(torch.bfloat16, torch.int8, "block", size, SLOTS)


@pytest.mark.parametrize("cache", CACHES)
def test_every_dtype(cache):
    for x in FLOATS:
        agrees(x, cache, "block", (3, 6, 5), SLOTS[2:7])


@pytest.mark.parametrize("dim", [2, 4, 64, 256])
def test_heads_times_the_hadamard_matrix(dim):
    for x, cache in zip(FLOATS, (torch.int8, torch.float32, torch.int8), strict=True):
        agrees(x, cache, "block", (2, dim, 5), SLOTS[4:7], hadamard=True)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_any_layout_of_the_cache(layout):
    for cache in (torch.int8, torch.bfloat16):
        agrees(torch.float32, cache, layout, (3, 46, 80), SLOTS[2:6])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("x", FLOATS)
def test_every_combination(x, cache, layout):
    for size, q_heads in zip(SIZES, (1, 9, 0, 2, 4), strict=True):
        agrees(x, cache, layout, size, SLOTS, q_heads=q_heads)


def random_slots(tokens):
    return torch.randint(-1, 10, (tokens,), generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 24])
def test_of_equal_slots_the_last_token_stays(tokens, monkeypatch):
    monkeypatch.setattr(rope, "SCAN", 8)  # from 9 tokens on in launches of their own
    agrees(torch.float32, torch.int8, "block", (1, 4, 4), random_slots(tokens), q_heads=0)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [256, 257, 600])
def test_of_equal_slots_the_last_of_many_tokens_stays(tokens):
    agrees(torch.float32, torch.int8, "block", (1, 4, 4), random_slots(tokens), q_heads=0)


@pytest.mark.parametrize("scan", [4, 8])
def test_a_bad_slot_on_a_device_is_skipped(scan, monkeypatch):
    monkeypatch.setattr(rope, "SCAN", scan)
    slots = [24, -2, 2**62, -(2**63), 5, 2**31, 24, 5]
    k, v = randn(len(slots), 2, 4), randn(len(slots), 2, 4, seed=1)
    got, want = make_cache(6, 4, 2, 4, torch.int8), make_cache(6, 4, 2, 4, torch.int8)
    with running("triton"):
        registry.call("rope_write_kv_int8", "cpu", None, k, v, *tables(8, 4), *got, torch.tensor(slots), False)
    good = torch.tensor([slot if slot == 5 else -1 for slot in slots])
    with running("reference"):
        sk.rope_write_kv_int8(k, v, *tables(8, 4), *want, good)
    same(got, want)


def test_hard_values_in_a_head():
    k = randn(4, 2, 8)
    k[0, 1, 3], k[1, 0, 7], k[2], k[3, 0] = torch.nan, torch.inf, 0, 1e-40
    results = []
    for backend in ("triton", "reference"):
        caches = make_cache(6, 4, 2, 8, torch.int8)
        with running(backend):
            sk.rope_write_kv_int8(k, k, *tables(4, 8), *caches, torch.arange(4))
        results.append(caches)
    same(*results)


# ---- rows of packed weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, k, group, rotate",
    [(33, 64, None, False), (48, 576, 64, True), (17, 46, 23, False), (16, 5, 5, False), (40, 192, 2, True),
     (40, 12, 1, True), (16, 3000, None, False), (16, 4096, 2048, True)],
)  # fmt: skip
def test_rows_of_a_packed_matrix(n, k, group, rotate):
    weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
    ids = torch.tensor([0, n - 1, n // 2, 0, 15])
    frame = guarded((5, k), torch.float32, row_stride=k + 3)
    with running("reference"):
        want = weight.rows(ids)
    with running("triton"):
        assert torch.equal(weight.rows(ids), want)
        assert torch.equal(weight.rows(ids, out=frame), want)
        assert weight.rows(ids[:0]).shape == (0, k)


def test_a_bad_id_on_a_device_gives_nan():
    weight = sk.pack_int8(randn(20, 64), group_size=32, rotate=True)
    ids = torch.tensor([3, 20, -1, 2**62, -(2**63), 19])
    out = torch.zeros(6, 64)
    with running("triton"):
        registry.call("rows_int8", "cpu", ids, weight, out)
    assert out[1:5].isnan().all() and torch.equal(out[[0, 5]], weight.dequantize()[[3, 19]])


# ---- a packed matrix as floats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, k, group, rotate",
    [(33, 64, None, False), (20, 192, 64, True), (17, 46, 23, False), (3, 8, 2, True), (2, 12, 1, True),
     (17, 200, None, False), (3, 2048, 2048, True)],
)  # fmt: skip
def test_a_packed_matrix_expands(n, k, group, rotate):
    weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
    for dtype in FLOATS:
        want = weight.dequantize().to(dtype)
        frame = guarded((n, k), dtype, row_stride=k + 3)
        with running("triton"):
            same([sk.expand(weight, dtype=dtype)], [want])
            assert torch.equal(sk.expand(weight, dtype=dtype, out=frame), want)
