"""attend_int8 interpreted, against the reference: heads, pages, masks, dtypes, strides, and rows on their own."""

import itertools

import pytest
import torch

import specdec_kernels as sk

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on inf - inf and the like
INT8, F32, F16, BF16 = torch.int8, torch.float32, torch.float16, torch.bfloat16


def call(lengths, rows, heads=4, kv_heads=2, dim=64, dim_v=None, page=16, dtype=F32, cache=INT8, seed=0, spare=0):
    """A call with pages in any order, the table ``spare`` pages wider than the longest request needs."""
    g = torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page) + spare
    pages = len(lengths) * width + 2
    table = torch.randperm(pages, generator=g)[: len(lengths) * width].view(len(lengths), width).int()
    tensors = []
    for d in (dim, dim if dim_v is None else dim_v):
        if cache is INT8:
            tensors += [torch.randint(-128, 128, (pages, page, kv_heads, d), generator=g).to(INT8)]
            tensors += [torch.rand(pages, page, kv_heads, generator=g) / 50]
        else:
            tensors += [torch.randn(pages, page, kv_heads, d, generator=g).to(cache), None]
    q = torch.randn(len(lengths), rows, heads, dim, generator=g).to(dtype)
    return [q, *tensors, table, torch.tensor(lengths, dtype=torch.int32)]


def on(backend, arguments, **options):
    with sk.use_backend(backend):
        return sk.attend_int8(*arguments, **options)


def marks(arguments, seed=0):
    """A mask in which every row sees itself."""
    b, r = arguments[0].shape[:2]
    return (torch.rand(b, r, r, generator=torch.Generator().manual_seed(seed)) < 0.5) | torch.eye(r, dtype=torch.bool)


def agrees(arguments, **options):
    """Float32 to 2e-5. 16 bits to a unit in the last place, and where values cancel to 2^-18 of the largest of them:
    each weight is the sum of two 16-bit numbers."""
    got, want = on("triton", arguments, **options), on("reference", arguments, **options)
    assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got.isnan(), want.isnan())
    got, want = got.double(), want.double()
    step = {F32: 2e-5, F16: 2.0**-10, BF16: 2.0**-7}[arguments[0].dtype]  # one unit in the last place at most
    error = ((got - want).abs() - step * want.abs()).nan_to_num(0).max()
    values, scale = arguments[3:5]
    largest = (values.double() if scale is None else values.double() * scale.double()[..., None]).abs().max()
    bound = 2e-6 * want.nan_to_num(0).abs().max() if arguments[0].dtype is F32 else 2.0**-18 * largest
    assert error <= bound, (float(error), float(bound))
    return True


@pytest.mark.parametrize("dim", [46, 64, 80, 96, 128, 1, 192])
def test_any_head(dim):
    assert agrees(call([70], 3, heads=2, kv_heads=1, dim=dim))


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 32), (46, 80), (32, 128)])
def test_values_of_another_size(dim, dim_v):
    assert agrees(call([70], 3, dim=dim, dim_v=dim_v))


@pytest.mark.parametrize("page", [1, 7, 64, 300])
def test_any_page(page):
    assert agrees(call([270], 2, heads=1, kv_heads=1, dim=32, page=page, spare=1))


@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(1, 1, 1), (9, 3, 5), (8, 1, 5), (1, 1, 17)])
def test_any_number_of_heads_and_rows(heads, kv_heads, rows):
    arguments = call([40], rows, heads=heads, kv_heads=kv_heads, dim=32)
    assert agrees(arguments)
    assert agrees(arguments, mask=marks(arguments), scale=0.3)


PAIRS = [(F16, INT8), (BF16, INT8), (F32, F32), (F16, F16), (BF16, BF16), (F32, BF16), (BF16, F16), (F16, F32)]


@pytest.mark.parametrize(("dtype", "cache"), PAIRS)
def test_any_dtypes(dtype, cache):
    assert agrees(call([100], 4, dtype=dtype, cache=cache))


def test_the_result_goes_to_out():
    arguments = call([40], 2)
    out = torch.full(arguments[0].shape, 7.0)
    assert on("triton", arguments, out=out) is out
    assert torch.equal(out, on("triton", arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cache"), [(F32, INT8), *PAIRS])
def test_many_calls(dtype, cache):
    """Every eleventh of all shapes, others for each pair of types."""
    shapes = itertools.product([46, 64, 128], [(9, 3), (8, 1)], [1, 5, 9], [[30], [540, 260, 20]], [False, True])
    first = [(F32, INT8), *PAIRS].index((dtype, cache))
    for dim, (heads, kv_heads), rows, lengths, masked in itertools.islice(shapes, first, None, 11):
        arguments = call(lengths, rows, heads, kv_heads, dim, dim_v=dim // 2 * 2, page=12, dtype=dtype, cache=cache)
        assert agrees(arguments, mask=marks(arguments) if masked else None)


# ---- rows on their own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [INT8, F32])
def test_a_row_depends_neither_on_its_neighbours_nor_on_the_table(cache):
    """Positions on both sides of a part's end (256), with 6 rows of 3 heads, which are two tiles of rows."""
    arguments = call([260, 30], 6, heads=3, kv_heads=1, dim=32, cache=cache, spare=5)
    together = on("triton", arguments)
    q, *caches, table, lengths = arguments
    for b, r in ((0, 0), (1, 3)):
        length = int(lengths[b]) - 5 + r
        for width in (-(-length // 16), table.shape[1]):
            few = [q[b : b + 1, r : r + 1], *caches, table[b : b + 1, :width].contiguous()]
            assert torch.equal(on("triton", [*few, torch.tensor([length]).int()])[0, 0], together[b, r])


def test_a_mask_that_is_causal_changes_nothing():
    arguments = call([30], 5, heads=1, kv_heads=1, dim=32)
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    assert torch.equal(on("triton", arguments, mask=mask), on("triton", arguments))


def test_rejected_keys_leave_no_trace():
    """A cache rolled back: what lies behind the length, NaN too, is not read."""
    arguments = call([100], 2, dim=32, cache=F32)
    want = on("triton", arguments)
    _, k, _, v, _, table, _ = arguments
    for cache in (k, v):
        for position in range(100, 112):
            cache[table[0, position // 16].item(), position % 16] = torch.nan
    assert torch.equal(on("triton", arguments), want)


@pytest.mark.parametrize("cache", [INT8, F32, F16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_values_reach_only_the_rows_that_see_them(cache, bad):
    arguments = call([40], 4, dim=32, cache=cache, dtype=F32 if cache is INT8 else cache)
    want = on("triton", arguments)
    _, _, k_scale, v, v_scale, table, _ = arguments
    place = table[0, 38 // 16].item(), 38 % 16  # row 2's own key
    if cache is INT8:
        k_scale[place], v_scale[place] = bad, bad
    else:
        v[place] = bad
    got = on("triton", arguments)
    assert torch.equal(got[:, :2], want[:, :2]) and not got[:, 2:].isfinite().any()


def test_a_row_that_sees_no_key():
    arguments = call([3], 3)
    mask = torch.tensor([[[True, False, False], [False, False, False], [True, True, True]]])
    assert agrees(arguments, mask=mask)
    assert on("triton", arguments, mask=mask)[0, 1].isnan().all()


# ---- layouts and values that only a device can hold ------------------------------------------------------------------


@pytest.mark.parametrize("cache", [INT8, F16])
def test_caches_of_any_strides(cache):
    arguments = call([20], 2, dim=32, cache=cache, dtype=F16)
    want = on("triton", arguments)
    q, k, k_scale, v, v_scale, table, lengths = arguments
    head_major = [t.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3) for t in (k, v)]
    wide = [torch.zeros(*t.shape[:3], 80, dtype=cache) for t in (k, v)]
    for room, t in zip(wide, (k, v), strict=True):
        room[..., 5:37] = t
    scales = [None if s is None else s.transpose(1, 2).contiguous().transpose(1, 2) for s in (k_scale, v_scale)]
    for k, v in (head_major, [room[..., 5:37] for room in wide]):
        assert torch.equal(on("triton", [q, k, scales[0], v, scales[1], table, lengths]), want)
    rows = torch.zeros(1, 2, 9 * 32, dtype=F16)
    rows[..., 32:160] = q.flatten(2)
    spaced = rows[..., 32:160].unflatten(2, (4, 32))
    assert torch.equal(on("triton", [spaced, *arguments[1:]]), want)


@pytest.mark.parametrize("spare", [0, 20])  # one part, or more
def test_a_bad_request_is_nan_and_concerns_no_other(spare):
    arguments = call([20] * 7, 2, heads=1, kv_heads=1, dim=32, spare=spare)
    want = on("triton", arguments)
    table, lengths = arguments[5:]
    for b, length in ((1, 1), (2, -5), (3, 10**6)):
        lengths[b] = length
    for b, page in ((4, -1), (5, 10**9), (6, arguments[1].shape[0])):
        table[b, 1] = page
    got = on("triton", arguments)
    assert got[1:].isnan().all() and torch.equal(got[0], want[0]) and want.isfinite().all()


def test_pages_behind_the_length_are_not_looked_at():
    arguments = call([40], 2, heads=1, kv_heads=1, dim=32, spare=20)
    want = on("triton", arguments)
    arguments[5][0, 3:] = -7
    assert torch.equal(on("triton", arguments), want)


def test_nothing_to_do():
    for lengths, rows in (([], 2), ([5], 0)):
        arguments = call([5], 2)
        q, table, n = arguments[0][: len(lengths), :rows], arguments[5][: len(lengths)], arguments[6][: len(lengths)]
        assert on("triton", [q, *arguments[1:5], table, n]).shape == (len(lengths), rows, 4, 64)
