"""quantize_int8 and dequantize_int8: any shape, stride and alignment, no byte beside the tensors, every refusal."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from guard import guarded, guarded_like
from int8_backends import (
    DTYPES,
    INTERPRETED,
    ROW_BACKENDS,
    each_dtype,
    on_reference,
    randn,
    running,
    same,
    torch_threads,
)

NAN, INF = float("nan"), float("inf")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=ROW_BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


# ---- shapes, strides, memory -----------------------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 5, 7, 13, 15, 16, 17, 31, 33, 46, 255, 257, 577, 1076, 1368, 3584)


@each_dtype
@pytest.mark.parametrize("at", ["start", "end"])
def test_every_length_between_guard_pages(backend, dtype, at):
    for cols in LENGTHS:
        for rows in (1, 3):
            x = guarded_like(randn(rows, cols, dtype=dtype, seed=cols), at=at)
            for symmetric in (True, False):
                out = [guarded((rows, cols), torch.int8, at=at), guarded((rows, 1), F32, at=at)]
                out += [guarded((rows, 1), torch.int32, at=at) for _ in range(1 if symmetric else 2)]
                seed = None if cols % 2 else 5
                options = {"symmetric": symmetric, "stochastic_seed": seed, "return_sums": True}
                got = sk.quantize_int8(x, out=out, **options)
                assert got[0].data_ptr() == out[0].data_ptr()
                same(got, on_reference(sk.quantize_int8, x, **options))
                fenced = [guarded_like(part, at=at) for part in got[:-1]]
                want = on_reference(sk.dequantize_int8, *got[:-1], dtype=dtype)
                same([sk.dequantize_int8(*fenced, dtype=dtype)], [want])


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 257] + ([] if INTERPRETED else [65536]))
def test_every_number_of_rows(backend, rows):
    x = randn(rows, 32)
    got = sk.quantize_int8(x)
    same(got, on_reference(sk.quantize_int8, x))
    assert got[0].shape == (rows, 32) and got[1].shape == (rows, 1)


@pytest.mark.parametrize("shape", [(0, 128), (0, 0), (3, 0), (2, 0, 8), (0,)])
def test_nothing_to_do(backend, shape):
    for symmetric in (True, False):
        got = sk.quantize_int8(torch.empty(shape), symmetric=symmetric)
        assert got[0].shape == shape and got[1].shape == (*shape[:-1], 1) and not got[1].any()
        assert sk.dequantize_int8(*got).shape == shape


@each_dtype
def test_any_alignment(backend, dtype):
    x = randn(2, 46, dtype=dtype)
    want = sk.quantize_int8(x, group_size=23)
    for offset in range(16):
        shifted = torch.zeros(2 * 46 + 16, dtype=dtype)[offset:][: 2 * 46].view(2, 46).copy_(x)
        out = (
            torch.zeros(200, dtype=torch.int8)[offset : offset + 92].view(2, 46),
            torch.zeros(20)[offset % 4 :][:4].view(2, 2),
        )
        same(sk.quantize_int8(shifted, group_size=23, out=out), want)


@each_dtype
def test_rows_any_distance_apart(backend, dtype):
    base = randn(7, 128, dtype=dtype)
    for x in (
        base[:, :64],
        base[:, 64:],
        base[:, 3:49],
        base[:, :1],
        base[::2],
        base[1:2].expand(4, 128),
        base.view(7, 2, 64)[:, 1],
    ):
        want = sk.quantize_int8(x.contiguous())
        same(sk.quantize_int8(x), want)
        wide = torch.full((x.shape[0], x.shape[1] + 5), 99, dtype=torch.int8)
        scale = torch.full((x.shape[0], 3), 99.0)
        same(sk.quantize_int8(x, out=(wide[:, 2:-3], scale[:, 1:2])), want)
        sums = torch.full((x.shape[0], 3), 99, dtype=torch.int32)
        sk.quantize_int8(x, out=(wide[:, 2:-3], scale[:, 1:2], sums[:, 1:2]), return_sums=True)
        assert torch.equal(sums[:, 1], want[0].sum(-1).int()) and sums[:, ::2].eq(99).all()
        assert wide[:, :2].eq(99).all() and wide[:, -3:].eq(99).all() and scale[:, ::2].eq(99).all()
        same([sk.dequantize_int8(wide[:, 2:-3], scale[:, 1:2])], [sk.dequantize_int8(*want)])


def test_leading_dimensions(backend):
    x = randn(3, 4, 5, 24)
    for view in (x, x.transpose(0, 1), x[:, 1:3], x.permute(2, 0, 1, 3), x[..., 8:], x[:, :, 0, :]):
        same(sk.quantize_int8(view, group_size=8), sk.quantize_int8(view.contiguous(), group_size=8))
    same(sk.quantize_int8(x[0, 0, 0]), [part[0, 0, 0] for part in sk.quantize_int8(x)])


def test_strided_last_dimension_is_refused():
    x = torch.randn(8, 64)
    for view in (x.t(), x[:, ::2]):
        with pytest.raises(ValueError, match="x: expected a contiguous last dimension"):
            sk.quantize_int8(view)


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
def test_offsets_need_64_bits(name):
    step = 2**30 + 8  # row 2 starts past 2^31 elements
    x = guarded((3, 40), BF16, row_stride=step).copy_(randn(3, 40, dtype=BF16))
    q = guarded((3, 40), torch.int8, row_stride=step)
    with running(name):
        got = sk.quantize_int8(x, out=(q, torch.empty(3, 1)))
        same(got, sk.quantize_int8(x.contiguous()))
        same([sk.dequantize_int8(*got)], [sk.dequantize_int8(q.contiguous(), got[1])])


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
@each_dtype
def test_a_row_depends_on_nothing_else(name, dtype):
    x = randn(300, 1000, dtype=dtype)
    with running(name):
        for options in ({}, {"group_size": 40}, {"symmetric": False}, {"stochastic_seed": 3}):
            with torch_threads(1):
                want = sk.quantize_int8(x, **options)
            with torch_threads(2):
                same(sk.quantize_int8(x, **options), want)
            if "stochastic_seed" not in options:
                same(sk.quantize_int8(x[123], **options), [part[123] for part in want])
                same(sk.quantize_int8(x[100:200], **options), [part[100:200] for part in want])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**40), st.sampled_from(DTYPES))
def test_equals_the_reference(rows, group, groups, seed, dtype):
    x = randn(rows, group * groups, dtype=dtype, seed=seed)
    x *= torch.randint(-3, 4, (rows, 1), generator=torch.Generator().manual_seed(seed)).float().exp().to(dtype)
    for symmetric in (True, False):
        for stochastic in (None, seed):
            options = {"group_size": group, "symmetric": symmetric, "stochastic_seed": stochastic}
            same(sk.quantize_int8(x, **options), on_reference(sk.quantize_int8, x, **options))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_out_is_checked():
    x = torch.randn(4, 8)
    q, scale = torch.empty(4, 8, dtype=torch.int8), torch.empty(4, 1)
    memory = torch.zeros(64)
    cases = [
        (q, TypeError, "out: expected"),
        ((q,), TypeError, "out: expected"),
        ((q, scale, scale), TypeError, "out: expected"),
        ((q.float(), scale), TypeError, r"out\[0\]: expected dtype int8"),
        ((q[:3], scale), ValueError, r"out\[0\]: expected shape \[4, 8\]"),
        ((q, scale.view(4)), ValueError, r"out\[1\]: expected shape \[4, 1\]"),
        ((q[:1].expand(4, 8), scale), ValueError, r"out\[0\]: expected evenly spaced rows"),
        ((torch.empty(8, 4, dtype=torch.int8).t(), scale), ValueError, r"out\[0\]: expected a contiguous last"),
        ((q, scale, scale, scale), TypeError, r"out: expected \(q, scale\), got 4 tensors"),
        ((q, q.view(-1).view(F32)[:4].view(4, 1)), ValueError, r"out\[1\]: .*overlaps out\[0\]"),
    ]
    for out, error, message in cases:
        with pytest.raises(error, match=message):
            sk.quantize_int8(x, out=out)
    x = memory[:32].view(4, 8)
    with pytest.raises(ValueError, match=r"out\[0\]: .*overlaps x"):
        sk.quantize_int8(x, out=(memory.view(torch.int8)[124:156].view(4, 8), scale))
    with pytest.raises(ValueError, match=r"out\[1\]: .*overlaps x"):
        sk.quantize_int8(x, out=(q, memory[31:35].view(4, 1)))
    sk.quantize_int8(x, out=(memory.view(torch.int8)[128:160].view(4, 8), memory[40:44].view(4, 1)))
    with pytest.raises(ValueError, match="out: expected q, or q with the given scale"):
        sk.quantize_int8(x, scale=scale.fill_(1), out=(q, scale.clone()))
    with pytest.raises(ValueError, match="given scale and zero point themselves and sums"):
        sk.quantize_int8(x, scale=scale, out=q, return_sums=True)
    with pytest.raises(TypeError, match=r"out\[-1\]: expected dtype int32"):
        sk.quantize_int8(x, scale=scale, out=(q, scale, scale), return_sums=True)
    assert sk.quantize_int8(x, scale=scale, out=(q, scale))[0] is q
    assert sk.quantize_int8(x, scale=scale, out=q)[0] is q
    zero = torch.zeros(4, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out: .*overlaps zero_point"):
        sk.quantize_int8(x, scale=1.0, zero_point=zero[:, :1], symmetric=False, out=zero.view(torch.int8))


def test_out_between_the_rows_of_x(backend):
    memory = torch.zeros(4, 16)
    x = memory[:, :8].copy_(torch.randn(4, 8))
    want = sk.quantize_int8(x)
    got = sk.quantize_int8(x, out=(memory.view(torch.int8)[:, 32:40], memory[:, 12:13]))
    same(got, want)
    with pytest.raises(ValueError, match=r"out\[0\]: .*overlaps x"):
        sk.quantize_int8(x, out=(memory.view(torch.int8)[:, 28:36], memory[:, 12:13]))


def test_refusals():
    good = torch.randn(4, 8)
    cases = [
        (lambda: sk.quantize_int8([1.0]), TypeError, "x: expected a torch.Tensor"),
        (lambda: sk.quantize_int8(good.double()), TypeError, "x: expected dtype"),
        (lambda: sk.quantize_int8(torch.tensor(1.0)), ValueError, "x: expected at least 1 dimension"),
        (lambda: sk.quantize_int8(good.clone().requires_grad_()), ValueError, "x: .*require grad"),
        (lambda: sk.quantize_int8(good.to_sparse()), ValueError, "x: expected a dense"),
        (lambda: sk.quantize_int8(good.to("meta")), ValueError, "x: .*meta"),
        (lambda: sk.quantize_int8(good, group_size=3), ValueError, "group_size: expected a divisor .* 8, got 3"),
        (lambda: sk.quantize_int8(good, group_size=0), ValueError, "group_size"),
        (lambda: sk.quantize_int8(good, group_size=2.0), TypeError, "group_size: expected an int"),
        (lambda: sk.quantize_int8(good, stochastic_seed=1.5), TypeError, "stochastic_seed"),
        (lambda: sk.quantize_int8(good, stochastic_seed=1, stochastic_offset=-1), ValueError, "stochastic_offset"),
        (lambda: sk.quantize_int8(good, stochastic_offset="0"), TypeError, "stochastic_offset"),
        (lambda: sk.quantize_int8(good, scale=10**400), ValueError, "scale: expected positive finite"),
        (lambda: sk.quantize_int8(good, scale=torch.ones(4, 3)), ValueError, "scale: expected"),
        (lambda: sk.quantize_int8(good, scale=torch.ones(4, 1).half()), TypeError, "scale: expected dtype float32"),
        (lambda: sk.quantize_int8(good, scale=torch.ones(4, 2), group_size=2), ValueError, "group_size: expected 4"),
        (lambda: sk.dequantize_int8(good, 1.0), TypeError, "q: expected dtype int8"),
        (lambda: sk.dequantize_int8(good.char(), torch.ones(3, 1)), ValueError, "scale: expected"),
        (lambda: sk.dequantize_int8(good.char(), 1.0, dtype=torch.float64), TypeError, "dtype"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_numbers_of_numpy():
    x, weight, half = torch.randn(4, 8), torch.ones(8), np.float32(0.5)
    assert torch.equal(sk.quantize_int8(x, scale=half)[0], sk.quantize_int8(x, scale=0.5)[0])
    same(sk.rms_norm_quantize_int8(x, weight, half), sk.rms_norm_quantize_int8(x, weight, 0.5))
    same(sk.quantize_int8(x, group_size=np.int64(4)), sk.quantize_int8(x, group_size=4))


def test_inputs_are_not_modified(backend):
    x, scale = randn(5, 33), torch.rand(5, 1) + 0.1
    kept = x.clone(), scale.clone()
    sk.dequantize_int8(*sk.quantize_int8(x))
    sk.quantize_int8(x, scale=scale)
    assert torch.equal(x, kept[0]) and torch.equal(scale, kept[1])
