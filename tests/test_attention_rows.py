"""attend_int8: a row's bits depend on its own query and keys alone, and what it may not see can't touch it."""

import pytest
import torch

import specdec_kernels as sk
from attention_cases import FLOATS, Filled, lengths
from guard import guarded_like
from instruction_sets import ISAS
from int8_backends import CPU, randn, running, torch_threads
from specdec_kernels import native

CACHES = (torch.int8, *FLOATS)
LONG = 300  # tokens: three blocks of keys, the last one incomplete
NAN = float("nan")
each_cache = pytest.mark.parametrize("cache_dtype", CACHES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.fixture(params=["reference", *CPU])
def backend(request):
    with running(request.param):
        yield request.param


@pytest.fixture(params=CPU)
def cpu(request):
    with running(request.param):
        yield


@each_cache
@pytest.mark.parametrize("dims", [(64, 64), (46, 17), (128, 192)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(cpu, cache_dtype, dims):
    """17 rows at once, the same in two pieces, and each alone; the last 45 keys are not all seen by all of them."""
    case = Filled(cache_dtype, tokens=LONG, dim=dims[0], values=dims[1])
    together = case.attend(45)
    for start, stop in ((255, 260), (260, 299), (299, 300)):
        rows = case.q[start:stop][None]
        assert torch.equal(
            together[:, start - 255 : stop - 255], sk.attend_int8(rows, *case.cache, case.table, lengths(stop))
        )
    for at in (255, 256, 257, 272, 299):
        alone = sk.attend_int8(case.q[at][None, None], *case.cache, case.table, lengths(at + 1))
        assert torch.equal(together[0, at - 255], alone[0, 0]), f"row {at}"


@each_cache
def test_a_request_does_not_depend_on_the_batch(cpu, cache_dtype):
    cases = [Filled(cache_dtype, tokens=n, page=8) for n in (3, 130, 61)]
    joined = [None if parts[0] is None else torch.cat(parts) for parts in zip(*(c.cache for c in cases), strict=True)]
    tables, before = torch.zeros(3, 17, dtype=torch.int32), 0
    for b, case in enumerate(cases):
        tables[b, : case.table.shape[1]] = case.table[0] + before
        before += len(case.cache[0])
    q = torch.stack([case.q[-3:] for case in cases])
    out = sk.attend_int8(q, *joined, tables, lengths(3, 130, 61))
    for b, case in enumerate(cases):
        assert torch.equal(out[b], case.attend(3)[0])


@each_cache
@pytest.mark.parametrize("dims", [(80, 46), (64, 64), (128, 16)], ids=str)
@pytest.mark.parametrize("tokens", [9, 100, LONG])  # the fewer, the fewer queries share a reading
def test_threads_and_instruction_sets_do_not_change_bits(cache_dtype, dims, tokens):
    results, before = [], native.cpu.isa()
    case = Filled(cache_dtype, tokens=tokens, dim=dims[0], values=dims[1], x=torch.bfloat16)
    try:
        for name in ISAS:
            native.cpu.set_isa(name)
            for threads in (1, 2, 5):
                with torch_threads(threads):
                    results.append([case.attend(1), case.attend(9)])
    finally:
        native.cpu.set_isa(before)
    for one, nine in results:
        assert torch.equal(one, results[0][0]) and torch.equal(nine, results[0][1])
    assert torch.equal(results[0][0][0, 0], results[0][1][0, -1])


def test_a_mask_that_is_causal_changes_no_bit(backend):
    case = Filled(torch.int8, tokens=140)
    causal = torch.ones(16, 16, dtype=torch.bool).tril()[None]
    assert torch.equal(case.attend(16, mask=causal), case.attend(16))


@each_cache
@pytest.mark.parametrize("where", ["keys", "values"])
def test_what_a_row_does_not_see_can_not_touch_it(backend, cache_dtype, where):
    """A NaN in the key or value of a later token, or of a sibling in a tree, stays out of the other rows."""
    case = Filled(cache_dtype, tokens=140)
    clean = case.attend(4)
    part = 0 if where == "keys" else 2
    page, offset = divmod(int(case.slots[138]), 16)
    poisoned = case.cache[part + 1] if cache_dtype is torch.int8 else case.cache[part]
    poisoned[page, offset] = NAN
    got = case.attend(4)
    assert torch.equal(got[0, :2], clean[0, :2]) and got[0, 2:].isnan().all()
    mask = torch.ones(4, 4, dtype=torch.bool).tril()[None]
    mask[0, 3, 2] = False
    got = case.attend(4, mask=mask)
    assert torch.equal(got[0, :2], clean[0, :2]) and got[0, 2].isnan().all() and not got[0, 3].isnan().any()


def test_a_nan_shows_in_the_rows_that_see_it(backend):
    """Of one head only: other kv heads, and the query heads that read them, know nothing of it."""
    case = Filled(torch.int8, tokens=50)
    clean = case.attend(2)
    page, offset = divmod(int(case.slots[3]), 16)
    case.cache[3][page, offset, 1] = NAN
    got = case.attend(2)
    assert got[:, :, 3:6].isnan().all() and torch.equal(got[:, :, :3], clean[:, :, :3])
    assert torch.equal(got[:, :, 6:], clean[:, :, 6:])


def test_zero_heads(backend):
    """Keys of zeros weigh the same, values of zeros give zeros; no division by their scale of 0."""
    case = Filled(torch.int8, tokens=6, page=4)
    case.k, case.v = torch.zeros_like(case.k), torch.zeros_like(case.v)
    case.v[0] = 6.0
    sk.rope_write_kv_int8(case.k, case.v, *case.angles, *case.cache, case.slots)
    torch.testing.assert_close(case.attend(1), torch.ones(1, 1, 9, 64), rtol=1e-6, atol=0)


def test_a_row_that_sees_nothing_is_nan(backend):
    case = Filled(torch.int8, tokens=2)
    mask = torch.tensor([[[False, False], [True, True]]])
    got = case.attend(2, mask=mask)
    assert got[0, 0].isnan().all() and not got[0, 1].isnan().any()


@each_cache
@pytest.mark.parametrize("rising", [True, False])
def test_the_blocks_of_a_row_make_one_softmax(backend, cache_dtype, rising):
    """Scores that grow, or shrink, from block to block: what earlier or later ones left has to be weighed anew."""
    for tokens in (127, 128, 129, LONG, 513):
        case = Filled(cache_dtype, tokens=tokens)
        ramp = torch.linspace(0.1, 4, tokens)
        place = case.slots // 16, case.slots % 16
        scaled = case.cache[0] if case.cache[1] is None else case.cache[1]
        kept = scaled[place]
        scaled[place] = kept * (ramp if rising else ramp.flip(0)).view(-1, *[1] * (kept.dim() - 1)).to(kept.dtype)
        got = case.attend(1)[0, 0].double()
        k, v = (part.double().repeat_interleave(3, 1) for part in (case.keys(), case.kept_values()))
        weights = (torch.einsum("hd,nhd->hn", case.q[-1].double(), k) * 64**-0.5).softmax(1)
        torch.testing.assert_close(got, torch.einsum("hn,nhd->hd", weights, v), rtol=0, atol=2e-5)


@each_cache
def test_large_scores_do_not_overflow(backend, cache_dtype):
    """Scores of some thousands: exp of them is infinite, of their differences not. The largest one takes all."""
    case = Filled(cache_dtype, tokens=150)
    got = case.attend(2, scale=1e3)
    assert got.isfinite().all()
    scores = torch.einsum("hd,nhd->hn", case.q[-1].double(), case.keys().double().repeat_interleave(3, 1))
    best = case.kept_values().repeat_interleave(3, 1)[scores.argmax(1), torch.arange(9)]
    torch.testing.assert_close(got[0, 1].double(), best.double(), rtol=0, atol=1e-2)


@each_cache
@pytest.mark.parametrize("at", ["start", "end"])
def test_no_byte_beside_the_tensors(cpu, cache_dtype, at):
    """Caches, scales, queries, tables and output between forbidden pages; 46 and 17 fill no vector, 5 no tile."""
    for tokens, page, dims in ((5, 1, (46, 17)), (33, 3, (64, 64)), (130, 16, (6, 130))):
        case = Filled(cache_dtype, tokens=tokens, page=page, dim=dims[0], values=dims[1])
        want = case.attend(3)
        fenced = [None if t is None else guarded_like(t, at=at) for t in case.cache]
        q, out = guarded_like(case.q[-3:][None], at=at), guarded_like(want, at=at).zero_()
        table, length = guarded_like(case.table, at=at), guarded_like(lengths(tokens), at=at)
        assert sk.attend_int8(q, *fenced, table, length, out=out) is out
        assert torch.equal(out, want)


def test_queries_may_lie_anywhere(backend):
    """Rows and requests any distance apart, at any alignment."""
    case = Filled(torch.int8, tokens=20)
    want = sk.attend_int8(case.q[-4:][None], *case.cache, case.table, lengths(20))
    for offset in range(3):
        wide = torch.zeros(3, 7, 9 * 64 + 11)
        view = wide[1:2, 2:6, offset : offset + 9 * 64].unflatten(2, (9, 64)).copy_(case.q[-4:])
        assert torch.equal(sk.attend_int8(view, *case.cache, case.table, lengths(20)), want)


def refused(error, message, **change):
    case = Filled(torch.int8)
    good = dict(zip(("k_cache", "k_scale", "v_cache", "v_scale"), case.cache, strict=True))
    good |= {"q": case.q[-2:][None], "page_table": case.table, "lengths": lengths(70)}
    with pytest.raises(error, match=message):
        sk.attend_int8(**(good | change))


def test_refusals_name_the_argument():
    refused(TypeError, "q: expected dtype float32 or float16 or bfloat16, got float64", q=randn(1, 2, 9, 64).double())
    refused(ValueError, "q: expected 4 dimensions", q=randn(2, 9, 64))
    refused(ValueError, "k_cache: expected heads of 32 values like q's", q=randn(1, 2, 9, 32))
    refused(ValueError, "q: expected a multiple of 3 heads", q=randn(1, 2, 4, 64))
    refused(ValueError, "q: expected heads contiguous", q=randn(1, 2, 9, 128)[..., ::2])
    refused(TypeError, "page_table: expected dtype int32, got int64", page_table=torch.zeros(1, 5, dtype=torch.int64))
    refused(
        ValueError, r"page_table: expected a contiguous \[1, pages\]", page_table=torch.zeros(2, 5, dtype=torch.int32)
    )
    refused(ValueError, r"lengths: expected shape \[1\]", lengths=lengths(70, 70))
    refused(ValueError, r"mask: expected shape \[1, 2, 2\]", mask=torch.ones(1, 2, 3, dtype=torch.bool))
    refused(TypeError, "mask: expected dtype bool", mask=torch.ones(1, 2, 2))
    refused(ValueError, "scale: expected a finite number, got nan", scale=NAN)
    refused(ValueError, r"v_scale: expected shape \[7, 16, 3\], got \[7, 16, 1\]", v_scale=torch.zeros(7, 16, 1))
    refused(ValueError, r"out: expected a contiguous \[1, 2, 9, 64\]", out=randn(1, 2, 9, 32))
    refused(TypeError, "out: expected dtype float32, got float16", out=randn(1, 2, 9, 64).half())
    q = randn(1, 2, 9, 64)
    refused(ValueError, "out: expected memory of its own, got a tensor that overlaps q", q=q, out=q)
