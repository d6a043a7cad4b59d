"""quantize_int8 and dequantize_int8: the formula value by value, on every backend and instruction set."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from guard import guarded, guarded_like
from int8_backends import BACKENDS, DTYPES, each_dtype, on_reference, running_on, same, torch_threads

NAN, INF = float("nan"), float("inf")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=BACKENDS)
def backend(request):
    with running_on(request.param):
        yield request.param


def codes(x, **options):
    return sk.quantize_int8(torch.as_tensor(x), **options)[0].tolist()


def randn(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- the formula -----------------------------------------------------------------------------------------------------


@each_dtype
def test_ties_round_to_even(backend, dtype):
    x = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], dtype=dtype)
    want = [127, 0, 2, 2, 0, -2, -2, 126]
    q, scale = sk.quantize_int8(x)
    assert q.tolist() == want and scale.item() == 1.0
    assert codes(x.repeat(3, 5), group_size=8) == [want * 5] * 3
    assert codes(x, scale=1.0) == want


def test_rounds_and_does_not_truncate(backend):
    assert codes([127, 0.9, -0.9, 1.6, -1.6, 99.7]) == [127, 1, -1, 2, -2, 100]


def test_one_division_and_no_reciprocal(backend):
    # Values on and next to ties; numpy divides in IEEE f32. Multiplying by 1/scale gives other codes for many of them.
    amax = np.abs(randn(64, 1, seed=1).numpy()) + np.float32(0.1)
    scale = amax / np.float32(127)
    ties = (np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)) * scale
    x = np.concatenate([amax, *(ties * np.float32(1 + ulps * 2.0**-23) for ulps in (-3, -2, -1, 0, 1, 2, 3, 400))], 1)
    x = np.clip(x, -amax, amax)
    want = np.rint(x / scale).astype(np.int8)
    q, s = sk.quantize_int8(torch.from_numpy(x))
    assert np.array_equal(s.numpy(), scale) and np.array_equal(q.numpy(), want)
    assert (np.rint(x * (np.float32(1) / scale)) != want).sum() > 100


@each_dtype
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_rows(backend, dtype, position, zero):
    x = randn(5, 46, dtype=dtype)
    x[position] = zero
    for symmetric in (True, False):
        got = sk.quantize_int8(x, symmetric=symmetric)
        assert not got[0][position].any() and all(not part[position].any() for part in got[1:])
        assert torch.equal(sk.dequantize_int8(*got)[position], torch.zeros(46))
        others = [i for i in range(5) if i != position]
        same([part[others] for part in got], sk.quantize_int8(x[others], symmetric=symmetric))


def test_zero_group_among_others(backend):
    x = torch.cat([torch.zeros(128), torch.ones(128)])
    q, scale = sk.quantize_int8(x, group_size=128)
    assert q.tolist() == [0] * 128 + [127] * 128 and scale.tolist() == [0.0, float(np.float32(1) / np.float32(127))]


def test_memory_behind_the_row_does_not_matter(backend):
    base = torch.full((1, 32), 1e6)
    base[:, :13] = 2.0
    q, scale = sk.quantize_int8(base[:, :13])
    assert q.tolist() == [[127] * 13] and scale.item() == np.float32(2) / np.float32(127)


@pytest.mark.parametrize(
    "amax, dtype, blank",
    [
        (1e-45, F32, True),
        (9.18e-41, BF16, True),
        (1e-40, F32, True),
        (1.1754944e-38, F32, True),
        (127 * 2.0**-126 * (1 - 2**-23), F32, True),
        (127 * 2.0**-126, F32, False),
        (3.7e-37, F32, True),
        (1.6e-36, F32, False),
        (3e-6, F32, False),
        (1e-10, BF16, False),
        (6e-8, F16, False),
        (1e7, F32, False),
        (65504.0, F16, False),
        (3.3895314e38, BF16, False),
        (3.4028234663852886e38, F32, False),
    ],
)
def test_tiny_and_huge_rows(backend, amax, dtype, blank):
    m = torch.tensor(amax, dtype=torch.float64).to(dtype)
    x = torch.stack([m, -m, m / 2, torch.zeros((), dtype=dtype)]).repeat(5)
    q, scale = sk.quantize_int8(x)
    assert scale.item() == (0.0 if blank else float(np.float32(m.item()) / np.float32(127)))
    half = round(float(np.float32((m / 2).item()) / np.float32(scale.item()))) if not blank else 0
    assert q.tolist() == ([0, 0, 0, 0] if blank else [127, -127, half, 0]) * 5


def test_subnormal_values_keep_their_ratio(backend):
    assert codes(torch.tensor([1, 2, 3, 4], dtype=torch.float64).mul(2.0**-24).to(F16)) == [32, 64, 95, 127]
    # A value below 2^-126 in a row whose scale is above: flushing it to zero would lose code 1.
    x = torch.tensor([127 * 2.0**-126, 0.75 * 2.0**-126, -0.75 * 2.0**-126])
    before = torch.set_flush_denormal(True)
    try:
        if "cpu" in backend:  # the reference computes in torch's own mode
            assert codes(x) == [127, 1, -1]
    finally:
        torch.set_flush_denormal(False)
    assert before and codes(x) == [127, 1, -1]


@each_dtype
@pytest.mark.parametrize("symmetric", [True, False])
def test_nan_and_inf_stay_visible_and_in_their_row(backend, dtype, symmetric):
    good = randn(3, 46, dtype=dtype)
    clean = sk.quantize_int8(good, symmetric=symmetric)
    for bad in (NAN, -NAN, INF, -INF):
        for place in ([0], [17], [45], [3, 40]):
            x = good.clone()
            x[1, place] = bad
            got = sk.quantize_int8(x, symmetric=symmetric)
            assert not got[0][1].any()
            assert got[1][1].isnan().item() if math.isnan(bad) else got[1][1].item() == INF
            assert symmetric or got[2][1].item() == 0
            assert sk.dequantize_int8(*got)[1].isnan().all()
            same([part[[0, 2]] for part in got], [part[[0, 2]] for part in clean])


def test_nan_wins_over_inf_and_stays_in_its_group(backend):
    x = torch.tensor([1.0, NAN, INF, 2.0, -INF, INF, 1.0, 1.0, 1.0, -3.0, 0.0, 0.0])
    for symmetric in (True, False):
        scale = sk.quantize_int8(x, group_size=4, symmetric=symmetric)[1]
        assert scale[0].isnan() and scale[1] == INF and scale[2].isfinite()


def test_massive_activation(backend):
    x = torch.cat([torch.tensor([1000.0]), torch.linspace(-3.9, 3.9, 127)])
    assert codes(x) == [127] + [0] * 127  # scale 7.87: whatever is below half of it is lost ...
    assert max(map(abs, codes(x, group_size=32)[-32:])) == 127  # ... but not in other groups


# ---- asymmetric ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, want, scale, zero",
    [
        ([0, 1, 127, 255], [-128, -127, -1, 127], 1.0, -128),
        ([3, 3, 3, 3], [127] * 4, 3 / 255, -128),
        ([-3, -3], [-128] * 2, 3 / 255, 127),
        ([0, 0, 0, 0], [0] * 4, 0.0, 0),
        ([0.01] * 64, [127] * 64, 0.01 / 255, -128),
        ([5.0], [127], 5 / 255, -128),
        ([100, 101], [124, 127], 101 / 255, -128),
        ([-1, 0, 254], [-128, -127, 127], 1.0, -127),
    ],
)
def test_asymmetric(backend, x, want, scale, zero):
    q, s, z = sk.quantize_int8(torch.tensor(x, dtype=F32), symmetric=False)
    assert (q.tolist(), z.item()) == (want, zero) and s.item() == pytest.approx(scale, rel=2e-7)
    assert z.dtype is torch.int32 and s.dtype is F32


def test_asymmetric_constant_row_keeps_its_value(backend):
    assert sk.dequantize_int8(*sk.quantize_int8(torch.full((1, 64), 3.0), symmetric=False)).eq(3.0).all()


def test_asymmetric_full_range(backend):
    m = torch.finfo(F32).max
    q, s, z = sk.quantize_int8(torch.tensor([m, -m, 0.0]), symmetric=False)
    # The range over 255 is 127.5 codes on each side; -128 + 127.5 rounds to the even 0.
    assert (q.tolist(), z.item()) == ([127, -128, 0], 0) and s.isfinite().all()


# ---- given scale -----------------------------------------------------------------------------------------------------


def test_saturates(backend):
    x = [127.4, 127.5, 127.6, 128, 300, -127.6, -128.4, -300, INF, -INF, NAN, 3e38]
    assert codes(x, scale=1.0) == [127] * 5 + [-127] * 3 + [127, -127, 0, 127]
    assert codes(x, scale=1.0, zero_point=0, symmetric=False) == [127] * 5 + [-128] * 3 + [127, -128, 0, 127]
    assert codes([3.0, -2.0, 0.0], scale=1e-40) == [127, -127, 0]


@pytest.mark.parametrize("zero", [-128, -1, 0, 1, 127, -25628, 2**21 + 1, 2**30, 2**31 - 1, -(2**31)])
def test_zero_point_is_added_after_rounding(backend, zero):
    v = torch.tensor([0.5, 1.5, -0.5, 2.5, 300.0, -300.0, -zero, -zero - 127, 128 - zero, -INF, INF, NAN], dtype=F32)
    want = [0 if math.isnan(x) else max(-128, min(127, _half_even(x) + zero)) for x in v.tolist()]
    assert codes(v, scale=1.0, zero_point=zero, symmetric=False) == want


def _half_even(x):
    return round(x) if math.isfinite(x) else int(math.copysign(2**40, x))


def test_range_far_from_zero(backend):
    x = torch.tensor([100.0, 101.0])
    scale, zero = torch.tensor([1 / 255]), torch.tensor([-25628], dtype=torch.int32)
    got = sk.quantize_int8(x, scale=scale, zero_point=zero, symmetric=False)
    assert got[0].tolist() == [-128, 127] and got[1] is scale and got[2] is zero
    torch.testing.assert_close(sk.dequantize_int8(*got), x, rtol=1e-6, atol=0)


@each_dtype
@pytest.mark.parametrize("groups", [0, 1, 4])
def test_given_scale_of_every_shape(backend, dtype, groups):
    x = randn(2, 3, 64, dtype=dtype)
    scale = torch.tensor(0.02) if groups == 0 else torch.rand(2, 3, groups).add(0.01)
    zero = torch.tensor(7, dtype=torch.int32) if groups == 0 else torch.randint(-99, 99, (2, 3, groups)).int()
    wide = (scale if groups == 0 else scale.repeat_interleave(64 // groups, -1)).expand(2, 3, 64)
    wide_zero = (zero if groups == 0 else zero.repeat_interleave(64 // groups, -1)).expand(2, 3, 64)
    v = torch.round(x.float() / wide)
    assert torch.equal(sk.quantize_int8(x, scale=scale)[0], v.clamp(-127, 127).to(torch.int8))
    got = sk.quantize_int8(x, scale=scale, zero_point=zero, symmetric=False)
    assert torch.equal(got[0], (v + wide_zero).clamp(-128, 127).to(torch.int8))
    want = ((got[0] - wide_zero).float() * wide).to(dtype)
    assert torch.equal(sk.dequantize_int8(*got, dtype=dtype), want)


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, INF, NAN, 1e-50, torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0], [NAN]])]
)
def test_bad_scale_is_refused(scale):
    with pytest.raises(ValueError, match=r"scale: expected positive finite values"):
        sk.quantize_int8(torch.ones(2, 4), scale=scale)


def test_a_zero_point_belongs_to_a_given_asymmetric_scale():
    x, zero = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32)
    for options in ({"zero_point": zero}, {"zero_point": zero, "scale": 1.0}, {"scale": 1.0, "symmetric": False}):
        with pytest.raises(ValueError, match="zero_point"):
            sk.quantize_int8(x, **options)
    q, scale = sk.quantize_int8(x)
    assert torch.equal(sk.dequantize_int8(q, scale, zero), sk.dequantize_int8(q, scale))


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
                out += [] if symmetric else [guarded((rows, 1), torch.int32, at=at)]
                seed = None if cols % 2 else 5
                got = sk.quantize_int8(x, symmetric=symmetric, stochastic_seed=seed, out=out)
                assert got[0].data_ptr() == out[0].data_ptr()
                same(got, on_reference(sk.quantize_int8, x, symmetric=symmetric, stochastic_seed=seed))
                fenced = [guarded_like(part, at=at) for part in got]
                same([sk.dequantize_int8(*fenced, dtype=dtype)], [on_reference(sk.dequantize_int8, *got, dtype=dtype)])


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 257, 65536])
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
    for x in (base[:, :64], base[:, 64:], base[:, :1], base[::2], base[1:2].expand(4, 128), base.view(7, 2, 64)[:, 1]):
        want = sk.quantize_int8(x.contiguous())
        same(sk.quantize_int8(x), want)
        wide = torch.full((x.shape[0], x.shape[1] + 5), 99, dtype=torch.int8)
        scale = torch.full((x.shape[0], 3), 99.0)
        same(sk.quantize_int8(x, out=(wide[:, 2:-3], scale[:, 1:2])), want)
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


@pytest.mark.parametrize("name", [b for b in BACKENDS if b != "reference"])
def test_offsets_need_64_bits(name):
    step = 2**30 + 8  # row 2 starts past 2^31 elements
    x = guarded((3, 40), BF16, row_stride=step).copy_(randn(3, 40, dtype=BF16))
    q = guarded((3, 40), torch.int8, row_stride=step)
    with running_on(name):
        got = sk.quantize_int8(x, out=(q, torch.empty(3, 1)))
        same(got, sk.quantize_int8(x.contiguous()))
        same([sk.dequantize_int8(*got)], [sk.dequantize_int8(q.contiguous(), got[1])])


@pytest.mark.parametrize("name", [b for b in BACKENDS if b != "reference"])
@each_dtype
def test_a_row_depends_on_nothing_else(name, dtype):
    x = randn(300, 1000, dtype=dtype)
    with running_on(name):
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
def test_cpu_equals_reference(rows, group, groups, seed, dtype):
    x = randn(rows, group * groups, dtype=dtype, seed=seed)
    x *= torch.randint(-3, 4, (rows, 1), generator=torch.Generator().manual_seed(seed)).float().exp().to(dtype)
    for symmetric in (True, False):
        for stochastic in (None, seed):
            options = {"group_size": group, "symmetric": symmetric, "stochastic_seed": stochastic}
            same(sk.quantize_int8(x, **options), on_reference(sk.quantize_int8, x, **options))


# ---- error bound and stochastic rounding -----------------------------------------------------------------------------


@each_dtype
def test_round_trip(backend, dtype):
    x = randn(64, 512, dtype=dtype)
    q, scale = sk.quantize_int8(x)
    error = (x.double() - q.double() * scale.double()).abs() / scale.double()
    assert error.max() <= 0.50001 and error.max() > 0.499


def test_small_bf16_rows_use_the_whole_range(backend):
    x = randn(128, 256, dtype=BF16) * 0.01
    q, scale = sk.quantize_int8(x, group_size=32)
    assert q.view(128, 8, 32).abs().amax(-1).eq(127).all()
    back = sk.dequantize_int8(q, scale).double()
    assert 10 * torch.log10(x.double().square().sum() / (x.double() - back).square().sum()) > 40


def test_stochastic_is_the_formula(backend):
    x = randn(2, 50, seed=3)
    seed, offset = -(2**62) - 12345, 2**33 + 3
    q, scale = sk.quantize_int8(x, stochastic_seed=seed, stochastic_offset=offset)
    v = x.numpy() / scale.numpy()
    below = np.floor(v)
    u = np.array([_uniform(seed, offset + i) for i in range(100)], dtype=np.float32).reshape(2, 50)
    assert np.array_equal(q.numpy(), np.clip(below + (u < v - below), -127, 127).astype(np.int8))
    assert np.array_equal(scale.numpy(), sk.quantize_int8(x)[1].numpy())


def _uniform(seed, i):
    """The contract in Python integers; checked against the generator's published first words below."""
    return (_philox(seed % 2**64, i >> 2, 4 << 24)[i & 3] >> 8) * 2.0**-24


def _philox(key, position, c2):
    k = [key & 0xFFFFFFFF, key >> 32]
    c = [position & 0xFFFFFFFF, position >> 32, c2, 0]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox_known_answer():
    assert _philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_stochastic_chunks_equal_the_whole(backend):
    x = randn(40, 70)
    whole = sk.quantize_int8(x, stochastic_seed=9, stochastic_offset=11)
    for cut in (1, 13, 20):
        halves = [
            sk.quantize_int8(x[:cut], stochastic_seed=9, stochastic_offset=11),
            sk.quantize_int8(x[cut:], stochastic_seed=9, stochastic_offset=11 + cut * 70),
        ]
        same([torch.cat(parts) for parts in zip(*halves, strict=True)], whole)


def test_stochastic_keeps_integers_and_the_mean(backend):
    k = torch.arange(-127, 128).float()
    for seed in range(20):
        assert codes(k * 0.25, stochastic_seed=seed) == k.tolist()
    n = 100_000
    for v in (0.1, 0.5, 0.97, -0.25, -3.6):
        q = sk.quantize_int8(torch.full((n,), v), scale=1.0, stochastic_seed=77)[0].double()
        spread = math.sqrt((v - math.floor(v)) * (math.ceil(v) - v))
        assert abs(q.mean().item() - v) < 4 * spread / math.sqrt(n)
        assert set(q.tolist()) == {math.floor(v), math.ceil(v)}


def test_stochastic_with_given_grid(backend):
    x = torch.tensor([-300.0, 300.0, INF, -INF, NAN, 126.999, -126.999])
    q = sk.quantize_int8(x, scale=1.0, stochastic_seed=1)[0].tolist()
    assert q[:5] == [-127, 127, 127, -127, 0] and q[5] in (126, 127) and q[6] in (-126, -127)
    for zero in (3, 2**30):
        got = sk.quantize_int8(x, scale=1.0, zero_point=zero, symmetric=False, stochastic_seed=1)[0]
        want = on_reference(sk.quantize_int8, x, scale=1.0, zero_point=zero, symmetric=False, stochastic_seed=1)[0]
        assert torch.equal(got, want)


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
    assert sk.quantize_int8(x, scale=scale, out=(q, scale))[0] is q
    assert sk.quantize_int8(x, scale=scale, out=q)[0] is q


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


def test_inputs_are_not_modified(backend):
    x, scale = randn(5, 33), torch.rand(5, 1) + 0.1
    kept = x.clone(), scale.clone()
    sk.dequantize_int8(*sk.quantize_int8(x))
    sk.quantize_int8(x, scale=scale)
    assert torch.equal(x, kept[0]) and torch.equal(scale, kept[1])
