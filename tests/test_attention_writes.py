"""rope_write_kv_int8: what the codes must be, which slots are written, and that nothing else changes."""

import pytest
import torch

import specdec_kernels as sk
from attention_cases import FLOATS, LAYOUTS, make_cache, strided, tables
from guard import guarded, guarded_like
from int8_backends import BACKENDS, OTHERS, each_dtype, on_reference, randn, running, same

NAN, INF = float("nan"), float("inf")
CACHES = (torch.int8, *FLOATS)
each_cache = pytest.mark.parametrize("cache_dtype", CACHES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(params=BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


def write_values(heads, dtype=torch.float32, keys=None):
    """Writes one token, its values given as a list of heads (its keys, too, turned by no angle); returns the cache."""
    v = torch.tensor([heads], dtype=dtype)
    k = v if keys is None else torch.tensor([keys], dtype=dtype)
    cache = make_cache(1, 1, v.shape[1], k.shape[2], torch.int8, values=v.shape[2])
    half = k.shape[2] // 2
    sk.rope_write_kv_int8(k, v, torch.ones(1, half), torch.zeros(1, half), *cache, torch.tensor([0]))
    return cache


def test_codes_are_rounded_and_not_cut(backend):
    """A store that truncates gives 0, 0, 1, -1, 99, an error that a loose comparison of values does not see."""
    k, k_scale, v, v_scale = write_values([[127.0, 0.9, -0.9, 1.6, -1.6, 99.7]])
    assert k.flatten().tolist() == v.flatten().tolist() == [127, 1, -1, 2, -2, 100]
    assert k_scale.item() == v_scale.item() == 1.0


@each_dtype
def test_ties_go_to_the_even_code(backend, dtype):
    x = [[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]
    k, _, v, _ = write_values(x, dtype)
    assert k.flatten().tolist() == v.flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_keys_and_values_have_scales_of_their_own(backend):
    """One scale for both would leave values of 0.5 next to keys of 20 with steps of 0.157."""
    v = randn(1, 64).clamp(-0.5, 0.5)
    _, k_scale, codes, v_scale = write_values([v[0].tolist()], keys=[[20.0] + [0.0] * 63])
    assert k_scale.item() == torch.tensor(20.0).div(127).item()
    assert ((codes * v_scale[..., None]).flatten() - v[0]).abs().max() <= 0.002


def test_special_heads(backend):
    """Zero and subnormal heads: scale 0; NaN: scale NaN; Inf: scale inf; all their codes 0. Others stay as they are."""
    heads = [[0.0, -0.0], [1e-40, 0.0], [NAN, 5.0], [INF, 5.0], [-INF, INF], [3.0, 3.0], [3.4028235e38, -1.0]]
    _, _, codes, scale = write_values(heads, keys=heads)
    assert codes[0, 0].tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [127, 127], [127, 0]]
    finite = torch.tensor([3.0, 3.4028235e38]).div(127).tolist()
    want = torch.tensor([0.0, 0.0, NAN, INF, INF, *finite])
    torch.testing.assert_close(scale.flatten(), want, rtol=0, atol=0, equal_nan=True)


@each_dtype
def test_codes_are_those_of_quantize_int8(backend, dtype):
    """Fused equals unfused, bit for bit: the rotated keys, rounded to their dtype, and the values."""
    k, v, (cos, sin) = randn(9, 3, 80, dtype=dtype), randn(9, 3, 46, dtype=dtype, seed=1), tables(9, 80)
    cache = make_cache(3, 3, 3, 80, torch.int8, values=46)
    sk.rope_write_kv_int8(k, v, cos, sin, *cache, torch.arange(9))
    a, b = k.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    rotated = torch.cat([a * c - b * s, b * c + a * s], -1).to(dtype)
    for x, codes, scale in ((rotated, cache[0], cache[1]), (v, cache[2], cache[3])):
        want = sk.quantize_int8(x)
        same((codes.flatten(0, 1), scale.flatten(0, 1)[..., None]), want)


@each_cache
def test_slots(backend, cache_dtype):
    """-1 is skipped, of equal slots the last token stays, other places keep their bytes."""
    dim, slots = 46, [5, -1, 7, 5, 0, -1, 5, 11]
    k, v = randn(8, 2, dim), randn(8, 2, dim, seed=1)
    flat = torch.ones(8, dim // 2), torch.zeros(8, dim // 2)
    caches = [make_cache(3, 4, 2, dim, cache_dtype) for _ in range(2)]
    for cache in caches:
        for tensor in cache:
            if tensor is not None:
                tensor.fill_(3)
    sk.rope_write_kv_int8(k, v, *flat, *caches[0], torch.tensor(slots))
    for token, slot in ((2, 7), (4, 0), (6, 5), (7, 11)):
        one = slice(token, token + 1)
        sk.rope_write_kv_int8(k[one], v[one], flat[0][one], flat[1][one], *caches[1], torch.tensor([slot]))
    for got, want in zip(*caches, strict=True):
        assert got is None or torch.equal(got, want)
    assert caches[0][2][1, 0].eq(3).all() and not caches[0][2][1, 1].eq(3).all()


def test_no_tokens_and_all_skipped(backend):
    cache = make_cache(1, 4, 2, 8, torch.int8)
    q = randn(2, 4, 8)
    turned = q.clone()
    for tokens in (0, 2):
        k, angles = randn(tokens, 2, 8), tables(tokens, 8)
        slots = torch.full((tokens,), -1)
        sk.rope_write_kv_int8(k, k, *angles, *cache, slots, q=turned[:tokens])
    assert not any(t.any() for t in cache), "a skipped token was written"
    assert torch.equal(turned[0], q[0]) and not torch.equal(turned[1], q[1])  # queries turn all the same


@each_cache
@each_dtype
@pytest.mark.parametrize("name", OTHERS)
def test_equals_the_reference_on_every_form(name, dtype, cache_dtype):
    for dim, values, layout in ((2, 3, "block"), (46, 46, "gap"), (96, 64, "head"), (192, 130, "page-last")):
        parts = randn(7, 4 * dim + 2 * dim + 2 * values + 5, dtype=dtype)
        parts = parts[:, 5:].split([4 * dim, 2 * dim, 2 * values], 1)
        q, k, v = (part.unflatten(1, (n, -1)) for part, n in zip(parts, (4, 2, 2), strict=True))
        results = []
        for place in ("reference", name):
            with running(place):
                cache, turned = make_cache(3, 4, 2, dim, cache_dtype, values=values, layout=layout), q.clone()
                sk.rope_write_kv_int8(k, v, *tables(7, dim), *cache, torch.tensor([3, 11, -1, 0, 5, 6, 7]), q=turned)
                results.append([t for t in (turned, *cache) if t is not None])
        same(*results)


@each_cache
@each_dtype
@pytest.mark.parametrize("at", ["start", "end"])
def test_no_byte_beside_the_tensors(backend, dtype, cache_dtype, at):
    """The first and the last slot of a cache between forbidden pages, inputs likewise; 17 and 46 fill no vector."""
    for dim, values in ((46, 17), (64, 64)):
        q, k, v = (guarded_like(randn(2, 2, n, dtype=dtype), at=at) for n in (dim, dim, values))
        angles = [guarded_like(t, at=at) for t in tables(2, dim)]
        cache = [guarded((2, 3, 2, n), cache_dtype, at=at) for n in (dim, values)]
        scales = [guarded((2, 3, 2), torch.float32, at=at) if cache_dtype is torch.int8 else None for _ in range(2)]
        whole = cache[0], scales[0], cache[1], scales[1]
        plain = [None if t is None else torch.zeros_like(t) for t in whole]
        turned = q.clone()
        sk.rope_write_kv_int8(k, v, *angles, *whole, torch.tensor([5, 0]), q=q)
        on_reference(sk.rope_write_kv_int8, k, v, *angles, *plain, torch.tensor([5, 0]), q=turned)
        same([t for t in (q, *whole) if t is not None], [t for t in (turned, *plain) if t is not None])


X = (2, 3, 64)  # a good call's k; each refusal below changes one argument


def refused(error, message, **change):
    good = dict(zip(("k_cache", "k_scale", "v_cache", "v_scale"), make_cache(2, 4, 3, 64, torch.int8), strict=True))
    good |= {"k": randn(*X), "v": randn(*X), "slots": torch.tensor([0, 1]), "q": None}
    good |= dict(zip(("cos", "sin"), tables(2, 64), strict=True))
    with pytest.raises(error, match=message):
        sk.rope_write_kv_int8(**(good | change))


def test_refusals_name_the_argument():
    refused(TypeError, "k: expected dtype float32 or float16 or bfloat16, got int8", k=torch.zeros(X, dtype=torch.int8))
    refused(TypeError, "v: expected dtype float32, got float16", v=randn(*X).half())
    refused(TypeError, "q: expected dtype float32, got float64", q=randn(*X).double())
    refused(ValueError, r"v: expected shape \[2, 3, Dv\]", v=randn(2, 2, 64))
    refused(ValueError, "k: expected an even head dimension, got 63", k=randn(2, 3, 63))
    refused(ValueError, "k: expected heads contiguous", k=randn(2, 3, 128)[..., ::2])
    refused(ValueError, "v: expected heads contiguous", v=randn(2, 3, 128)[..., :64])
    refused(ValueError, "q: expected rows of their own", q=randn(1, 9, 64).expand(2, 9, 64))
    refused(ValueError, "cos: expected shape", cos=torch.ones(2, 16))
    refused(ValueError, "sin: expected cos's row stride", sin=torch.zeros(2, 64)[:, :32])
    refused(TypeError, "slots: expected dtype int64", slots=torch.tensor([0, 1], dtype=torch.int32))
    refused(ValueError, r"slots: expected shape \[2\]", slots=torch.tensor([0]))
    refused(ValueError, "slots: expected a contiguous", slots=torch.arange(4)[::2])
    refused(ValueError, "slots: expected -1 or an index inside the cache", slots=torch.tensor([0, 8]))
    refused(ValueError, "slots: expected -1 or an index inside the cache", slots=torch.tensor([-2, 0]))


def test_refusals_of_caches_name_the_argument():
    codes = torch.int8
    refused(TypeError, "k_cache: expected dtype int8 or", k_cache=strided((2, 4, 3, 64), torch.int32))
    refused(TypeError, "v_cache: expected dtype int8, got float32", v_cache=strided((2, 4, 3, 64), torch.float32))
    refused(ValueError, r"v_cache: expected \[2, 4, 3, Dv\]", v_cache=strided((2, 5, 3, 64), codes))
    refused(ValueError, r"k_cache: expected \[pages, page_size, 3, 64\]", k_cache=strided((2, 4, 3, 32), codes))
    refused(ValueError, r"v_cache: expected \[pages, page_size, 3, 64\]", v_cache=strided((2, 4, 3, 32), codes))
    refused(ValueError, "k_cache: expected a contiguous last", k_cache=strided((2, 4, 3, 128), codes)[..., ::2])
    refused(
        ValueError, "v_cache: expected memory for every", v_cache=torch.zeros(1, 4, 3, 64).char().expand(2, 4, 3, 64)
    )
    refused(ValueError, "k_scale: expected memory for every", k_scale=torch.zeros(2, 4, 1).expand(2, 4, 3))
    refused(TypeError, "k_scale: expected a torch.Tensor, got NoneType", k_scale=None)
    refused(ValueError, r"v_scale: expected shape \[2, 4, 3\], got \[2, 4, 4\]", v_scale=torch.zeros(2, 4, 4))
    refused(ValueError, "v_scale: expected 3 dimensions", v_scale=torch.zeros(2, 4, 3, 1))
    refused(TypeError, "k_scale: expected dtype float32, got float16", k_scale=torch.zeros(2, 4, 3).half())
    floats = make_cache(2, 4, 3, 64, torch.float32)
    scale = torch.zeros(2, 4, 3)
    refused(ValueError, "k_scale: expected None for a float cache", k_cache=floats[0], v_cache=floats[2], k_scale=scale)
    none = strided((2, 0, 3, 64), codes)
    refused(ValueError, "page size of at least 1", k_cache=none, v_cache=none)
    assert set(LAYOUTS) == {"block", "head", "page-last", "gap"}  # all of them are good (test_attention_forms.py)
