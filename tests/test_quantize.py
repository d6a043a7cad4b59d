"""quantize_int8 and dequantize_int8: the formula value by value, on every backend and instruction set."""

import math

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from emulator import setup_native
from int8_backends import CPU, EMULATED, ROW_BACKENDS, each_dtype, on_reference, randn, running, same

NAN, INF = float("nan"), float("inf")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=ROW_BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


def codes(x, **options):
    return sk.quantize_int8(torch.as_tensor(x), **options)[0].tolist()


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


def test_no_build_may_change_the_arithmetic():
    # Fused multiply-adds, approximate divisions and flushing to zero would each give other codes.
    tools = setup_native()
    for flags in (tools.CXXFLAGS, tools.HIPFLAGS, tools.NVCCFLAGS):
        assert not any(word in flag for flag in flags for word in ("fast", "ftz", "daz", "prec-div", "unsafe"))
        assert "-ffp-contract=off" in flags or "-fmad=false" in flags


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


@pytest.mark.parametrize("name", [*ROW_BACKENDS, *(["emu-64-reverse-0"] if EMULATED in ROW_BACKENDS else [])])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_neighbouring_groups_do_not_mix(name, group):
    # Groups that share a wave of 32 or 64 lanes: group g holds the constant g + 1.
    x = torch.arange(1.0, 9.0).repeat_interleave(group).repeat(3, 1)
    with running(name):
        q, scale = sk.quantize_int8(x, group_size=group)
    assert q.eq(127).all() and torch.equal(scale, (torch.arange(1.0, 9.0) / 127).repeat(3, 1))


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
        if backend in CPU:  # others compute in the process's own mode
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


# ---- sums of codes ---------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize(
    "cols, group", [(1, None), (46, None), (46, 23), (33, 3), (3584, None), (512, 64), (2100, 1050)]
)
def test_sums_are_those_of_the_codes(backend, dtype, cols, group):
    x = randn(5, cols, dtype=dtype)
    for options in (
        {},
        {"symmetric": False},
        {"stochastic_seed": 3},
        {"scale": 0.02},
        {"scale": 0.02, "zero_point": -90, "symmetric": False},
    ):
        want = sk.quantize_int8(x, group_size=group, **options)
        got = sk.quantize_int8(x, group_size=group, return_sums=True, **options)
        assert torch.equal(got[0], want[0]) and len(got) == len(want) + 1
        sums = want[0].view(5, -1, group or cols).sum(-1, dtype=torch.int32)
        assert got[-1].dtype is torch.int32 and torch.equal(got[-1], sums)


def test_sums_at_the_ends(backend):
    n = 70_000
    x = torch.tensor([[1.0], [-1.0], [0.0], [NAN]]).expand(4, n).contiguous()
    assert sk.quantize_int8(x, return_sums=True)[2].flatten().tolist() == [127 * n, -127 * n, 0, 0]
    lowest = sk.quantize_int8(x[1], symmetric=False, return_sums=True)
    assert lowest[3].tolist() == [-128 * n]


def test_sums_go_with_the_scale_s_groups(backend):
    x = randn(3, 40)
    scale, zero = torch.full((3, 4), 0.03), torch.zeros(3, 1, dtype=torch.int32)
    q, same_scale, sums = sk.quantize_int8(x, scale=scale, return_sums=True)
    assert same_scale is scale and torch.equal(sums, q.view(3, 4, 10).sum(-1, dtype=torch.int32))
    one = sk.quantize_int8(x, scale=torch.full((3, 1), 0.03), group_size=8, return_sums=True)
    assert torch.equal(one[0], q) and torch.equal(one[2], q.view(3, 5, 8).sum(-1, dtype=torch.int32))
    out = torch.empty(3, 40, dtype=torch.int8), scale, zero, torch.empty(3, 4, dtype=torch.int32)
    got = sk.quantize_int8(x, scale=scale, zero_point=zero, symmetric=False, return_sums=True, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True)) and torch.equal(got[3], sums)


def test_sums_that_an_int32_may_not_hold_are_refused():
    with pytest.raises(ValueError, match="group_size: expected at most 16777216 with return_sums"):
        sk.quantize_int8(torch.empty(2**24 + 1, dtype=torch.float16), return_sums=True)


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
