"""Quantise, norms and gates interpreted: the codes of the reference, and fused = plain then quantised."""

import itertools

import pytest
import torch

import specdec_kernels as sk
from guard import guarded
from int8_backends import DTYPES, on_reference, randn, same
from specdec_kernels import registry
from verify_cases import running

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on 0 / 0 and the like
NAN, INF = float("nan"), float("inf")
LENGTHS = (1, 2, 3, 5, 7, 13, 17, 31, 33, 46, 1076, 1368, 3584)
COUNTS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 33)
MODES = ({}, {"symmetric": False, "return_sums": True}, {"stochastic_seed": 2**64 - 5, "stochastic_offset": 7})


@pytest.fixture(autouse=True)
def on_triton():
    with running("triton"):
        yield


def parts(result):
    """The tensors of a result, which may be one or hold the caller's own numbers."""
    return [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, torch.Tensor)]


def agrees(function, *args, **options):
    same(parts(function(*args, **options)), parts(on_reference(function, *args, **options)))


# ---- quantise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cols", LENGTHS)
def test_every_length(cols):
    for dtype, mode in zip(DTYPES, MODES, strict=True):
        agrees(sk.quantize_int8, randn(3, cols, dtype=dtype, seed=cols), **mode)


@pytest.mark.slow
@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length_dtype_and_count(cols, dtype):
    groups = {cols, 1, *(g for g in (2, 3, 4, 12, 64, 128, 538) if cols % g == 0)}
    for count, mode in itertools.product(COUNTS, (*MODES, {"symmetric": False, "stochastic_seed": 1})):
        x = randn(count, cols, dtype=dtype, seed=count)
        for group in groups if count == 3 else {cols}:
            agrees(sk.quantize_int8, x, group_size=group, **mode)


@pytest.mark.parametrize("rows", COUNTS)
def test_every_count_of_rows(rows):
    x = randn(rows, 33, seed=rows)
    agrees(sk.quantize_int8, x, return_sums=True)
    whole = sk.quantize_int8(x)
    for i in range(0, rows, 10):
        same(sk.quantize_int8(x[i : i + 1]), [part[i : i + 1] for part in whole])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 5), (2, 3, 5), (7,)])
def test_empty_and_deep_shapes(shape):
    x = torch.randn(shape)
    agrees(sk.quantize_int8, x, return_sums=True)
    agrees(sk.quantize_int8, x, symmetric=False)
    if shape[-1]:
        agrees(sk.rms_norm_quantize_int8, x, torch.ones(shape[-1]), 1e-5, residual=x)


def hard_rows(dtype):
    """Rows of 8: ties, zeros, tiny and huge values, NaN and Inf in every place that differs."""
    big, tiny = torch.finfo(dtype).max, 127 * 2.0**-126
    rows = [
        [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], [0.0] * 8, [-0.0] * 8, [3.0] * 8, [-3.0] * 8,
        [big, -big, 1, 0, big / 2, 0, 0, 0], [tiny, -tiny, tiny / 2, 0, 0, 0, 0, 0], [tiny * (1 - 2**-8)] + [0] * 7,
        [1e-45, 2.0**-149, -9.18e-41, 0, 0, 0, 0, 0], [1.1754944e-38, 0, 0, 0, 0, 0, 0, -1e-40],
        [NAN] + [1.0] * 7, [1.0] * 7 + [NAN], [1.0, -NAN, INF, 2.0, -INF, 0, 0, 0], [INF] + [1.0] * 7,
        [1.0] * 7 + [-INF], [INF, -INF] * 4, [100, 101, 100.5, 100.25, 100, 101, 101, 101],
        [0, 1, 127, 255, 0, 1, 1, 1], [127.4, 127.5, 127.6, 128, 300, -127.6, -128.4, -300],
        [5.96e-8, 1.19e-7, 1.79e-7, 2.38e-7, 0, 0, 0, 0],
    ]  # fmt: skip
    return torch.tensor(rows, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [8, 2])
def test_hard_rows(dtype, group):
    x = hard_rows(dtype)
    for mode in MODES:
        agrees(sk.quantize_int8, x, group_size=group, **mode)
    agrees(sk.quantize_int8, x, scale=1.0)
    agrees(sk.quantize_int8, x, scale=1e-3, stochastic_seed=3)
    for zero_point in (0, 5, -128, 127, -(2**31), 2**31 - 1, -25628):
        agrees(sk.quantize_int8, x, scale=1.0, zero_point=zero_point, symmetric=False)
        agrees(sk.quantize_int8, x, scale=2.0**-20, zero_point=zero_point, symmetric=False, stochastic_seed=9)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_bad_static_scale_on_a_device_gives_codes_0(symmetric):
    """Behind the public function's back: it can look at the values of CPU tensors only."""
    x, scale = randn(6, 8), torch.tensor([[1.0], [0.0], [-1.0], [NAN], [INF], [-INF]])
    q, sums = torch.full((6, 8), 99, dtype=torch.int8), torch.full((6, 1), 99, dtype=torch.int32)
    zero_point = None if symmetric else torch.full((6, 1), 3, dtype=torch.int32)
    registry.call("quantize_int8", "cpu", x, 8, symmetric, True, None, 0, q, scale, zero_point, sums)
    assert q[0].any() and not q[1:].any() and sums[1:].tolist() == [[0]] * 5 and sums[0] == q[0].sum()


@pytest.mark.parametrize("offset", [0, 4, 5, 2**34 - 1, 2**63 - 6, 2**64 - 8])
def test_stochastic_rounding_is_keyed_by_the_element(offset):
    x = randn(3, 12) * 5
    whole = sk.quantize_int8(x, scale=0.3, stochastic_seed=11, stochastic_offset=offset)[0]
    same([whole], on_reference(sk.quantize_int8, x, scale=0.3, stochastic_seed=11, stochastic_offset=offset)[:1])
    for i in range(3):
        chunk = sk.quantize_int8(x[i], scale=0.3, stochastic_seed=11, stochastic_offset=(offset + 12 * i) % 2**64)[0]
        assert torch.equal(chunk, whole[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_stride_and_place(dtype):
    wide = randn(5, 100, dtype=dtype)
    for x in (wide[:, 3:49], wide[:, 1:47], wide[::2, 16:62], wide[:1, :46].expand(5, 46)):
        out = torch.full((len(x), 47), 99, dtype=torch.int8)[:, 1:], torch.full((len(x), 3), NAN)[:, 1:2]
        frames = out[0]._base, out[1]._base
        same(sk.quantize_int8(x, out=out), on_reference(sk.quantize_int8, x.contiguous()))
        assert (frames[0][:, 0] == 99).all() and frames[1][:, ::2].isnan().all()


def test_rows_beyond_32_bits():
    stride, x = 2**31 + 8, randn(3, 40, dtype=torch.bfloat16)
    far, out = guarded((3, 40), torch.bfloat16, row_stride=stride), guarded((3, 40), torch.int8, row_stride=stride)
    far.copy_(x)
    same(sk.quantize_int8(far, out=(out, torch.empty(3, 1))), on_reference(sk.quantize_int8, x))
    y = guarded((3, 40), torch.bfloat16, row_stride=stride)
    sk.rms_norm(far, x[0], 1e-5, out=y)
    same([y.contiguous()], [on_reference(sk.rms_norm, x, x[0], 1e-5)])


def test_long_rows():
    cols = 20_001
    for dtype, mode in zip(DTYPES, MODES, strict=True):
        agrees(sk.quantize_int8, randn(2, cols, dtype=dtype), **mode)
    x, weight = randn(2, cols, dtype=torch.bfloat16), randn(cols, dtype=torch.bfloat16, seed=1)
    agrees(sk.layer_norm, x, weight, 1e-5, bias=weight, residual=x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols, group", [(46, None), (46, 23), (128, 32), (1180, 59)])
def test_dequantise(dtype, cols, group):
    q, scale, zero_point = sk.quantize_int8(randn(3, cols), group_size=group, symmetric=False)
    far = torch.tensor([[2**31 - 1], [-(2**31)], [7]], dtype=torch.int32)
    for args in ((q, scale), (q, scale, zero_point), (q, 0.3, -7), (q, scale, far)):
        agrees(sk.dequantize_int8, *args, dtype=dtype)


# ---- norms and gates -------------------------------------------------------------------------------------------------

GROUPS = [(46, None), (46, 23), (576, 64), (576, 192), (64, 1)]


@pytest.mark.parametrize("cols, group", GROUPS)
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_norm_quantised_is_the_plain_one_then_quantised(cols, group, norm):
    plain, fused = getattr(sk, f"{norm}_norm"), getattr(sk, f"{norm}_norm_quantize_int8")
    for dtype, scale in zip(DTYPES, (1.0, 30.0, 1e-3), strict=True):
        x, residual = randn(3, cols, dtype=dtype) * scale, randn(3, cols, dtype=dtype, seed=1) * scale
        weight = randn(cols, dtype=dtype, seed=2)
        options = {"bias": weight.flip(0)} if norm == "layer" else {}
        y, total = plain(x, weight, 1e-5, residual=residual, **options)
        same((y, total), on_reference(plain, x, weight, 1e-5, residual=residual, **options))
        want = (*sk.quantize_int8(y, group_size=group, return_sums=True), total)
        options |= {"group_size": group, "return_sums": True}
        same(fused(x, weight, 1e-5, residual=residual, **options), want)


@pytest.mark.parametrize("rows", COUNTS)
def test_a_norm_of_any_count_of_rows(rows):
    x, weight = randn(rows, 40, dtype=torch.bfloat16), randn(40, dtype=torch.bfloat16)
    agrees(sk.rms_norm_quantize_int8, x, weight, 1e-5, group_size=8)
    agrees(sk.layer_norm, x, weight, 1e-5)


@pytest.mark.parametrize("group", [None, 20, 64])
def test_a_residual_is_updated_in_place(group):
    cols = 16_640 if group is None else 320
    for name in ("residual", "x"):
        x, residual, weight = randn(3, cols), randn(3, cols, seed=1), randn(cols, seed=2)
        want = on_reference(sk.rms_norm_quantize_int8, x, weight, 1e-5, residual=residual, group_size=group)
        to = {"x": x, "residual": residual}[name]
        same(sk.rms_norm_quantize_int8(x, weight, 1e-5, residual=residual, residual_out=to, group_size=group), want)
        assert torch.equal(to, want[-1])


def test_bad_values_stay_in_their_row():
    x, weight = randn(5, 64), torch.ones(64)
    x[1, 3], x[3, 63] = NAN, INF
    agrees(sk.rms_norm_quantize_int8, x, weight, 0.0, group_size=16)
    agrees(sk.layer_norm_quantize_int8, x, weight, 0.0, group_size=16)
    agrees(sk.rms_norm, torch.tensor([[3e38, -3e38, 1e38, 0.0], [1e-30, 2e-30, 0.0, 0.0]]), torch.ones(4), 1e-300)


GATES = (
    (sk.silu_mul, sk.silu_mul_quantize_int8, {}),
    (sk.gelu_mul, sk.gelu_mul_quantize_int8, {}),
    (sk.gelu_mul, sk.gelu_mul_quantize_int8, {"approximate": "tanh"}),
)


@pytest.mark.parametrize("cols, group", [(46, None), (46, 23), (128, 64), (17_000, 17_000)])
@pytest.mark.parametrize("plain, fused, options", GATES)
def test_a_gate_quantised_is_the_plain_one_then_quantised(plain, fused, options, cols, group):
    for dtype in DTYPES if cols < 1000 else DTYPES[2:]:
        x = randn(1 if cols > 1000 else 3, 2 * cols, dtype=dtype) * 3
        y, want = plain(x, **options), on_reference(plain, x, **options)
        assert dtype is torch.float32 or (y != want).double().sum() <= 1 + want.numel() / 500
        torch.testing.assert_close(y, want, rtol=5e-6 if dtype is torch.float32 else torch.finfo(dtype).eps, atol=1e-36)
        want = sk.quantize_int8(y, group_size=group, return_sums=True)
        same(fused(x, group_size=group, return_sums=True, **options), want)


@pytest.mark.parametrize("plain, fused, options", GATES)
def test_a_gate_at_the_ends(plain, fused, options):
    gate = torch.tensor([0.0, -0.0, 1e-40, 20, 88, 89, 1e30, -20, -87, -89, -1e30, INF, -INF, NAN])
    x = torch.cat([gate, torch.ones(14)])
    y, want = plain(x, **options), on_reference(plain, x, **options)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-38, equal_nan=True)
