"""RMS norm and silu * up, plain and fused with int8: the rounding rules, fused = unfused, in-place residuals."""

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from guard import guarded, guarded_like
from int8_backends import (
    BACKENDS,
    CPU,
    DTYPES,
    OTHERS,
    each_dtype,
    on_reference,
    randn,
    running,
    same,
    torch_threads,
)

EPS = 1e-5
LENGTHS = (1, 2, 7, 13, 16, 33, 46, 255, 257, 576, 1076, 1536)


@pytest.fixture(params=BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


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


def test_weight_multiplies_the_rounded_value(backend):
    # One rounding more or less is visible: bf16(bf16(h / rms) * w) is not bf16(h / rms * w) for these.
    x, weight = randn(8, 256, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16, seed=1)
    y = sk.rms_norm(x, weight, EPS)
    inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).float()
    once = (x.float() * inverse * weight.float()).bfloat16()
    assert (y != once).sum() > 100


@each_dtype
def test_silu_mul_by_hand(backend, dtype):
    x = randn(9, 2 * 333, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + torch.exp(-gate))
    got = sk.silu_mul(x).double()
    if dtype is torch.float32:
        assert ((got - exact * up).abs() <= 4e-7 * (exact * up).abs()).all()
    else:
        want = (exact.to(dtype).float() * up.float()).to(dtype).double()
        assert (got != want).double().mean() <= 1e-3  # silu next to a tie of the 16-bit type may go the other way
        assert ((got - want).abs() <= 2.0 ** (-7 if dtype is torch.bfloat16 else -10) * want.abs()).all()


def test_silu_at_the_ends(backend):
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([0.0, -0.0, 1e-40, 20, 88, 89, 1e30, -20, -87, -89, -1e30, inf, -inf, nan])
    y = sk.silu_mul(torch.cat([gate, torch.ones(14)]))
    assert y[:3].tolist() == [0, 0, pytest.approx(5e-41, rel=1e-4)]
    assert y[3:7].tolist() == [pytest.approx(20, rel=1e-6), 88, 89, pytest.approx(1e30)]
    assert y[7].item() == pytest.approx(-20 * math.exp(-20), rel=1e-6)
    assert -1.5e-36 < y[8].item() < -1.4e-36 and y[9:11].tolist() == [0, 0]
    assert y[11].item() == inf and y[12:].isnan().all()


# ---- fused = unfused -------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("cols, group", [(46, None), (46, 23), (577, None), (576, 192), (1536, 256), (64, 1)])
def test_fused_equals_unfused(backend, dtype, cols, group):
    for scale in (1.0, 30.0, 1e-3):
        x, residual = randn(6, cols, dtype=dtype) * scale, randn(6, cols, dtype=dtype, seed=1)
        weight = randn(cols, dtype=dtype, seed=2)
        y, total = sk.rms_norm(x, weight, EPS, residual=residual)
        want = sk.quantize_int8(y, group_size=group)
        same(sk.rms_norm_quantize_int8(x, weight, EPS, residual=residual, group_size=group), (*want, total))
        want = sk.quantize_int8(sk.rms_norm(x, weight, EPS), group_size=group)
        same(sk.rms_norm_quantize_int8(x, weight, EPS, group_size=group), want)
        x = randn(6, 2 * cols, dtype=dtype, seed=3) * scale
        want = sk.quantize_int8(sk.silu_mul(x), group_size=group)
        same(sk.silu_mul_quantize_int8(x, group_size=group), want)


@pytest.mark.parametrize("name", OTHERS)
@each_dtype
def test_close_to_the_reference(name, dtype):
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(200, 1536), (200, 1536), (1536,)]))
    with running(name):
        fused = sk.rms_norm_quantize_int8(x, weight, EPS, residual=residual, group_size=192)
        gated = sk.silu_mul_quantize_int8(x, group_size=256)
    _differ_rarely(fused, on_reference(sk.rms_norm_quantize_int8, x, weight, EPS, residual=residual, group_size=192))
    _differ_rarely(gated, on_reference(sk.silu_mul_quantize_int8, x, group_size=256))


def _differ_rarely(got, want):
    gap = (got[0].int() - want[0].int()).abs()
    assert gap.max() <= 1 and gap.double().mean() <= 1e-4
    torch.testing.assert_close(got[1], want[1], rtol=1e-2, atol=0)
    same(got[2:], want[2:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(dtype):
    x, weight = randn(40, 1002, dtype=dtype) * 4, randn(1002, dtype=dtype, seed=1)
    results = []
    for name in CPU:
        with running(name):
            results.append((sk.rms_norm(x, weight, EPS), sk.silu_mul(x), *sk.silu_mul_quantize_int8(x, group_size=3)))
    for other in results[1:]:
        same(other, results[0])


@pytest.mark.parametrize("name", CPU)
@each_dtype
def test_a_row_depends_on_nothing_else(name, dtype):
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(300, 576), (300, 576), (576,)]))
    with running(name):
        for call in (
            lambda rows: sk.rms_norm_quantize_int8(x[rows], weight, EPS, residual=residual[rows], group_size=64),
            lambda rows: sk.silu_mul_quantize_int8(x[rows], group_size=96),
            lambda rows: (sk.rms_norm(x[rows], weight, EPS), sk.silu_mul(x[rows])),
        ):
            with torch_threads(1):
                want = call(slice(None))
            with torch_threads(2):
                same(call(slice(None)), want)
            same(call(slice(123, 124)), [part[123:124] for part in want])
            same(call(slice(5, 200)), [part[5:200] for part in want])


# ---- memory ----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("at", ["start", "end"])
def test_every_length_between_guard_pages(backend, dtype, at):
    for cols in LENGTHS:
        x, residual, weight, gate_up = (
            guarded_like(randn(*shape, dtype=dtype, seed=cols), at=at)
            for shape in ((3, cols), (3, cols), (cols,), (3, 2 * cols))
        )
        out = guarded((3, cols), torch.int8, at=at), guarded((3, 1), torch.float32, at=at)
        plain, total = guarded((3, cols), dtype, at=at), guarded((3, cols), dtype, at=at)
        sk.rms_norm(x, weight, EPS, residual=residual, residual_out=total, out=plain)
        got = sk.rms_norm_quantize_int8(x, weight, EPS, residual=residual, residual_out=total, out=out)
        same(got, (*sk.quantize_int8(plain), (x.float() + residual.float()).to(dtype)))
        assert got[0].data_ptr() == out[0].data_ptr() and got[2] is total
        sk.silu_mul(gate_up, out=plain)
        same(sk.silu_mul_quantize_int8(gate_up, out=out), sk.quantize_int8(plain))


@each_dtype
def test_rows_any_distance_apart(backend, dtype):
    base, weight = randn(7, 200, dtype=dtype), randn(60, dtype=dtype, seed=1)
    x, residual = base[:, 3:63], base[::1, 70:130]
    want = sk.rms_norm_quantize_int8(x.contiguous(), weight, EPS, residual=residual.contiguous(), group_size=20)
    wide = torch.full((7, 80), 99, dtype=torch.int8)
    scale, total = torch.full((7, 5), 99.0), torch.full((7, 62), 9, dtype=dtype)
    got = sk.rms_norm_quantize_int8(
        x,
        weight,
        EPS,
        residual=residual,
        group_size=20,
        out=(wide[:, 7:67], scale[:, 1:4]),
        residual_out=total[:, 1:-1],
    )
    same(got, want)
    assert wide[:, :7].eq(99).all() and wide[:, 67:].eq(99).all() and scale[:, ::4].eq(99).all()
    assert total[:, ::61].eq(9).all()
    same(sk.silu_mul_quantize_int8(base[:, 3:63]), sk.silu_mul_quantize_int8(base[:, 3:63].contiguous()))
    same([sk.silu_mul(base.view(7, 2, 100)[:, 1])], [sk.silu_mul(base[:, 100:].contiguous())])


@each_dtype
@pytest.mark.parametrize("target", ["residual", "x"])
def test_residual_in_place(backend, dtype, target):
    x, residual, weight = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(3, 577), (3, 577), (577,)]))
    want = sk.rms_norm_quantize_int8(x, weight, EPS, residual=residual)
    stream, added = residual.clone(), x.clone()
    into = stream if target == "residual" else added
    got = sk.rms_norm_quantize_int8(added, weight, EPS, residual=stream, residual_out=into)
    same(got, want)
    assert got[2] is into and torch.equal(added if into is stream else stream, x if into is stream else residual)
    stream = residual.clone()
    y = sk.rms_norm(
        x, weight, EPS, residual=stream, residual_out=stream.view(3, 577)
    )  # the same memory, another tensor
    assert torch.equal(stream, want[2]) and torch.equal(y[0], sk.rms_norm(want[2], weight, EPS))
    both = sk.rms_norm(x, weight, EPS, residual=x)[1]
    assert torch.equal(both, (x.float() * 2).to(dtype))


def test_other_overlaps_are_refused():
    memory, weight = torch.randn(400), torch.ones(40)
    x, residual = memory[:80].view(2, 40), memory[100:180].view(2, 40)
    q, scale = torch.empty(2, 40, dtype=torch.int8), torch.empty(2, 1)
    cases = [
        ({"residual_out": memory[101:181].view(2, 40)}, "residual_out: .*overlaps residual"),
        ({"residual_out": memory[40:120].view(2, 40)}, "residual_out: .*overlaps x"),
        ({"out": (memory.view(torch.int8)[:80].view(2, 40), scale)}, r"out\[0\]: .*overlaps x"),
        ({"out": (q, memory[100:102].view(2, 1))}, r"out\[1\]: .*overlaps residual"),
        ({"out": (q, memory[100:102].view(2, 1)), "residual_out": residual}, r"out\[1\]: .*overlaps residual_out"),
    ]
    before = memory.clone()
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            sk.rms_norm_quantize_int8(x, weight, EPS, residual=residual, **options)
    with pytest.raises(ValueError, match=r"out: .*overlaps residual_out"):
        sk.rms_norm(x, weight, EPS, residual=residual, residual_out=residual, out=residual)
    with pytest.raises(ValueError, match=r"out: .*overlaps weight"):
        sk.rms_norm(x[:1], weight, EPS, out=weight.view(1, 40))
    with pytest.raises(ValueError, match=r"out: .*overlaps gate_up"):
        sk.silu_mul(x, out=x[:, :20])
    assert torch.equal(memory, before)


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (2, 0, 8)])
def test_nothing_to_do(backend, shape):
    x, weight = torch.empty(shape), torch.ones(shape[-1])
    q, scale, total = sk.rms_norm_quantize_int8(x, weight, EPS, residual=x)
    assert q.shape == total.shape == shape and scale.shape == (*shape[:-1], 1) and not scale.any()
    assert sk.rms_norm(x, weight, EPS).shape == shape
    half = (*shape[:-1], shape[-1] // 2)
    assert sk.silu_mul(x).shape == half and sk.silu_mul_quantize_int8(x)[0].shape == half


@each_dtype
def test_zero_rows_and_bad_values_stay_in_their_row(backend, dtype):
    x, weight = randn(4, 40, dtype=dtype), randn(40, dtype=dtype, seed=1)
    x[1] = 0
    x[2, 7] = float("nan")
    x[3, 39] = float("inf")
    q, scale = sk.rms_norm_quantize_int8(x, weight, EPS)
    same((q[:1], scale[:1]), sk.rms_norm_quantize_int8(x[:1], weight, EPS))
    # A zero row has scale 0 as in quantize_int8; Inf / Inf is NaN.
    assert not q[1:].any() and scale[1].item() == 0 and scale[2:].isnan().all()
    q, scale = sk.silu_mul_quantize_int8(x)
    assert not q[1:].any() and scale[1].item() == 0 and scale[2].isnan() and not scale[3].isfinite()


def test_squares_beyond_f32(backend):
    x = torch.tensor([[3e38, -3e38, 1e38, 0.0], [1e-30, 2e-30, 0.0, 0.0]])
    y = sk.rms_norm(x, torch.ones(4), 0)
    want = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=0)


def test_refusals():
    x, weight = torch.randn(4, 8), torch.ones(8)
    cases = [
        (lambda: sk.rms_norm(x, torch.ones(7), EPS), ValueError, r"weight: expected shape \[8\], got \[7\]"),
        (lambda: sk.rms_norm(x, weight.bfloat16(), EPS), TypeError, "weight: expected dtype float32"),
        (lambda: sk.rms_norm(x, torch.ones(16)[::2], EPS), ValueError, "weight: expected a contiguous"),
        (lambda: sk.rms_norm(x, weight, -1.0), ValueError, "eps"),
        (lambda: sk.rms_norm(x, weight, float("nan")), ValueError, "eps"),
        (lambda: sk.rms_norm(x, weight, "1e-5"), TypeError, "eps"),
        (lambda: sk.rms_norm(x, weight, EPS, residual=x[:3]), ValueError, "residual: expected shape"),
        (lambda: sk.rms_norm(x, weight, EPS, residual=x.half()), TypeError, "residual: expected dtype"),
        (lambda: sk.rms_norm(x, weight, EPS, residual_out=x), ValueError, "residual_out: expected None"),
        (lambda: sk.rms_norm(x, weight, EPS, out=x.half()), TypeError, "out: expected dtype float32"),
        (lambda: sk.rms_norm_quantize_int8(x, weight, EPS, group_size=3), ValueError, "group_size"),
        (lambda: sk.rms_norm_quantize_int8(x, weight, EPS, out=x), TypeError, "out: expected"),
        (lambda: sk.silu_mul(torch.randn(4, 7)), ValueError, "gate_up: expected an even"),
        (lambda: sk.silu_mul(x.double()), TypeError, "gate_up: expected dtype"),
        (lambda: sk.silu_mul_quantize_int8(x, group_size=8), ValueError, "group_size: expected a divisor .* 4, got 8"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_recorded_calls_run_again():
    x, stream, weight = torch.randn(2, 64), torch.randn(2, 64), torch.ones(64)
    out = torch.empty(2, 64, dtype=torch.int8), torch.empty(2, 1)
    with sk.record() as recording:
        sk.rms_norm_quantize_int8(x, weight, EPS, residual=stream, residual_out=stream, out=out)
    before = stream.clone()
    x.copy_(torch.randn(2, 64))
    recording.run()
    assert torch.equal(stream, before + x)
    same(out, sk.rms_norm_quantize_int8(stream, weight, EPS))
    with sk.record() as recording:
        sk.silu_mul(torch.randn(2, 3, 4).transpose(0, 1))
    assert not recording.complete
