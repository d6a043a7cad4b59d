"""linear_int8 of the GPU on the emulator: the bits of the reference for every shape, unit and wave size."""

import pytest
import torch

import emulator
import specdec_kernels as sk
from guard import guarded, guarded_like
from specdec_kernels import gpu
from specdec_kernels.int8_weight import Int8Weight

DOT, MATRIX = 0, 1
# (n, k, group_size): short and long, with every kind of remainder, one group and many, of lengths that no round has
SHAPES = [
    (1, 1, None),
    (15, 2, None),
    (16, 3, None),
    (17, 31, None),
    (64, 32, None),
    (65, 33, None),
    (129, 64, None),
    (33, 100, 4),
    (16, 96, 32),
    (17, 390, 130),
    (20, 130, 13),
    (15, 256, 64),
    (16, 12, 1),
]
ROWS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 33)


@pytest.fixture(params=[(32, DOT), (32, MATRIX), (64, DOT), (64, MATRIX)], ids=lambda p: f"wave{p[0]}-unit{p[1]}")
def emulated(request, monkeypatch):
    wave, unit = request.param
    monkeypatch.setattr(gpu.linear, "UNIT", unit)
    with emulator.serving(wave, "random"):
        yield


@pytest.fixture(params=[32, 64])
def emulated_wave(request):
    with emulator.serving(request.param, "forward"):
        yield request.param


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def codes(*shape, low=-128, seed=0):
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=generator(seed))


def reference(x, weight, bias=None):
    with sk.use_backend("reference"):
        return sk.linear_int8(x, weight, bias)


def equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def packed(n, k, group=None, **options):
    with sk.use_backend("reference"):
        return sk.pack_int8(torch.randn(n, k, generator=generator(k)), group_size=group, **options)


def raw(q, w):
    """The plain integer product of codes, through linear_int8 with all scales 1."""
    with sk.use_backend("reference"):
        weight = sk.pack_int8((w, torch.ones(w.shape[0], 1)))
    return sk.linear_int8((q, torch.ones(q.shape[0], 1)), weight)


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_equals_the_reference(emulated, n, k, group):
    agree(n, k, group, ROWS[n % 3 :: 3])


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_equals_the_reference_for_any_number_of_rows(emulated, n, k, group):
    agree(n, k, group, ROWS)


def agree(n, k, group, counts):
    weight, bias = packed(n, k, group), torch.randn(n, generator=generator(n))
    for i, m in enumerate(counts):
        dtype = (torch.float32, torch.float16, torch.bfloat16)[i % 3]
        x = torch.randn(m, k, generator=generator(m)).to(dtype)
        y = sk.linear_int8(x, weight, bias.to(dtype))
        assert y.dtype == dtype
        equal(y, reference(x, weight, bias.to(dtype)))
        q = codes(m, k, seed=m), torch.rand(m, (1, weight.groups)[i % 2], generator=generator(m)) - 0.5
        equal(sk.linear_int8(q, weight), reference(q, weight))


@pytest.mark.parametrize("group", [None, 64, 2048, 1])
def test_long_rows(emulated, group):
    """As many groups and rounds as take several turns of a block, and rows that a block can't prepare by itself."""
    weight = packed(17, 4096 if group != 1 else 200, group)
    for m in (1, 2, 9):
        x = torch.randn(m, weight.k, generator=generator(m))
        equal(sk.linear_int8(x, weight), reference(x, weight))


@pytest.mark.parametrize("k", [4095, 4097, 9000])
def test_rows_longer_than_a_block_holds(emulated_wave, k):
    weight, x = packed(3, k), torch.randn(2, k, generator=generator(1)).half()
    x[:, -1] = 100.0  # the range comes from the end
    equal(sk.linear_int8(x[:1], weight), reference(x[:1], weight))
    equal(sk.linear_int8(x, weight), reference(x, weight))


@pytest.mark.parametrize("group", [1, 2, 8, 64, 512])
def test_rotated_weights(emulated, group):
    weight = packed(18, 1024 if group > 8 else 64, group, rotate=True)
    for m in (1, 3):
        x = torch.randn(m, weight.k, generator=generator(m)).bfloat16()
        x[0, 5] = 300.0
        equal(sk.linear_int8(x, weight), reference(x, weight))
    x[0, 7] = torch.inf
    equal(sk.linear_int8(x, weight), reference(x, weight))


def test_the_longest_rotation(emulated_wave):
    longest = gpu.linear.LONGEST_ROTATION
    weight, x = packed(2, longest, rotate=True), torch.randn(2, longest, generator=generator(1))
    for m in (1, 2):
        equal(sk.linear_int8(x[:m], weight), reference(x[:m], weight))
    with pytest.raises(sk.BackendUnavailable, match=f"at most {longest} values, got {2 * longest}"):
        sk.linear_int8(torch.ones(1, 2 * longest), packed(2, 2 * longest, rotate=True))


@pytest.mark.parametrize(
    ("x", "w", "k", "expected"),
    [
        (-128, -128, 64, 1048576),  # saturating pair sums lose this one
        (-128, -1, 32, 4096),  # negating -128 in 8 bits loses these two
        (-128, -128, 32, 524288),
        (127, 127, 64, 1032256),
        (-127, 127, 100, -1612900),
        (-128, 127, 64, -1040384),
        (-128, -128, 131071, 2147467264),  # the longest group: one more and the sum is 2^31
    ],
)
def test_extreme_codes(emulated, x, w, k, expected):
    for m in (1, 9) if k < 1000 else (1,):
        y = raw(torch.full((m, k), x, dtype=torch.int8), torch.full((2, k), w, dtype=torch.int8))
        equal(y, torch.tensor(expected).float().expand(m, 2))


def test_alternating_signs_cancel(emulated):
    sign = torch.tensor([127, -127], dtype=torch.int8).repeat(500).expand(2, 1000)
    equal(raw(sign, sign[:1].abs()), torch.zeros(2, 1))
    equal(raw(sign, sign[:1]), torch.full((2, 1), 1000.0 * 127 * 127))


def test_a_row_depends_on_that_row_alone(emulated_wave, monkeypatch):
    """Not on how many there are, on what multiplies, or on the order of the threads."""
    weight, x = packed(33, 320, 32), torch.randn(70, 320, generator=generator(1))
    alone = torch.cat([sk.linear_int8(row.view(1, -1), weight) for row in x])
    equal(alone, reference(x, weight))
    for unit in (DOT, MATRIX):
        monkeypatch.setattr(gpu.linear, "UNIT", unit)
        for m in (1, 2, 8, 9, 17, 70):
            equal(sk.linear_int8(x[:m], weight), alone[:m])


def test_more_rows_than_are_prepared_at_a_time(emulated_wave):
    weight, x = packed(2, 8, 4), torch.randn(1030, 8, generator=generator(1))
    equal(sk.linear_int8(x, weight), reference(x, weight))
    q, scale = codes(1030, 8), torch.rand(1030, 2, generator=generator(1))
    equal(sk.linear_int8((q, scale), weight), reference((q, scale), weight))


def test_hard_values(emulated):
    weight, bias = packed(20, 64, 32), torch.randn(20, generator=generator(1))
    x = torch.randn(8, 64, generator=generator(2))
    x[0] = 0
    x[1, 5], x[2, 63], x[3, 0] = torch.nan, torch.inf, -torch.inf
    x[4] = torch.finfo(torch.float32).max
    x[5] *= 1e-40  # below the smallest scale
    x[6, 32:] = -0.0
    equal(sk.linear_int8(x, weight, bias), reference(x, weight, bias))
    for row in x:
        equal(sk.linear_int8(row, weight, bias), reference(row, weight, bias))


def test_strided_and_misaligned_rows(emulated):
    weight, wide = packed(20, 64), torch.randn(6, 129, generator=generator(1))
    for x in (wide[:, 65:], wide[:, 3:67], wide[::2, 1:65], wide[:1, :64].expand(5, 64)):
        equal(sk.linear_int8(x, weight), reference(x.contiguous(), weight))
        room, scales = torch.zeros(x.shape[0], 67, dtype=torch.int8), torch.rand(x.shape[0], 3)
        room[:, 1:65] = codes(x.shape[0], 64)
        equal(
            sk.linear_int8((room[:, 1:65], scales[:, 1:2]), weight), reference((room[:, 1:65], scales[:, 1:2]), weight)
        )
    out = torch.full((6, 50), 7.0)
    sk.linear_int8(wide[:, :64], weight, out=out[:, 3:23])
    equal(out[:, 3:23], reference(wide[:, :64], weight))
    assert (out[:, :3] == 7).all() and (out[:, 23:] == 7).all()


@pytest.mark.parametrize(("n", "k", "group"), [(17, 35, 7), (16, 64, None), (3, 130, 65), (33, 4, 2)])
@pytest.mark.parametrize("at", ["start", "end"])
def test_touches_nothing_else(emulated, n, k, group, at):
    plain = packed(n, k, group)
    weight = Int8Weight(n, k, plain.group_size, guarded_like(plain.codes, at=at), guarded_like(plain.scale, at=at))
    for m in (1, 4, 9):
        q, scale = codes(m, k), torch.rand(m, plain.groups, generator=generator(m))
        bias, out = guarded_like(torch.ones(n), at=at), guarded((m, n), torch.float32, at=at)
        pair = guarded_like(q, at=at), guarded_like(scale, at=at)
        equal(sk.linear_int8(pair, weight, bias, out=out), reference((q, scale), plain, bias))
        x, half = torch.randn(m, k, generator=generator(m)).bfloat16(), guarded((m, n), torch.bfloat16, at=at)
        equal(sk.linear_int8(guarded_like(x, at=at), weight, out=half), reference(x, plain))


def test_no_channels(emulated_wave):
    assert sk.linear_int8(torch.ones(3, 8), Int8Weight.empty(0, 8)).shape == (3, 0)
