"""silu * up and gelu * up, plain and fused with int8: the formulas, fused = unfused, memory, refusals."""

import functools
import math
from dataclasses import dataclass
from typing import Any

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

BF16, F32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")
LENGTHS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 33, 46, 255, 257, 576, 1076, 1368, 3584)


@dataclass
class Gate:
    """A plain operation, its fused form, and the function of f64 values that it applies to the first half."""

    plain: Any
    fused: Any
    exact: Any


def _gelu(approximate, exact):
    plain = functools.partial(sk.gelu_mul, approximate=approximate)
    return Gate(plain, functools.partial(sk.gelu_mul_quantize_int8, approximate=approximate), exact)


GATES = {
    "silu": Gate(sk.silu_mul, sk.silu_mul_quantize_int8, lambda x: x / (1 + torch.exp(-x))),
    "gelu": _gelu("none", lambda x: 0.5 * x * torch.erfc(-x / math.sqrt(2))),
    "gelu-tanh": _gelu("tanh", lambda x: x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
}


@pytest.fixture(params=FEW_BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


@pytest.fixture(params=GATES)
def gate(request):
    return GATES[request.param]


# ---- what the plain operations mean ----------------------------------------------------------------------------------


@each_dtype
def test_by_hand(backend, gate, dtype):
    x = randn(9, 2 * 333, dtype=dtype) * 3
    first, up = x.double().chunk(2, -1)
    exact = gate.exact(first)
    got = gate.plain(x).double()
    if dtype is F32:
        # f32 may lose up to 2^-23 of the first factor where 1 + erf or 1 + tanh cancels.
        assert ((got - exact * up).abs() <= 1e-6 * (exact * up).abs() + 2.0**-23 * (first * up).abs()).all()
    else:
        want = (exact.to(dtype).float() * up.float()).to(dtype).double()
        assert (got != want).double().mean() <= 2e-2  # next to a tie of the 16-bit type it may go the other way
        step = 2.0 ** (-7 if dtype is BF16 else -10)
        assert ((got - want).abs() <= step * want.abs() + 2.0**-23 * (first * up).abs()).all()


@pytest.mark.parametrize("name", CPU)
def test_accurate_to_the_last_places(name, gate):
    # The compiled kernels cancel nothing: also where a value is 1e-30, its relative error stays below 5e-7.
    x = torch.cat([torch.linspace(-12.5, 12.5, 100_001), torch.linspace(-1e-3, 1e-3, 1001)])
    with running(name):
        got = gate.plain(torch.cat([x, torch.ones_like(x)])).double()
    exact = gate.exact(x.double())
    error = ((got - exact) / exact).abs()[exact.abs() > 1e-36]
    assert error.max() < 5e-7 and error.mean() < 1e-7


def test_known_values(backend):
    gate_up = torch.tensor([1.0, -1.0, 0.5, 2.0, -3.0, 1.0, 1.0, 2.0, -0.5, 4.0])
    up = gate_up[5:].tolist()
    for approximate, want in (
        ("none", [0.8413447, -0.1586553, 0.3457312, 1.9544997, -0.0040497]),
        ("tanh", [0.8411920, -0.1588080, 0.3457140, 1.9545977, -0.0036374]),
    ):
        got = sk.gelu_mul(gate_up, approximate=approximate).tolist()
        assert got == pytest.approx([a * b for a, b in zip(want, up, strict=True)], abs=4e-7)
    assert sk.silu_mul(gate_up).tolist() == pytest.approx(
        [0.7310586, -0.2689414, 0.6224593, -0.8807971, -0.5691104], abs=2e-6
    )


def test_silu_at_the_ends(backend):
    gate = torch.tensor([0.0, -0.0, 1e-40, 20, 88, 89, 1e30, -20, -87, -89, -1e30, INF, -INF, NAN])
    y = sk.silu_mul(torch.cat([gate, torch.ones(14)]))
    assert y[:3].tolist() == [0, 0, pytest.approx(5e-41, rel=1e-4)]
    assert y[3:7].tolist() == [pytest.approx(20, rel=1e-6), 88, 89, pytest.approx(1e30)]
    assert y[7].item() == pytest.approx(-20 * math.exp(-20), rel=1e-6)
    assert -1.5e-36 < y[8].item() < -1.4e-36 and y[9:11].tolist() == [0, 0]
    assert y[11].item() == INF and y[12:].isnan().all()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_at_the_ends(backend, approximate):
    gate = torch.tensor([0.0, -0.0, 20, 88, 3e38, -20, -88, -3e38, INF, -INF, NAN])
    y = sk.gelu_mul(torch.cat([gate, torch.ones(11)]), approximate=approximate)
    assert y[:8].tolist() == [0, 0, 20, 88, gate[4].item(), 0, 0, 0]
    assert y[8].item() == INF and y[9:].isnan().all()  # -Inf * 0, as the formula has it


# ---- fused = unfused -------------------------------------------------------------------------------------------------


@each_dtype
def test_ties_round_to_even(backend, gate, dtype):
    up = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], dtype=dtype) / 64
    q, scale = gate.fused(torch.cat([torch.full((8,), 64, dtype=dtype), up]))  # silu(64) = gelu(64) = 64
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -2, 126] and scale.item() == 1.0


@each_dtype
@pytest.mark.parametrize("cols, group", [(46, None), (46, 23), (577, None), (576, 192), (1536, 256), (64, 1)])
def test_fused_equals_unfused(backend, gate, dtype, cols, group):
    for size in (1.0, 30.0, 1e-3):
        x = randn(6, 2 * cols, dtype=dtype, seed=3) * size
        want = sk.quantize_int8(gate.plain(x), group_size=group, return_sums=True)
        same(gate.fused(x, group_size=group, return_sums=True), want)
        same(gate.fused(x, group_size=group), want[:2])


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
@each_dtype
def test_close_to_the_reference(name, gate, dtype):
    x = randn(4 if INTERPRETED else 100, 1536, dtype=dtype)
    with running(name):
        got = gate.fused(x, group_size=256)
    differ_rarely(got, on_reference(gate.fused, x, group_size=256))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_gives_the_same_bits(gate, dtype):
    x, results = randn(40, 1002, dtype=dtype) * 4, []
    for name in CPU:
        with running(name):
            results.append((gate.plain(x), *gate.fused(x, group_size=3)))
    for other in results[1:]:
        same(other, results[0])


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
@each_dtype
def test_a_row_depends_on_nothing_else(name, gate, dtype):
    x = randn(300, 576, dtype=dtype)
    with running(name):

        def call(rows):
            return *gate.fused(x[rows], group_size=96, return_sums=True), gate.plain(x[rows])

        with torch_threads(1):
            want = call(slice(None))
        with torch_threads(2):
            same(call(slice(None)), want)
        same(call(slice(123, 124)), [part[123:124] for part in want])
        same(call(slice(5, 200)), [part[5:200] for part in want])


# ---- memory ----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("at", ["start", "end"])
def test_every_length_between_guard_pages(backend, gate, dtype, at):
    for cols in LENGTHS:
        x = guarded_like(randn(3, 2 * cols, dtype=dtype, seed=cols), at=at)
        per_row = guarded((3, 1), F32, at=at), guarded((3, 1), torch.int32, at=at)
        out, plain = (guarded((3, cols), torch.int8, at=at), *per_row), guarded((3, cols), dtype, at=at)
        assert gate.plain(x, out=plain) is plain
        same(gate.fused(x, return_sums=True, out=out), sk.quantize_int8(plain, return_sums=True))


@pytest.mark.parametrize("name", ROW_BACKENDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 257] + ([] if INTERPRETED else [65536]))
def test_every_number_of_rows(name, rows):
    x = randn(rows, 64)
    with running(name):
        got = sk.silu_mul_quantize_int8(x)
        same(got, sk.quantize_int8(sk.silu_mul(x)))
    differ_rarely(got, on_reference(sk.silu_mul_quantize_int8, x))


@each_dtype
def test_rows_any_distance_apart(backend, gate, dtype):
    base = randn(7, 200, dtype=dtype)
    for x in (base[:, 3:63], base[:, :60], base[::2], base.view(7, 2, 100)[:, 1], base[1:2].expand(5, 200)):
        want = gate.fused(x.contiguous(), return_sums=True)
        same(gate.fused(x, return_sums=True), want)
        rows, cols = want[0].shape
        wide, scale = torch.full((rows, cols + 9), 99, dtype=torch.int8), torch.full((rows, 3), 99.0)
        sums = torch.full((rows, 3), 99, dtype=torch.int32)
        out = wide[:, 2:-7], scale[:, 1:2], sums[:, 1:2]
        same(gate.fused(x, return_sums=True, out=out), want)
        assert wide[:, :2].eq(99).all() and wide[:, -7:].eq(99).all()
        assert scale[:, ::2].eq(99).all() and sums[:, ::2].eq(99).all()
        same([gate.plain(x)], [gate.plain(x.contiguous())])


@each_dtype
def test_any_alignment(backend, gate, dtype):
    x = randn(2, 92, dtype=dtype)
    want = gate.fused(x, group_size=23)
    for offset in range(16):
        shifted = torch.zeros(2 * 92 + 16, dtype=dtype)[offset:][: 2 * 92].view(2, 92).copy_(x)
        q = torch.zeros(200, dtype=torch.int8)[offset : offset + 92].view(2, 46)
        same(gate.fused(shifted, group_size=23, out=(q, torch.zeros(20)[offset % 4 :][:4].view(2, 2))), want)


@pytest.mark.parametrize("name", [b for b in ROW_BACKENDS if b != "reference"])
def test_offsets_need_64_bits(name):
    step = 2**30 + 8  # row 2 starts past 2^31 elements
    x = guarded((3, 80), BF16, row_stride=step).copy_(randn(3, 80, dtype=BF16))
    q, y = guarded((3, 40), torch.int8, row_stride=step), guarded((3, 40), BF16, row_stride=step)
    with running(name):
        got = sk.silu_mul_quantize_int8(x, out=(q, torch.empty(3, 1)))
        same(got, sk.silu_mul_quantize_int8(x.contiguous()))
        same([sk.gelu_mul(x, out=y)], [sk.gelu_mul(x.contiguous())])


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (2, 0, 8)])
def test_nothing_to_do(backend, gate, shape):
    x, half = torch.empty(shape), (*shape[:-1], shape[-1] // 2)
    q, scale, sums = gate.fused(x, return_sums=True)
    assert q.shape == gate.plain(x).shape == half and scale.shape == sums.shape == (*shape[:-1], 1)
    assert not scale.any() and not sums.any()


@each_dtype
def test_zero_rows_and_bad_values_stay_in_their_row(backend, gate, dtype):
    x = randn(4, 40, dtype=dtype)
    x[1], x[2, 7], x[3, 39] = 0, NAN, INF
    q, scale = gate.fused(x)
    same((q[:1], scale[:1]), gate.fused(x[:1]))
    assert not q[1:].any() and scale[1].item() == 0 and scale[2].isnan() and not scale[3].isfinite()


def test_refusals(gate):
    x = torch.randn(4, 8)
    cases = [
        (lambda op: op(torch.randn(4, 7)), ValueError, "gate_up: expected an even"),
        (lambda op: op(x.double()), TypeError, "gate_up: expected dtype"),
        (lambda op: op(x.t()), ValueError, "gate_up: expected a contiguous last dimension"),
        (lambda op: op(x.clone().requires_grad_()), ValueError, "gate_up: .*require grad"),
        (lambda op: op(x.to("meta")), ValueError, "gate_up: .*meta"),
        (lambda op: op(None), TypeError, "gate_up: expected a torch.Tensor"),
    ]
    for call, error, message in cases:
        for operation in (gate.plain, gate.fused):
            with pytest.raises(error, match=message):
                call(operation)
    with pytest.raises(ValueError, match=r"group_size: expected a divisor .* 4, got 8"):
        gate.fused(x, group_size=8)
    with pytest.raises(ValueError, match=r"out: .*overlaps gate_up"):
        gate.plain(x, out=x[:, :4])
    with pytest.raises(TypeError, match=r"out: expected \(q, scale\), got 3 tensors"):
        gate.fused(x, out=gate.fused(x, return_sums=True))


@pytest.mark.parametrize("approximate", ["erf", "Tanh", None, True])
def test_other_approximations_are_refused(approximate):
    for operation in (sk.gelu_mul, sk.gelu_mul_quantize_int8):
        with pytest.raises(ValueError, match='approximate: expected "none" or "tanh"'):
            operation(torch.randn(4, 8), approximate=approximate)


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_every_16_bit_gate_is_the_references_but_for_rounding_ties(name, gate, dtype):
    """Half a step decides a few of the 65,536 otherwise, by one place: 5 * 2^-24 / 2 is 0 or the next number, say.

    So times infinity such a result may be NaN on one backend and infinite on another.
    """
    gates = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = torch.stack([gates, torch.ones_like(gates)], 1)
    want = on_reference(gate.plain, x)
    with running(name):
        got = gate.plain(x)
    differ = (got != want) & ~(got.isnan() & want.isnan()) & (want.float().abs() > 2e-37)
    place = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert differ.sum() <= 8 and bool((place[differ] <= 1).all())
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.skipif(not CPU, reason="needs the compiled module")
def test_recorded_calls_run_again(gate):
    x, out = torch.randn(2, 64), torch.empty(2, 32)
    with sk.record() as recording:
        gate.plain(x, out=out)
    x.copy_(torch.randn(2, 64))
    recording.run()
    assert torch.equal(out, gate.plain(x))
    with sk.record() as recording:
        gate.plain(torch.randn(2, 3, 4).transpose(0, 1))
    assert not recording.complete
