"""Norms, gates and sums of codes of the GPU kernels on the CPU emulator, against the reference.

What a row fits into (a few lanes, a wave, a block, or nothing) decides which code runs, so the lengths are chosen
around those sizes. Waves of 32 and 64, threads in three orders.
"""

import itertools
import math

import pytest
import torch

import emulator
import specdec_kernels as sk
from guard import guarded, guarded_like
from int8_backends import on_reference, randn, same

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONFIGURATIONS = list(itertools.product((32, 64), emulator.ORDERS))
LENGTHS = (1, 2, 3, 5, 7, 13, 17, 31, 33, 46, 1076, 1368, 3584)
ROWS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 33)
EPS = 1e-5


@pytest.fixture(params=CONFIGURATIONS, ids=lambda c: f"wave{c[0]}-{c[1]}")
def emulated(request):
    with emulator.serving(*request.param):
        yield


@pytest.fixture
def one():
    with emulator.serving(32, "random"):
        yield


def groups_of(cols):
    """None, and two divisors of a row's length."""
    divisors = [n for n in range(1, cols) if cols % n == 0]
    return (None, *sorted({divisors[0], divisors[len(divisors) // 2]})) if divisors else (None,)


def nearly(got, want, dtype):
    """Plain results: equal but for a step of the dtype in few places."""
    step = {torch.float32: 2.0**-19, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=step, atol=step / 64, equal_nan=True)
    if dtype is not torch.float32:
        assert ((got != want) & ~want.isnan()).sum() <= 1 + want.numel() // 1000


class Differences:
    """Codes of fused operations against the reference's, over all calls of a test: by 1 in at most 1e-4 of them."""

    def __init__(self):
        self.codes = self.different = 0

    def add(self, got, want):
        gap = (got[0].int() - want[0].int()).abs()
        assert not (gap > 1).any()
        self.codes += gap.numel()
        self.different += int(gap.sum())
        torch.testing.assert_close(got[1], want[1], rtol=2.0**-7, atol=0, equal_nan=True)

    def check(self):
        assert self.codes > 10_000 and self.different <= 1e-4 * self.codes, f"{self.different} of {self.codes}"


def norm_calls(dtype, rows, cols, seed=0):
    """(plain operation, fused one, their arguments, their options) of both norms, with and without what is optional."""
    x, residual = randn(rows, cols, dtype=dtype, seed=seed), randn(rows, cols, dtype=dtype, seed=seed + 1)
    weight, bias = randn(2, cols, dtype=dtype, seed=seed + 2)
    arguments = x, weight, EPS
    yield sk.rms_norm, sk.rms_norm_quantize_int8, arguments, {}
    yield sk.rms_norm, sk.rms_norm_quantize_int8, arguments, {"residual": residual}
    yield sk.layer_norm, sk.layer_norm_quantize_int8, arguments, {"bias": bias, "residual": residual}
    yield sk.layer_norm, sk.layer_norm_quantize_int8, arguments, {}


def gate_calls(dtype, rows, cols, seed=0):
    gate_up = (randn(rows, 2 * cols, seed=seed) * 3).to(dtype)
    yield sk.silu_mul, sk.silu_mul_quantize_int8, (gate_up,), {}
    for approximate in ("none", "tanh"):
        yield sk.gelu_mul, sk.gelu_mul_quantize_int8, (gate_up,), {"approximate": approximate}


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def agrees(calls, dtype, differences):
    """Plain results as the reference's; fused = plain and quantize_int8, bit for bit, sums included."""
    for plain, fused, arguments, options in calls:
        y = plain(*arguments, **options)
        nearly(first(y), first(on_reference(plain, *arguments, **options)), dtype)
        if "residual" in options:
            assert torch.equal(y[1], on_reference(plain, *arguments, **options)[1])
        for group in groups_of(first(y).shape[-1]):
            got = fused(*arguments, **options, group_size=group, return_sums=True)
            same(got[:3], sk.quantize_int8(first(y), group_size=group, return_sums=True))
            same(got[3:], y[1:] if "residual" in options else ())
            differences.add(got, on_reference(fused, *arguments, **options, group_size=group))


# ---- lengths, rows, dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [norm_calls, gate_calls], ids=lambda f: f.__name__)
def test_lengths(emulated, calls):
    differences = Differences()
    for cols, dtype in zip((46, 576, 1076), DTYPES, strict=True):
        agrees(calls(dtype, 2, cols, seed=cols), dtype, differences)
    differences.check()


@pytest.mark.parametrize("shift", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("calls", [norm_calls, gate_calls], ids=lambda f: f.__name__)
def test_every_length(one, calls, shift):
    """Each length with one dtype; the slow ones go through the others."""
    differences = Differences()
    for number, cols in enumerate(LENGTHS):
        dtype = DTYPES[(number + shift) % 3]
        agrees(calls(dtype, 2, cols, seed=cols), dtype, differences)
    differences.check()


@pytest.mark.parametrize("calls", [norm_calls, gate_calls], ids=lambda f: f.__name__)
def test_rows_do_not_know_each_other(one, calls):
    for plain, fused, arguments, options in calls(torch.bfloat16, 33, 65):
        tensors = arguments[0], options.get("residual")
        want = first(plain(*arguments, **options)), *fused(*arguments, **options, group_size=13)
        for rows in ROWS:
            cut = [None if t is None else t[33 - rows :] for t in tensors]
            some = options | ({"residual": cut[1]} if cut[1] is not None else {})
            got = first(plain(cut[0], *arguments[1:], **some)), *fused(cut[0], *arguments[1:], **some, group_size=13)
            same(got, [part[33 - rows :] for part in want])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beyond_the_registers(one, dtype):
    """A row of 17,000 is held in part; its groups of 1 and 5 are too many for shared memory."""
    x, residual, gate_up = (randn(1, n, dtype=dtype, seed=i) for i, n in enumerate((17000, 17000, 34000)))
    weight, bias = randn(2, 17000, dtype=dtype, seed=3)
    y = sk.layer_norm(x, weight, EPS, bias=bias, residual=residual)
    nearly(y[0], on_reference(sk.layer_norm, x, weight, EPS, bias=bias, residual=residual)[0], dtype)
    gated = sk.silu_mul(gate_up)
    nearly(gated, on_reference(sk.silu_mul, gate_up), dtype)
    for group in (None, 1, 5, 1000, 8500):
        options = {"group_size": group, "return_sums": True}
        got = sk.layer_norm_quantize_int8(x, weight, EPS, bias=bias, residual=residual, **options)
        same(got, (*sk.quantize_int8(y[0], **options), y[1]))
    same(sk.silu_mul_quantize_int8(gate_up), sk.quantize_int8(gated))


@pytest.mark.parametrize("rows", [4096, pytest.param(65536, marks=pytest.mark.slow)])
def test_many_short_rows(one, rows):
    x, weight = randn(rows, 32, dtype=torch.bfloat16), randn(32, dtype=torch.bfloat16, seed=1)
    got = sk.silu_mul_quantize_int8(x, return_sums=True)
    same(got, sk.quantize_int8(sk.silu_mul(x), return_sums=True))
    assert torch.equal(got[2], got[0].sum(-1, keepdim=True, dtype=torch.int32))
    assert torch.equal(sk.rms_norm(x[-512:], weight, EPS)[-3:], sk.rms_norm(x[-3:], weight, EPS))


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_alignment_and_stride_gives_the_same_bits(one, dtype):
    """Offsets 0..15 of every operand in turn, row strides H + 1, H + 8, 2H; nothing outside the rows is written."""
    cols, rows = 46, 3
    x, residual, gate_up = (randn(rows, n, dtype=dtype, seed=n) for n in (cols, cols + 1, 2 * cols))
    residual = residual[:, 1:]
    weight, bias = randn(2, cols, dtype=dtype, seed=9)
    options = {"bias": bias, "residual": residual, "group_size": 23, "return_sums": True}
    want = sk.layer_norm_quantize_int8(x, weight, EPS, **options)
    want_plain = sk.layer_norm(x, weight, EPS, bias=bias, residual=residual)
    want_gated = sk.silu_mul_quantize_int8(gate_up, group_size=23), sk.silu_mul(gate_up)

    def placed(value, offset, stride, fill=99):
        rows = value.shape[0] if value.dim() == 2 else 1
        frame = torch.full((offset + rows * stride,), fill).to(value.dtype)
        place = frame[offset:].view(rows, stride)[:, : value.shape[-1]].copy_(value)
        return frame, place if value.dim() == 2 else place[0]

    for offset in range(16):
        stride = (cols + 1, cols + 8, 2 * cols)[offset % 3]
        moved = {name: placed(t, offset, stride)[1] for name, t in (("residual", residual), ("bias", bias))}
        there = placed(x, 15 - offset, stride)[1], placed(weight, offset, cols)[1]
        frames = [placed(torch.zeros_like(t), offset, t.shape[1] + 3) for t in (*want[:3], residual, x)]
        out, into, plain = tuple(f[1] for f in frames[:3]), frames[3][1], frames[4][1]
        same(sk.layer_norm_quantize_int8(*there, EPS, **(options | moved), residual_out=into, out=out), want)
        same(sk.layer_norm(*there, EPS, **moved, residual_out=into, out=plain), want_plain)
        for frame, place in frames:
            inside = torch.zeros(frame.shape, dtype=torch.bool)
            inside[offset:].view(rows, -1)[:, : place.shape[1]] = True
            assert (frame[~inside] == 99).all()
        gates = placed(gate_up, offset, 2 * cols + offset + 1)[1]
        same(sk.silu_mul_quantize_int8(gates, group_size=23, out=out[:2]), want_gated[0])
        same([sk.silu_mul(gates, out=plain)], [want_gated[1]])


@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_between_guard_pages(one, dtype, at):
    for cols in (1, 7, 16, 46, 1076):
        x, residual, weight, bias, gate_up = (
            guarded_like(randn(*shape, dtype=dtype, seed=i), at=at)
            for i, shape in enumerate([(3, cols), (3, cols), (cols,), (cols,), (3, 2 * cols)])
        )
        group = groups_of(cols)[-1]
        counts = 3, cols // (group or cols)
        out = [guarded((3, cols), torch.int8, at=at), guarded(counts, torch.float32, at=at)]
        out.append(guarded(counts, torch.int32, at=at))
        plain, total = guarded((3, cols), dtype, at=at), guarded((3, cols), dtype, at=at)
        options = {"residual": residual, "residual_out": total, "bias": bias}
        sk.layer_norm(x, weight, EPS, **options, out=plain)
        got = sk.layer_norm_quantize_int8(x, weight, EPS, **options, group_size=group, return_sums=True, out=out)
        same(got[:3], sk.quantize_int8(plain, group_size=group, return_sums=True))
        sk.gelu_mul(gate_up, out=plain)
        got = sk.gelu_mul_quantize_int8(gate_up, group_size=group, return_sums=True, out=out)
        same(got, sk.quantize_int8(plain, group_size=group, return_sums=True))


def test_the_sum_may_replace_x_or_the_residual(emulated):
    for cols in (46, 5000):
        x, residual = randn(2, cols), randn(2, cols, seed=1)
        weight = randn(cols, seed=2)
        want = sk.layer_norm_quantize_int8(x, weight, EPS, residual=residual)
        for into in ("x", "residual"):
            there = {"x": x.clone(), "residual": residual.clone()}
            got = sk.layer_norm_quantize_int8(
                there["x"], weight, EPS, residual=there["residual"], residual_out=there[into]
            )
            same(got, want)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_hard_rows(emulated):
    """Zero, NaN, infinite, tiny and huge rows: what the reference gives, and no other row changes."""
    x = randn(9, 46)
    x[1], x[2, 45], x[3, 0], x[4, 7] = 0, math.nan, math.inf, -math.inf
    x[5], x[6], x[7] = x[5] * 1e-38, x[6] * 1e-42, x[7].sign() * 3e38
    weight = randn(46, seed=1)
    for eps in (EPS, 0.0):
        for plain, fused in ((sk.rms_norm, sk.rms_norm_quantize_int8), (sk.layer_norm, sk.layer_norm_quantize_int8)):
            y = plain(x, weight, eps)
            nearly(y, on_reference(plain, x, weight, eps), torch.float32)
            for group in (None, 23, 1):
                got = fused(x, weight, eps, group_size=group, return_sums=True)
                same(got, sk.quantize_int8(y, group_size=group, return_sums=True))
                assert torch.equal(got[0][:1], fused(x[:1], weight, eps, group_size=group)[0])
    y = sk.silu_mul(x)
    nearly(y, on_reference(sk.silu_mul, x), torch.float32)
    same(sk.silu_mul_quantize_int8(x), sk.quantize_int8(y))


def test_gates_at_the_ends(one):
    ends = torch.tensor([0.0, -0.0, 1e-40, 20, 88, 89, 1e30, -5, -9, -14, -20, -87, -89, -1e30, math.inf, math.nan])
    gate_up = torch.cat([ends, torch.ones_like(ends)])
    for approximate in ("none", "tanh"):
        got, want = (
            sk.gelu_mul(gate_up, approximate=approximate),
            on_reference(sk.gelu_mul, gate_up, approximate=approximate),
        )
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-37, equal_nan=True)


def test_sums_of_every_kind_of_code(emulated):
    """Symmetric, asymmetric, given scale, stochastic: the sum of what was written."""
    for cols in (46, 300, 2100):
        x = randn(3, cols)
        for options in (
            {},
            {"symmetric": False},
            {"scale": 0.02},
            {"scale": 0.02, "zero_point": 7, "symmetric": False},
            {"stochastic_seed": 5},
        ):
            q, *_, sums = sk.quantize_int8(x, return_sums=True, **options)
            assert sums.dtype is torch.int32 and torch.equal(sums, q.sum(-1, keepdim=True, dtype=torch.int32))
        q, _, sums = sk.quantize_int8(x, group_size=cols // 2, return_sums=True)
        assert torch.equal(sums, q.unflatten(-1, (2, -1)).sum(-1, dtype=torch.int32))
