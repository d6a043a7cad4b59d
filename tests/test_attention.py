"""Attention family: cpu against the reference, row invariance, rollback, and every refusal."""

import pytest
import torch

import specdec_kernels as sk
from instruction_sets import ISAS
from specdec_kernels import native


def make_cache(pages, page, heads, dim, dtype):
    cache = [torch.zeros(pages, page, heads, dim, dtype=dtype) for _ in range(2)]
    scales = [torch.zeros(pages, page, heads) if dtype is torch.int8 else None for _ in range(2)]
    return cache[0], scales[0], cache[1], scales[1]


def tables(tokens, dim):
    angle = torch.arange(tokens)[:, None] * 100.0 ** -(torch.arange(dim // 2) / (dim / 2))
    return angle.cos(), angle.sin()


def filled(dtype, tokens=70, heads=3, q_heads=9, dim=64, page=16, seed=0):
    g = torch.Generator().manual_seed(seed)
    pages = -(-tokens // page) + 2
    cache = make_cache(pages, page, heads, dim, dtype)
    table = torch.randperm(pages, generator=g)[: -(-tokens // page)].to(torch.int32)[None]
    slots = torch.tensor([int(table[0, i // page]) * page + i % page for i in range(tokens)])
    qkv = torch.randn(tokens, (q_heads + 2 * heads) * dim, generator=g)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in qkv.split([q_heads * dim, heads * dim, heads * dim], 1))
    sk.rope_write_kv_int8(k, v, *tables(tokens, dim), *cache, slots, q=q)
    return q, cache, table, slots


def lengths(*n):
    return torch.tensor(n, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_cpu_equals_reference(isa, dtype, rows):
    q, cache, table, _ = filled(dtype)
    with sk.use_backend("reference"):
        q_ref, cache_ref, _, _ = filled(dtype)
    torch.testing.assert_close(q, q_ref, rtol=1e-6, atol=1e-6)
    for got, want in zip(cache, cache_ref, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1 if want.dtype is torch.int8 else 1e-6)
    got = sk.attend_int8(q[-rows:][None], *cache, table, lengths(70))
    with sk.use_backend("reference"):
        want = sk.attend_int8(q[-rows:][None], *cache, table, lengths(70))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_row_does_not_depend_on_its_neighbours(isa, dtype):
    q, cache, table, _ = filled(dtype)
    together = sk.attend_int8(q[-17:][None], *cache, table, lengths(70))
    for r in range(17):
        alone = sk.attend_int8(q[53 + r][None, None], *cache, table, lengths(54 + r))
        assert torch.equal(together[0, r], alone[0, 0])


def test_threads_and_instruction_sets_do_not_change_bits():
    results, before = [], torch.get_num_threads()
    try:
        for name in ISAS:
            native.cpu.set_isa(name)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                q, cache, table, _ = filled(torch.float32)
                results.append(sk.attend_int8(q[-9:][None], *cache, table, lengths(70)))
    finally:
        torch.set_num_threads(before)
        native.cpu.set_isa(native.cpu.machine_isa())
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_mask_of_a_tree(backend):
    q, cache, table, _ = filled(torch.float32)
    with sk.use_backend(backend):
        causal = torch.ones(5, 5, dtype=torch.bool).tril()[None]
        a = sk.attend_int8(q[-5:][None], *cache, table, lengths(70), mask=causal)
        b = sk.attend_int8(q[-5:][None], *cache, table, lengths(70))
        torch.testing.assert_close(a, b)
        sibling = causal.clone()
        sibling[0, 4, 3] = False  # row 4 no longer sees row 3
        c = sk.attend_int8(q[-5:][None], *cache, table, lengths(70), mask=sibling)
    assert torch.equal(c[0, :4], a[0, :4]) and not torch.equal(c[0, 4], a[0, 4])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_hand_computed(backend):
    cache = make_cache(1, 4, 1, 2, torch.float32)
    k = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    v = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    with sk.use_backend(backend):
        sk.rope_write_kv_int8(k, v, torch.ones(2, 1), torch.zeros(2, 1), *cache, torch.tensor([0, 1]))
        q = torch.tensor([[[[2.0**0.5 * 3.0, 0.0]]]])
        out = sk.attend_int8(q, *cache, torch.zeros(1, 1, dtype=torch.int32), lengths(2))
    w = torch.tensor([3.0, 0.0]).softmax(0)
    torch.testing.assert_close(out[0, 0, 0], w[0] * v[0, 0] + w[1] * v[1, 0])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rotation_by_a_right_angle(backend):
    cache = make_cache(1, 1, 1, 2, torch.float32)
    k = torch.tensor([[[5.0, 7.0]]])
    with sk.use_backend(backend):
        sk.rope_write_kv_int8(k, k, torch.zeros(1, 1), torch.ones(1, 1), *cache, torch.tensor([0]))
    assert cache[0].flatten().tolist() == [-7.0, 5.0] and cache[2].flatten().tolist() == [5.0, 7.0]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_int8_codes_follow_the_formula(backend):
    """s = amax / 127, round half to even: the head [127, .5, 1.5, ...] has scale 1 and exact halves."""
    cache = make_cache(1, 1, 1, 8, torch.int8)
    x = torch.tensor([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]]])
    with sk.use_backend(backend):
        sk.rope_write_kv_int8(torch.zeros_like(x), x, torch.ones(1, 4), torch.zeros(1, 4), *cache, torch.tensor([0]))
    assert cache[2].flatten().tolist() == [127, 0, 2, 2, 0, -2, -2, 126] and cache[3].item() == 1.0
    assert cache[0].eq(0).all() and cache[1].item() == 0.0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_rejected_tokens_leave_kept_bytes_alone(backend):
    """A slot of -1 is skipped, and overwriting one token with outliers changes no other token's bytes or scales."""
    with sk.use_backend(backend):
        _, cache, _, slots = filled(torch.int8)
        before = [c.clone() for c in cache]
        x = torch.full((3, 3, 64), 1e4)
        new = torch.tensor([-1, int(slots[-1]), -1])
        sk.rope_write_kv_int8(x, x, *tables(3, 64), *cache, new)
    page, offset = divmod(int(slots[-1]), 16)
    for was, now in zip(before, cache, strict=True):
        assert not torch.equal(was[page, offset], now[page, offset])
        now[page, offset] = was[page, offset]
        assert torch.equal(was, now)


def test_empty_calls():
    cache = make_cache(1, 4, 3, 8, torch.float32)
    none, flat = torch.zeros(0, 3, 8), torch.zeros(0, 4)
    sk.rope_write_kv_int8(none, none, flat, flat, *cache, torch.zeros(0, dtype=torch.int64))
    out = sk.attend_int8(torch.zeros(0, 1, 3, 8), *cache, torch.zeros(0, 1, dtype=torch.int32), lengths())
    assert out.shape == (0, 1, 3, 8)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_bad_values_never_become_addresses(backend):
    q, cache, table, _ = filled(torch.float32)
    with sk.use_backend(backend):
        for length in (0, -1, 10_000):
            with pytest.raises(ValueError, match="lengths"):
                sk.attend_int8(q[-1:][None], *cache, table, lengths(length))
        for page in (-1, 99):
            wrong = table.clone()
            wrong[0, 1] = page
            with pytest.raises(ValueError, match="page_table"):
                sk.attend_int8(q[-1:][None], *cache, wrong, lengths(70))
        x = torch.zeros(1, 3, 64)
        for slot in (-2, 7 * 16):
            with pytest.raises(ValueError, match="slots"):
                sk.rope_write_kv_int8(x, x, *tables(1, 64), *cache, torch.tensor([slot]))


def test_refusals_name_the_argument():
    q, cache, table, _ = filled(torch.float32)
    one = q[-1:][None]
    with pytest.raises(TypeError, match="q: expected dtype float32"):
        sk.attend_int8(one.double(), *cache, table, lengths(70))
    with pytest.raises(ValueError, match="multiple of 3 heads"):
        sk.attend_int8(torch.zeros(1, 1, 4, 64), *cache, table, lengths(70))
    with pytest.raises(ValueError, match="k_scale: expected None"):
        sk.attend_int8(one, cache[0], torch.zeros(7, 16, 3), *cache[2:], table, lengths(70))
    with pytest.raises(ValueError, match="require grad"):
        sk.attend_int8(one.clone().requires_grad_(), *cache, table, lengths(70))
    with pytest.raises(ValueError, match="meta"):
        sk.attend_int8(torch.zeros(1, 1, 9, 64, device="meta"), *cache, table, lengths(70))
    x = torch.zeros(1, 3, 7)
    with pytest.raises(ValueError, match="even head dimension"):
        sk.rope_write_kv_int8(x, x, *tables(1, 6), *cache, torch.tensor([0]))
