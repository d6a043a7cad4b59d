"""Faults that were reported in other int8 products, with their right values, on everything that can multiply here."""

import pytest
import torch

import specdec_kernels as sk
from int8_backends import BACKENDS, CPU, each_dtype, on_reference, randn
from verify_cases import running

LENGTHS = (1, 2, 3, 12, 20, 31, 32, 33, 64, 100, 1368, 4096)


@pytest.fixture(params=BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


def packed(values, **options):
    return on_reference(sk.pack_int8, values, **options)


def plain(w, scale=1.0):
    """A matrix of the given codes with one scale everywhere."""
    return packed((w.to(torch.int8), torch.full((w.shape[0], 1), scale)))


def product(q, w):
    """The integer sums, through linear_int8 with scales of 1."""
    return sk.linear_int8((q.to(torch.int8), torch.ones(q.shape[0], 1)), plain(w))


def codes(*shape, low=-128, high=127, seed=0):
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))


def exact(q, w):
    return (q.double() @ w.double().T).float()


@pytest.mark.parametrize("k", LENGTHS)
def test_integer_sums_are_exact_at_every_length(backend, k):
    signs = torch.tensor([1, -1]).repeat(k)[:k]
    w = torch.stack([codes(k), torch.full((k,), -128), torch.full((k,), 127), 127 * signs, -128 + 255 * (signs > 0)])
    x = torch.stack([codes(k, seed=1), torch.full((k,), -128), torch.full((k,), -127), 127 * signs])
    for m in (1, 2, 4):
        assert torch.equal(product(x[:m], w), exact(x[:m], w))


@pytest.mark.parametrize(
    ("x", "w", "k", "expected"),
    [
        (-128, -128, 64, 1048576),  # pairs that saturate in 16 bits
        (-1, -128, 32, 4096),  # a sign that -128 can't change
        (-128, -1, 32, 4096),
        (127, 127, 32, 516128),  # 255 * 127 once an operand is shifted to unsigned
        (1, 127, 64, 8128),
        (127, 127, 131071, 2114044159),  # the longest group
        (-128, -128, 131071, 2147467264),
        (-128, 127, 131071, -2130690176),
    ],
)
def test_largest_products(backend, x, w, k, expected):
    for m in (1, 2):  # the path of one row is no other
        y = product(torch.full((m, k), x), torch.full((1, k), w))
        assert torch.equal(y, torch.tensor(float(expected)).expand(m, 1))


def test_large_codes_do_not_pass_through_floats(backend):
    x, w = codes(3, 4096, low=100), codes(5, 4096, low=100, seed=1)
    assert exact(x, w).max() > 2**24
    assert torch.equal(product(x, w), exact(x, w))


@pytest.mark.parametrize("m", [0, 1, 2, 15, 16, 17, 33])
def test_any_number_of_rows(backend, m):
    x, w = codes(m, 37), codes(19, 37, seed=1)
    assert torch.equal(product(x, w), exact(x, w))


@pytest.mark.parametrize("n", [1, 4, 64, 65, 127, 128, 129])
def test_any_number_of_channels(backend, n):
    x, w = codes(3, 33), codes(n, 33, seed=1)
    assert torch.equal(product(x, w), exact(x, w))


def test_many_rows_few_channels(backend):
    m, k = (2048, 6144) if backend in CPU or backend == "reference" else (70, 384)
    if backend.startswith("scalar"):
        m = 128
    x, w = codes(m, k), codes(4, k, seed=1)
    assert torch.equal(product(x, w), exact(x, w))


def test_one_row_is_a_row_of_many(backend):
    weight = packed(randn(50, 192), group_size=64)
    x = randn(17, 192, seed=1)
    y = sk.linear_int8(x, weight)
    for m in (1, 2, 3, 8, 9, 16):
        assert torch.equal(sk.linear_int8(x[:m], weight), y[:m])
    assert torch.equal(sk.linear_int8(x[11:12], weight), y[11:12])


@pytest.mark.parametrize("rotate", [False, True])
def test_a_zero_row_gives_the_bias_and_changes_nothing_else(backend, rotate):
    weight, bias, x = packed(randn(20, 64), rotate=rotate), randn(20, seed=1), randn(4, 64, seed=2)
    others = sk.linear_int8(x, weight, bias)
    x[2] = 0
    y = sk.linear_int8(x, weight, bias)
    assert torch.equal(y[2], bias) and torch.equal(y[[0, 1, 3]], others[[0, 1, 3]])


def test_tiny_rows_are_zero_and_not_infinite(backend):
    y = sk.linear_int8(torch.full((2, 32), 1e-40), packed(torch.ones(3, 32)))
    assert torch.equal(y, torch.zeros(2, 3))
    y = sk.linear_int8(torch.ones(2, 32), packed(torch.full((3, 32), 1e-40)))
    assert torch.equal(y, torch.zeros(2, 3))


@each_dtype
def test_the_bias_is_added_and_not_truncated(backend, dtype):
    bias = torch.tensor([0.75, -0.75, 0.25, -2.5], dtype=dtype)
    y = sk.linear_int8(torch.zeros(2, 8, dtype=dtype), packed(torch.ones(4, 8)), bias)
    assert torch.equal(y, bias.expand(2, 4))


def test_sums_beyond_half_precision(backend):
    big = sk.linear_int8(torch.full((1, 64), 70000.0, dtype=torch.bfloat16), packed(torch.ones(1, 64)))
    assert big.item() == 4489216  # 64 * bf16(70000), beyond f16
    half = sk.linear_int8(torch.full((1, 64), 100.0, dtype=torch.float16), plain(torch.full((1, 64), 127), 1e-3))
    assert half.item() == torch.tensor(812.8).half().item()  # the sum of the codes is 812800


def test_a_product_of_ones_is_one(backend):
    """127 * 127 / 127^2: a rounded constant in the place of the division gave 1.000018."""
    y = sk.linear_int8(
        (torch.full((1, 1), 127, dtype=torch.int8), torch.full((1, 1), 1 / 127)), plain(torch.tensor([[127]]), 1 / 127)
    )
    assert abs(y.item() - 1) <= 2**-22


@each_dtype
def test_rows_that_start_anywhere(backend, dtype):
    weight = packed(randn(5, 12), group_size=4)
    rows = randn(3, 12, dtype=dtype, seed=1)
    expected = on_reference(sk.linear_int8, rows, weight)
    for offset in range(9):
        for stride in (12, 13, 20, 24) if offset in (0, 1, 8) else (13,):
            room = torch.zeros(16 + 3 * stride, dtype=dtype)
            x = room[offset : offset + 3 * stride].view(3, stride)[:, :12].copy_(rows)
            out = torch.zeros(16 + 3 * stride, dtype=dtype)[offset : offset + 3 * stride].view(3, stride)[:, :5]
            assert torch.equal(sk.linear_int8(x, weight, out=out), expected)
    assert torch.equal(sk.linear_int8(rows[:1].expand(3, 12), weight), expected[:1].expand(3, 5))


def test_no_rows_and_no_channels(backend):
    assert sk.linear_int8(torch.empty(0, 64), packed(torch.ones(3, 64))).shape == (0, 3)
    assert sk.linear_int8(torch.ones(2, 64), packed(torch.empty(0, 64))).shape == (2, 0)


@each_dtype
@pytest.mark.parametrize("group", [1, 2, 16, 64, 256])
def test_rotation_has_the_same_bits_everywhere(backend, dtype, group):
    weight, x = packed(randn(20, 256), group_size=group, rotate=True), randn(3, 256, dtype=dtype, seed=1)
    x[1, 7] = 1000
    assert torch.equal(sk.linear_int8(x, weight), on_reference(sk.linear_int8, x, weight))
