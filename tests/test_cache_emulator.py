"""The rotary write to a cache and the rows of a packed matrix: the GPU kernels on the CPU emulator, equal to the
reference bit for bit."""

import itertools

import pytest
import torch

import emulator
import specdec_kernels as sk
from attention_cases import FLOATS, LAYOUTS, make_cache, tables
from guard import guarded, guarded_like
from int8_backends import on_reference, randn, same

CONFIGURATIONS = list(itertools.product((32, 64), emulator.ORDERS))
SIZES = ((2, 2), (46, 46), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (64, 24), (6, 17))


@pytest.fixture(params=CONFIGURATIONS, ids=lambda c: f"wave{c[0]}-{c[1]}")
def emulated(request):
    with emulator.serving(*request.param):
        yield


@pytest.fixture
def one():
    with emulator.serving(32, "random"):
        yield


def write(
    cache_dtype, *, slots, x=torch.float32, heads=3, dim=64, values=None, page=4, pages=3, layout="block", q=True
):
    """What a write leaves in q and in the cache, on the emulator and on the reference."""
    tokens, values = len(slots), values or dim
    parts = randn(tokens, 5 * heads * dim + heads * values + 3).to(x)[:, 3:]
    parts = parts.split([4 * heads * dim, heads * dim, heads * values], 1)
    queries, k, v = (part.unflatten(1, (n, -1)) for part, n in zip(parts, (4 * heads, heads, heads), strict=True))
    results = []
    for run in (lambda f, *a, **o: f(*a, **o), on_reference):
        cache = make_cache(pages, page, heads, dim, cache_dtype, values=values, layout=layout)
        rotated = queries.clone() if q else None
        slots_there = torch.tensor(slots, dtype=torch.int64)
        run(sk.rope_write_kv_int8, k, v, *tables(tokens, dim), *cache, slots_there, q=rotated)
        results.append([t for t in (rotated, *cache) if t is not None])
    return results


@pytest.mark.parametrize("cache", [torch.int8, torch.float16], ids=str)
def test_slots(emulated, cache):
    """Skipped tokens, a slot that comes three times (the last token has it), no token at all."""
    for slots in ([5, -1, 7, 5, 0, -1, 5, 11], [3, 3], [-1], []):
        same(*write(cache, slots=slots, dim=46))


@pytest.mark.parametrize("dims", SIZES, ids=str)
def test_head_sizes(one, dims):
    for cache in (torch.int8, torch.float32):
        same(*write(cache, slots=[4, 0, 9], dim=dims[0], values=dims[1]))


@pytest.mark.parametrize("x", FLOATS, ids=str)
def test_dtypes_and_strides(one, x):
    for cache, layout in itertools.product((torch.int8, *FLOATS), LAYOUTS):
        same(*write(cache, slots=[1, 8, 3], x=x, dim=24, values=10, layout=layout))
    same(*write(torch.int8, slots=[1, 8, 3], x=x, q=False))


def test_more_tokens_than_a_block_has_threads(one):
    """The token that has a slot at last is found beyond the first round of the search."""
    slots = [i % 290 for i in range(300)]
    same(*write(torch.int8, slots=slots, heads=1, dim=4, page=8, pages=40))


def test_slots_outside_the_cache_are_skipped(one):
    """Behind the public function's back, which would refuse them on a CPU. Guard pages around the cache."""
    k, v, angles = randn(4, 1, 8), randn(4, 1, 8, seed=1), tables(4, 8)
    cache = guarded((2, 2, 1, 8), torch.int8), guarded((2, 2, 1), torch.float32)
    cache += guarded((2, 2, 1, 8), torch.int8), guarded((2, 2, 1), torch.float32)
    slots = torch.tensor([4, 2, -5, 2**62])
    emulator.operations()["rope_write_kv_int8"](None, k, v, *angles, *cache, slots, False)
    codes, scale = sk.quantize_int8(v[1])
    assert torch.equal(cache[2][1, 0], codes) and torch.equal(cache[3][1, 0], scale[:, 0])
    for part in cache:
        assert part.flatten(0, 1)[[0, 1, 3]].count_nonzero() == 0


def test_hard_heads(one):
    """A zero head, NaN, Inf and a tiny value: scale 0, NaN, Inf and 0, codes 0, other heads untouched."""
    v = randn(1, 5, 8)
    v[0, 0], v[0, 1, 3], v[0, 2, 7], v[0, 3] = 0, torch.nan, torch.inf, 1e-40
    cache = make_cache(1, 1, 5, 8, torch.int8)
    sk.rope_write_kv_int8(v, v, *tables(1, 8), *cache, torch.zeros(1, dtype=torch.int64))
    same((cache[2][0, 0], cache[3][0, 0, :, None]), sk.quantize_int8(v[0]))
    assert cache[3][0, 0, :4].tolist()[::3] == [0, 0] and not cache[2][0, 0, :4].any()


# ---- rows of a packed matrix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "group", "rotate"),
    [
        (1, 1, 1, False),
        (37, 46, 23, False),
        (16, 13, None, False),
        (40, 576, 64, True),
        (5, 4096, 2048, True),
        (3, 6, 2, True),
        (17, 8, 1, True),
    ],
)
def test_rows(emulated, n, k, group, rotate):
    weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
    ids = torch.tensor([n - 1, 0, n // 2, 0])
    got = weight.rows(ids)
    same([got], [on_reference(weight.rows, ids)])
    wide = torch.full((4, k + 3), 7.0)
    weight.rows(ids, out=wide[:, 2:-1])
    assert torch.equal(wide[:, 2:-1], got) and (wide[:, [0, 1, -1]] == 7).all()
    assert weight.rows(ids[:0]).shape == (0, k)


def test_ids_outside_give_nan(one):
    """Behind the public function's back, which would refuse them on a CPU. Guard pages around codes and scales."""
    for rotate in (False, True):
        weight = sk.pack_int8(randn(16, 8), group_size=8, rotate=rotate)
        weight = sk.Int8Weight(16, 8, 8, guarded_like(weight.codes), guarded_like(weight.scale), rotate)
        out = torch.zeros(4, 8)
        emulator.operations()["rows_int8"](torch.tensor([-1, 15, 16, 2**62]), weight, out)
        assert out[[0, 2, 3]].isnan().all() and torch.equal(out[1], on_reference(weight.rows, torch.tensor([15]))[0])


# ---- a packed matrix as floats ---------------------------------------------------------------------------------------


# Groups as long as a lane's values, as eight lanes', as the block's memory; odd ones; units beyond a block's tile.
@pytest.mark.parametrize(
    ("n", "k", "group", "rotate"),
    [
        (1, 1, 1, False),
        (37, 46, 23, False),
        (16, 13, None, False),
        (17, 700, None, False),
        (5, 4096, 4, False),
        (17, 8, 1, True),
        (3, 6, 2, True),
        (20, 600, 8, True),
        (33, 96, 32, True),
        (40, 576, 64, True),
        (18, 256, 128, True),
        (5, 8192, 4096, True),
    ],
)
def test_expand(emulated, n, k, group, rotate):
    weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
    for dtype in FLOATS:
        want = weight.dequantize().to(dtype)
        same([sk.expand(weight, dtype=dtype)], [want])
        wide = torch.full((n, k + 3), 7.0).to(dtype)
        sk.expand(weight, dtype=dtype, out=wide[:, 2:-1])
        assert torch.equal(wide[:, 2:-1], want) and (wide[:, [0, 1, -1]] == 7).all()


@pytest.mark.parametrize("at", ["start", "end"])
def test_expand_touches_nothing_beside_its_tensors(one, at):
    for n, k, group, rotate in ((37, 46, 23, False), (35, 192, 64, True), (19, 256, 256, True), (3, 10, 5, False)):
        weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
        fenced = [guarded_like(part, at=at) for part in (weight.codes, weight.scale)]
        fenced = sk.Int8Weight(n, k, group, *fenced, rotate)
        for dtype in FLOATS:
            out = guarded((n, k), dtype, at=at)
            assert torch.equal(sk.expand(fenced, dtype=dtype, out=out), weight.dequantize().to(dtype))


def test_expand_of_hard_scales(one):
    """Overflow to Inf, NaN, subnormal numbers, signed zeros: the bits of torch's own rounding."""
    q = torch.randint(-128, 128, (16, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([torch.inf, torch.nan, 1e38, 600.0, 1e-7, 1e-39, 0.0, -1.0])
    weight = sk.pack_int8((q, scale.repeat(2)[:, None].expand(16, 8).contiguous()))
    for dtype in FLOATS:
        same([sk.expand(weight, dtype=dtype)], [weight.dequantize().to(dtype)])


def test_long_rotated_groups_are_left_to_others(one):
    weight = sk.pack_int8(randn(1, 8192), rotate=True)
    with pytest.raises(sk.BackendUnavailable, match="rotates groups of at most 4096 values, got 8192"):
        sk.expand(weight)
