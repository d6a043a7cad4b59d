"""linear_int8 interpreted: the bits of the reference, for any shape, group, dtype and split."""

import itertools

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels.triton_kernels import linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on 0 * inf and the like
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 3, 31, 32, 33, 64, 100, 1024)
CHANNELS = (1, 15, 16, 17, 65, 129)
ROWS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 33)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def codes(*shape, low=-128, seed=0):
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=generator(seed))


def both(x, weight, bias=None, **options):
    with sk.use_backend("reference"):
        want = sk.linear_int8(x, weight, bias)
    with sk.use_backend("triton"):
        return sk.linear_int8(x, weight, bias, **options), want


def agrees(x, weight, bias=None):
    got, want = both(x, weight, bias)
    assert got.dtype == want.dtype and got.shape == want.shape
    return torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def every_form(m, n, k, group, dtype):
    """Float rows and pairs with one scale and with all, with and without a bias."""
    weight = sk.pack_int8((codes(n, k), torch.rand(n, k // group, generator=generator(1)) - 0.5))
    x, bias = torch.randn(m, k, generator=generator(m)).to(dtype), torch.randn(n, generator=generator(2)).to(dtype)
    assert agrees(x, weight, bias)
    for scales in {1, k // group}:
        assert agrees((codes(m, k, seed=m), torch.rand(m, scales, generator=generator(3))), weight)


@pytest.mark.parametrize("k", LENGTHS)
def test_any_length(k):
    at = LENGTHS.index(k)
    for i in range(at, at + 2):
        every_form(ROWS[i % len(ROWS)] if k < 1024 else i % 3, CHANNELS[i % len(CHANNELS)], k, k, FLOATS[i % 3])


@pytest.mark.slow
@pytest.mark.parametrize("k", LENGTHS)
def test_every_length_with_every_shape(k):
    for n, m in itertools.product(CHANNELS, ROWS):
        every_form(m, n, k, k, FLOATS[(m + n) % 3])


GROUPS = [(6, 3), (12, 4), (35, 7), (10, 1), (96, 32), (99, 33), (576, 64), (260, 130), (600, 300), (1024, 512)]


@pytest.mark.parametrize(("k", "group"), GROUPS)
def test_groups_are_added_in_order(k, group):
    for m, n in ((1, 17), (3, 16)) if k < 500 else ((2, 17),):
        every_form(m, n, k, group, FLOATS[m % 3])


@pytest.mark.slow
@pytest.mark.parametrize(("k", "group"), GROUPS)
def test_groups_of_many_rows(k, group):
    for m, n in ((1, 33), (16, 5), (17, 40)):
        every_form(m, n, k, group, FLOATS[m % 3])


@pytest.mark.parametrize("group", [1, 2, 16, 32, 64, 512])
def test_rotated_weights(group):
    """In the prologue (one row, groups of at most 256) and by a launch of its own."""
    k = max(group, 32 // group * group)
    weight = sk.pack_int8(torch.randn(20, k, generator=generator()), group_size=group, rotate=True)
    for m, dtype in ((1, torch.bfloat16), (5, torch.float32)):
        x = torch.randn(m, k, generator=generator(m)).to(dtype)
        x[0, -1] = 100
        assert agrees(x, weight)
    x[1, 0], x[2, 1 % k], x[3] = torch.nan, torch.inf, 0
    assert agrees(x, weight) and agrees(x[1:2], weight)


def test_rotation_by_a_launch_equals_the_prologue(monkeypatch):
    weight = sk.pack_int8(torch.randn(20, 192, generator=generator()), group_size=64, rotate=True)
    x = torch.randn(3, 192, generator=generator(1))
    want = both(x, weight)[0]
    monkeypatch.setattr(linear, "PROLOGUE", 0)
    assert torch.equal(both(x, weight)[0], want) and agrees(x, weight)


@pytest.mark.parametrize("k", [32, 300])
@pytest.mark.parametrize(("x", "w"), [(-128, -128), (127, -127), (-128, 127), (127, 127)])
def test_extreme_codes(x, w, k):
    weight = sk.pack_int8((torch.full((2, k), w, dtype=torch.int8), torch.ones(2, 1)))
    for m in (1, 2, 16):
        got, _ = both((torch.full((m, k), x, dtype=torch.int8), torch.ones(m, 1)), weight)
        assert torch.equal(got, torch.tensor(float(x * w * k)).expand(m, 2))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias_dtype", FLOATS)
def test_results_round_once(dtype, bias_dtype):
    weight = sk.pack_int8(torch.randn(40, 96, generator=generator()), group_size=32)
    x, bias = torch.randn(2, 96, generator=generator(1)).to(dtype), torch.randn(40, generator=generator(2))
    assert agrees(x, weight, bias.to(bias_dtype))


def test_ties_round_to_even():
    """Results half way between two values of bfloat16."""
    weight = sk.pack_int8((torch.ones(256, 1, dtype=torch.int8), 1 + torch.arange(256.0)[:, None] * 2**-8))
    got, want = both(torch.full((1, 1), 127.0, dtype=torch.bfloat16), weight, torch.zeros(256))
    assert torch.equal(got, want) and got.dtype is torch.bfloat16


@pytest.mark.parametrize("group", [None, 64])
def test_hard_rows(group):
    """Zero, NaN, infinite and tiny rows; neighbours don't see them."""
    weight = sk.pack_int8(torch.randn(20, 512, generator=generator()), group_size=group)
    x = torch.randn(8, 512, generator=generator(1))
    x[0], x[1, 70], x[2, 9], x[3, 511] = 0, torch.nan, torch.inf, -torch.inf
    x[4] *= 1e-39
    x[5] *= 127 * 2.0**-126 / x[5].abs().max()
    x[6, 3] = 3e38
    assert agrees(x, weight)
    for alone in (1, 4, 5):  # quantised in the prologue
        assert agrees(x[alone : alone + 1], weight)


@pytest.mark.parametrize(("k", "group"), [(192, 64), (600, None)])
@pytest.mark.parametrize("programs", [1, 1000])
def test_a_row_depends_on_that_row_alone(k, group, programs, monkeypatch):
    monkeypatch.setattr(linear, "programs", lambda x: programs)
    monkeypatch.setattr(linear, "SHORTEST", 1)
    weight = sk.pack_int8(torch.randn(20, k, generator=generator()), group_size=group)
    x = torch.randn(17, k, generator=generator(1))
    with sk.use_backend("reference"):
        want = sk.linear_int8(x, weight)
    with sk.use_backend("triton"):
        for rows in (slice(0, 1), slice(3, 5), slice(0, 17)):
            assert torch.equal(sk.linear_int8(x[rows], weight), want[rows])


def test_strides_and_room():
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()))
    wide = torch.randn(6, 129, generator=generator(1))
    for x in (wide[:, 65:], wide[:, 3:67], wide[::2, 1:65], wide[:1, :64].expand(5, 64)):
        assert agrees(x, weight)
        q, scale = sk.quantize_int8(x)
        room, scales = torch.zeros(x.shape[0], 67, dtype=torch.int8), torch.zeros(x.shape[0], 3)
        room[:, 1:65], scales[:, 2:] = q, scale
        assert agrees((room[:, 1:65], scales[:, 2:]), weight)
    out = torch.full((6, 50), 7.0)
    got, want = both(wide[:, :64], weight, out=out[:, 3:23])
    assert torch.equal(got, want) and (out[:, :3] == 7).all() and (out[:, 23:] == 7).all()


def test_weights_of_nothing():
    got, want = both(torch.ones(2, 64), sk.Int8Weight.empty(0, 64))
    assert got.shape == want.shape == (2, 0)
