"""RMS norm and layer norm, plain and fused with int8: the rounding rules, fused = unfused, in-place residuals."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from guard import guarded, guarded_like
from int8_backends import (
    CPU,
    DTYPES,
    FEW_BACKENDS,
    INTERPRETED,
    ROW_BACKENDS,
    differ_rarely,
    each_dtype,
    on_reference,
    randn,
    running,
    same,
    torch_threads,
)

BF16 = torch.bfloat16
EPS = 1e-5
LENGTHS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 33, 46, 255, 257, 576, 1076, 1368, 3584)


@dataclass
class Norm:
    """A plain operation, its fused form, and whether it takes a bias."""

    plain: Any
    fused: Any
    biased: bool

    def bias(self, cols, dtype, seed=9):
        return {"bias": randn(cols, dtype=dtype, seed=seed)} if self.biased else {}


NORMS = {
    "rms": Norm(sk.rms_norm, sk.rms_norm_quantize_int8, False),
    "layer": Norm(sk.layer_norm, sk.layer_norm_quantize_int8, False),
    "layer-bias": Norm(sk.layer_norm, sk.layer_norm_quantize_int8, True),
}


@pytest.fixture(params=FEW_BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


# ---- what the plain operations mean ----------------------------------------------------------------------------------


@each_dtype
def test_rms_norm_by_hand(backend, dtype):
    x, residual, weight = randn(5, 40, dtype=dtype), randn(5, 40, dtype=dtype, seed=1), randn(40, dtype=dtype, seed=2)
    h = (x.float() + residual.float()).to(dtype)
    y, total = sk.rms_norm(x, weight, EPS, residual=residual)
    assert torch.equal(total, h)
    for row in range(5):
        values = [float(v) for v in h[row]]
        inverse = np.float32(1 / math.sqrt(math.fsum(v * v for v in values) / 40 + EPS))
        normed = torch.from_numpy(h[row].float().numpy() * inverse).to(dtype)
        want = (normed.float() * weight.float()).to(dtype)
        assert torch.equal(y[row], want)
    same([sk.rms_norm(h, weight, EPS)], [y])


@each_dtype
def test_layer_norm_by_hand(backend, dtype):
    x, residual, weight = randn(5, 40, dtype=dtype), randn(5, 40, dtype=dtype, seed=1), randn(40, dtype=dtype, seed=2)
    bias, h = randn(40, dtype=dtype, seed=3), (x.float() + residual.float()).to(dtype)
    y, total = sk.layer_norm(x, weight, EPS, bias=bias, residual=residual)
    assert torch.equal(total, h)
    for row in range(5):
        values = [float(v) for v in h[row]]
        mean = math.fsum(values) / 40
        inverse = np.float32(1 / math.sqrt(math.fsum((v - mean) ** 2 for v in values) / 40 + EPS))
        normed = torch.from_numpy((h[row].float().numpy() - np.float32(mean)) * inverse).to(dtype)
        scaled = (normed.float() * weight.float()).to(dtype)
        assert torch.equal(y[row], (scaled.float() + bias.float()).to(dtype))
        assert torch.equal(sk.layer_norm(h[row], weight, EPS), scaled)
    same([sk.layer_norm(h, weight, EPS, bias=bias)], [y])


def test_layer_norm_far_from_zero(backend):
    # The mean of squares less the square of the mean would be 0 or less here.
    x = (1e4 + torch.arange(64.0) / 64).repeat(2, 1)
    y = sk.layer_norm(x, torch.ones(64), 0.0)
    want = torch.nn.functional.layer_norm(x.double(), (64,), eps=0.0)
    assert (y.double() - want).abs().max() < 2e-3  # the mean is rounded to f32 before it is subtracted


def test_weight_multiplies_the_rounded_value(backend):
    # One rounding more or less is visible: bf16(bf16(h / rms) * w) is not bf16(h / rms * w) for these.
    x, weight = randn(8, 256, dtype=BF16), randn(256, dtype=BF16, seed=1)
    y = sk.rms_norm(x, weight, EPS)
    inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).float()
    once = (x.float() * inverse * weight.float()).bfloat16()
    assert (y != once).sum() > 100


def test_squares_beyond_f32(backend):
    x = torch.tensor([[3e38, -3e38, 1e38, 0.0], [1e-30, 2e-30, 0.0, 0.0]])
    y = sk.rms_norm(x, torch.ones(4), 0)
    want = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=0)


# ---- fused = unfused -------------------------------------------------------------------------------------------------


@each_dtype
def test_ties_round_to_even(backend, norm, dtype):
    x = torch.tensor([1, -1], dtype=dtype).repeat(4)  # mean 0, mean square 1: the weight comes out, but for the sign
    weight = torch.tensor([127, -0.5, 1.5, -2.5, -0.5, 1.5, -2.5, -126.5], dtype=dtype)
    bias = {"bias": torch.zeros(8, dtype=dtype)} if norm.biased else {}
    q, scale = norm.fused(x, weight, 0.0, **bias)
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -2, 126] and scale.item() == 1.0


@each_dtype
@pytest.mark.parametrize("cols, group", [(46, None), (46, 23), (577, None), (576, 192), (1536, 256), (64, 1)])
def test_fused_equals_unfused(backend, norm, dtype, cols, group):
    residual, weight, bias = randn(6, cols, dtype=dtype, seed=1), randn(cols, dtype=dtype, seed=2), {}
    bias = norm.bias(cols, dtype)
    for size in (1.0, 30.0, 1e-3):
        x = randn(6, cols, dtype=dtype) * size
        y, total = norm.plain(x, weight, EPS, residual=residual, **bias)
        want = sk.quantize_int8(y, group_size=group, return_sums=True)
        got = norm.fused(x, weight, EPS, residual=residual, group_size=group, return_sums=True, **bias)
        same(got, (*want, total))
        want = sk.quantize_int8(norm.plain(x, weight, EPS, **bias), group_size=group)
        same(norm.fused(x, weight, EPS, group_size=group, **bias), want)


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
@each_dtype
def test_close_to_the_reference(name, norm, dtype):
    rows = 4 if INTERPRETED else 60
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, 1536), (rows, 1536), (1536,)]))
    options = {"residual": residual, "group_size": 192, **norm.bias(1536, dtype)}
    with running(name):
        got = norm.fused(x, weight, EPS, **options)
    want = on_reference(norm.fused, x, weight, EPS, **options)
    differ_rarely(got, want)
    same(got[2:], want[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(norm, dtype):
    x, weight = randn(40, 1002, dtype=dtype) * 4, randn(1002, dtype=dtype, seed=1)
    bias, results = norm.bias(1002, dtype), []
    for name in CPU:
        with running(name):
            results.append((norm.plain(x, weight, EPS, **bias), *norm.fused(x, weight, EPS, group_size=3, **bias)))
    for other in results[1:]:
        same(other, results[0])


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
@each_dtype
def test_a_row_depends_on_nothing_else(name, norm, dtype):
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(300, 576), (300, 576), (576,)]))
    bias = norm.bias(576, dtype)
    with running(name):

        def call(rows):
            options = {"residual": residual[rows], **bias}
            fused = norm.fused(x[rows], weight, EPS, group_size=64, return_sums=True, **options)
            return *fused, norm.plain(x[rows], weight, EPS, **options)[0]

        with torch_threads(1):
            want = call(slice(None))
        with torch_threads(2):
            same(call(slice(None)), want)
        same(call(slice(123, 124)), [part[123:124] for part in want])
        same(call(slice(5, 200)), [part[5:200] for part in want])


# ---- memory ----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("at", ["start", "end"])
def test_every_length_between_guard_pages(backend, norm, dtype, at):
    for cols in LENGTHS:
        x, residual, weight, b = (
            guarded_like(randn(*shape, dtype=dtype, seed=cols), at=at)
            for shape in ((3, cols), (3, cols), (cols,), (cols,))
        )
        bias = {"bias": b} if norm.biased else {}
        per_row = guarded((3, 1), torch.float32, at=at), guarded((3, 1), torch.int32, at=at)
        out = guarded((3, cols), torch.int8, at=at), *per_row
        plain, total = guarded((3, cols), dtype, at=at), guarded((3, cols), dtype, at=at)
        options = {"residual": residual, "residual_out": total, **bias}
        norm.plain(x, weight, EPS, out=plain, **options)
        got = norm.fused(x, weight, EPS, out=out, return_sums=True, **options)
        same(got, (*sk.quantize_int8(plain, return_sums=True), (x.float() + residual.float()).to(dtype)))
        assert got[0].data_ptr() == out[0].data_ptr() and got[3] is total


@pytest.mark.parametrize("name", ROW_BACKENDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 257] + ([] if INTERPRETED else [65536]))
def test_every_number_of_rows(name, rows):
    x, weight = randn(rows, 32), randn(32, seed=1)
    with running(name):
        got = sk.rms_norm_quantize_int8(x, weight, EPS)
        same(got, sk.quantize_int8(sk.rms_norm(x, weight, EPS)))
    differ_rarely(got, on_reference(sk.rms_norm_quantize_int8, x, weight, EPS))


@each_dtype
def test_rows_any_distance_apart(backend, norm, dtype):
    base, weight, bias = randn(7, 200, dtype=dtype), randn(60, dtype=dtype, seed=1), norm.bias(60, dtype)
    x, residual = base[:, 3:63], base[::1, 70:130]
    contiguous = {"residual": residual.contiguous(), "group_size": 20, **bias}
    want = norm.fused(x.contiguous(), weight, EPS, return_sums=True, **contiguous)
    wide = torch.full((7, 80), 99, dtype=torch.int8)
    scale, sums, total = torch.full((7, 5), 99.0), torch.full((7, 9), 99).int(), torch.full((7, 62), 9, dtype=dtype)
    options = {"residual": residual, "group_size": 20, "return_sums": True, "residual_out": total[:, 1:-1], **bias}
    same(norm.fused(x, weight, EPS, out=(wide[:, 7:67], scale[:, 1:4], sums[:, 3:6]), **options), want)
    assert wide[:, :7].eq(99).all() and wide[:, 67:].eq(99).all() and scale[:, ::4].eq(99).all()
    assert total[:, ::61].eq(9).all() and sums[:, :3].eq(99).all() and sums[:, 6:].eq(99).all()
    same([norm.plain(x, weight, EPS, **bias)], [norm.plain(x.contiguous(), weight, EPS, **bias)])
    spread = x[:1].expand(7, 60)
    same([norm.plain(spread, weight, EPS, **bias)], [norm.plain(spread.contiguous(), weight, EPS, **bias)])


@each_dtype
def test_any_alignment(backend, norm, dtype):
    x, weight, bias = randn(2, 46, dtype=dtype), randn(46, dtype=dtype, seed=1), norm.bias(46, dtype)
    want = norm.fused(x, weight, EPS, residual=x, group_size=23, **bias)

    def moved(value, offset):
        room = torch.zeros(value.numel() + 16, dtype=value.dtype)
        return room[offset:][: value.numel()].view(value.shape).copy_(value)

    for offset in range(16):
        at = {"bias": moved(bias["bias"], 15 - offset)} if bias else {}
        out = moved(want[0].new_zeros(2, 46), offset), moved(want[1].new_zeros(2, 2), offset % 4)
        at |= {"residual": moved(x, offset ^ 5), "residual_out": moved(torch.zeros_like(x), offset ^ 3), "out": out}
        same(norm.fused(moved(x, offset), moved(weight, offset ^ 1), EPS, group_size=23, **at), want)


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
def test_offsets_need_64_bits(name):
    step = 2**30 + 8  # row 2 starts past 2^31 elements
    x, total = (guarded((3, 40), BF16, row_stride=step).copy_(randn(3, 40, dtype=BF16)) for _ in range(2))
    q, weight = guarded((3, 40), torch.int8, row_stride=step), randn(40, dtype=BF16, seed=1)
    with running(name):
        got = sk.rms_norm_quantize_int8(x, weight, EPS, residual=x, residual_out=total, out=(q, torch.empty(3, 1)))
        same(got, sk.rms_norm_quantize_int8(x.contiguous(), weight, EPS, residual=x.contiguous()))
        same([sk.layer_norm(x, weight, EPS, out=total)], [sk.layer_norm(x.contiguous(), weight, EPS)])


@each_dtype
@pytest.mark.parametrize("target", ["residual", "x"])
def test_residual_in_place(backend, norm, dtype, target):
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(3, 577), (3, 577), (577,)]))
    bias = norm.bias(577, dtype)
    want = norm.fused(x, weight, EPS, residual=residual, **bias)
    stream, added = residual.clone(), x.clone()
    into = stream if target == "residual" else added
    got = norm.fused(added, weight, EPS, residual=stream, residual_out=into, **bias)
    same(got, want)
    assert got[2] is into and torch.equal(added if into is stream else stream, x if into is stream else residual)
    stream = residual.clone()  # the same memory, another tensor:
    y = norm.plain(x, weight, EPS, residual=stream, residual_out=stream.view(3, 577), **bias)
    assert torch.equal(stream, want[2]) and torch.equal(y[0], norm.plain(want[2], weight, EPS, **bias))
    both = norm.plain(x, weight, EPS, residual=x, **bias)[1]
    assert torch.equal(both, (x.float() * 2).to(dtype))


def test_other_overlaps_are_refused():
    memory, weight = torch.randn(400), torch.ones(40)
    x, residual = memory[:80].view(2, 40), memory[100:180].view(2, 40)
    q, scale = torch.empty(2, 40, dtype=torch.int8), torch.empty(2, 1)
    sums = scale.view(torch.int32)
    cases = [
        ({"residual_out": memory[101:181].view(2, 40)}, "residual_out: .*overlaps residual"),
        ({"residual_out": memory[40:120].view(2, 40)}, "residual_out: .*overlaps x"),
        ({"out": (memory.view(torch.int8)[:80].view(2, 40), scale)}, r"out\[0\]: .*overlaps x"),
        ({"out": (q, memory[100:102].view(2, 1))}, r"out\[1\]: .*overlaps residual"),
        ({"out": (q, memory[100:102].view(2, 1)), "residual_out": residual}, r"out\[1\]: .*overlaps residual_out"),
        ({"out": (q, scale, sums), "return_sums": True}, r"out\[2\]: .*overlaps out\[1\]"),
    ]
    before = memory.clone()
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            sk.rms_norm_quantize_int8(x, weight, EPS, residual=residual, **options)
    with pytest.raises(ValueError, match=r"out: .*overlaps residual_out"):
        sk.rms_norm(x, weight, EPS, residual=residual, residual_out=residual, out=residual)
    with pytest.raises(ValueError, match=r"out: .*overlaps weight"):
        sk.rms_norm(x[:1], weight, EPS, out=weight.view(1, 40))
    with pytest.raises(ValueError, match=r"out: .*overlaps bias"):
        sk.layer_norm(x[:1], torch.ones(40), EPS, bias=weight, out=weight.view(1, 40))
    assert torch.equal(memory, before)


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (2, 0, 8)])
def test_nothing_to_do(backend, norm, shape):
    x, weight, bias = torch.empty(shape), torch.ones(shape[-1]), norm.bias(shape[-1], torch.float32)
    q, scale, sums, total = norm.fused(x, weight, EPS, residual=x, return_sums=True, **bias)
    assert q.shape == total.shape == shape and scale.shape == sums.shape == (*shape[:-1], 1)
    assert not scale.any() and not sums.any() and norm.plain(x, weight, EPS, **bias).shape == shape


@each_dtype
def test_zero_rows_and_bad_values_stay_in_their_row(backend, norm, dtype):
    x, weight = randn(4, 40, dtype=dtype), randn(40, dtype=dtype, seed=1)
    x[1], x[2, 7], x[3, 39] = 0, float("nan"), float("inf")
    q, scale = norm.fused(x, weight, EPS)
    same((q[:1], scale[:1]), norm.fused(x[:1], weight, EPS))
    # A zero row has scale 0 as in quantize_int8; Inf / Inf is NaN.
    assert not q[1:].any() and scale[1].item() == 0 and scale[2:].isnan().all()


def test_refusals(norm):
    x, weight = torch.randn(4, 8), torch.ones(8)
    cases = [
        (lambda op: op(x, torch.ones(7), EPS), ValueError, r"weight: expected shape \[8\], got \[7\]"),
        (lambda op: op(x, weight.bfloat16(), EPS), TypeError, "weight: expected dtype float32"),
        (lambda op: op(x.bfloat16(), weight, EPS), TypeError, "weight: expected dtype bfloat16"),
        (lambda op: op(x, torch.ones(16)[::2], EPS), ValueError, "weight: expected a contiguous"),
        (lambda op: op(x, weight, -1.0), ValueError, "eps"),
        (lambda op: op(x, weight, float("nan")), ValueError, "eps"),
        (lambda op: op(x, weight, "1e-5"), TypeError, "eps"),
        (lambda op: op(x.t(), torch.ones(4), EPS), ValueError, "x: expected a contiguous last dimension"),
        (lambda op: op(x.int(), weight, EPS), TypeError, "x: expected dtype"),
        (lambda op: op(x.to("meta"), weight, EPS), ValueError, "x: .*meta"),
        (lambda op: op(x.clone().requires_grad_(), weight, EPS), ValueError, "x: .*require grad"),
        (lambda op: op(x, weight, EPS, residual=x[:3]), ValueError, "residual: expected shape"),
        (lambda op: op(x, weight, EPS, residual=x.half()), TypeError, "residual: expected dtype"),
        (lambda op: op(x, weight, EPS, residual_out=x), ValueError, "residual_out: expected None"),
    ]
    for call, error, message in cases:
        for operation in (norm.plain, norm.fused):
            with pytest.raises(error, match=message):
                call(operation)
    with pytest.raises(TypeError, match="out: expected dtype float32"):
        norm.plain(x, weight, EPS, out=x.half())
    with pytest.raises(ValueError, match="group_size"):
        norm.fused(x, weight, EPS, group_size=3)
    with pytest.raises(TypeError, match=r"out: expected \(q, scale\)"):
        norm.fused(x, weight, EPS, out=x)
    with pytest.raises(TypeError, match=r"out: expected \(q, scale, sums\)"):
        norm.fused(x, weight, EPS, return_sums=True, out=sk.quantize_int8(x))


def test_a_bad_bias_is_refused():
    x, weight = torch.randn(4, 8), torch.ones(8)
    for bias, error in ((torch.ones(7), ValueError), (weight.half(), TypeError), (1.0, TypeError)):
        for operation in (sk.layer_norm, sk.layer_norm_quantize_int8):
            with pytest.raises(error, match="bias: expected"):
                operation(x, weight, EPS, bias=bias)


@pytest.mark.skipif(not CPU, reason="needs the compiled module")
def test_recorded_calls_run_again(norm):
    x, stream, weight, bias = torch.randn(2, 64), torch.randn(2, 64), torch.ones(64), norm.bias(64, torch.float32)
    out = torch.empty(2, 64, dtype=torch.int8), torch.empty(2, 1)
    with sk.record() as recording:
        norm.fused(x, weight, EPS, residual=stream, residual_out=stream, out=out, **bias)
    before = stream.clone()
    x.copy_(torch.randn(2, 64))
    recording.run()
    assert torch.equal(stream, before + x)
    same(out, norm.fused(stream, weight, EPS, **bias))
