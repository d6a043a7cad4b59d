"""linear_int8: exact sums, equal bits on every instruction set and for any rows and threads, no byte too far."""

import threading

import pytest
import torch

import specdec_kernels as sk
from guard import guarded, guarded_like
from instruction_sets import ISAS
from specdec_kernels import native

SHAPES = [(1, 1, None), (17, 6, 3), (40, 96, 32), (33, 130, None), (64, 576, 192), (100, 512, 256), (5, 35, 7)]
ROWS = (0, 1, 2, 3, 4, 5, 8, 9, 17, 70)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def codes(*shape, low=-128, seed=0):
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=generator(seed))


def reference(x, weight, bias=None):
    with sk.use_backend("reference"):
        return sk.linear_int8(x, weight, bias)


def raw(q, w):
    """The plain integer product of codes, through linear_int8 with all scales 1."""
    weight = sk.pack_int8((w, torch.ones(w.shape[0], 1)))
    return sk.linear_int8((q, torch.ones(q.shape[0], 1)), weight)


def exact(q, w):
    return (q.double() @ w.double().T).float()


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_rows_equal_the_reference(isa, n, k, group, dtype):
    weight = sk.pack_int8(torch.randn(n, k, generator=generator(k)), group_size=group)
    bias = torch.randn(n, generator=generator(n))
    for m in (0, 1, 4, 7, 66):
        x = torch.randn(m, k, generator=generator(m)).to(dtype)
        y = sk.linear_int8(x, weight, bias.to(dtype))
        assert y.dtype == dtype and y.shape == (m, n)
        assert torch.equal(y, reference(x, weight, bias.to(dtype)))
        assert torch.equal(sk.linear_int8(x, weight, bias), reference(x, weight, bias))


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_codes_equal_the_reference(isa, n, k, group):
    groups = k // (group or k)
    weight = sk.pack_int8((codes(n, k), torch.rand(n, groups, generator=generator()) - 0.5))
    for m in ROWS:
        q = codes(m, k, seed=m)
        for scales in {1, groups}:
            scale = torch.rand(m, scales, generator=generator(m))
            y = sk.linear_int8((q, scale), weight)
            assert y.dtype == torch.float32
            assert torch.equal(y, reference((q, scale), weight))


def test_quantises_exactly_as_quantize_int8(isa):
    weight = sk.pack_int8(torch.randn(32, 96, generator=generator()), group_size=32)
    x = torch.randn(5, 96, generator=generator(1)).bfloat16()
    pair = sk.quantize_int8(x, group_size=32)
    assert torch.equal(sk.linear_int8(x, weight), sk.linear_int8(pair, weight).bfloat16())


@pytest.mark.parametrize(("n", "k", "group"), [(5, 1, None), (17, 6, 2), (33, 96, 32), (20, 576, 64), (40, 1024, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotated_weights_equal_the_reference(isa, n, k, group, dtype):
    w = torch.randn(n, k, generator=generator(k))
    weight = sk.pack_int8(w, group_size=group, rotate=True)
    bias = torch.randn(n, generator=generator(n))
    for m in (0, 1, 4, 9):
        x = torch.randn(m, k, generator=generator(m)).to(dtype)
        y = sk.linear_int8(x, weight, bias)
        assert torch.equal(y, reference(x, weight, bias))
        exact = x.double() @ w.double().T + bias
        assert torch.allclose(y.double(), exact, rtol=0.01, atol=0.05 * max(1, k**0.5))


def test_rotation_spreads_an_outlier(isa):
    """One value of 1000 among N(0, 1): alone it makes the step of its group 7.9, so that every other value is lost."""
    w, x = torch.randn(64, 512, generator=generator()), torch.randn(8, 512, generator=generator(1))
    x[:, 100] = 1000.0
    w[:, 100] *= 0.01
    exact = x.double() @ w.double().T
    error = lambda rotate: (
        (sk.linear_int8(x, sk.pack_int8(w, group_size=64, rotate=rotate)) - exact).square().mean().sqrt()
    )
    assert error(True) < 0.6 * error(False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rotated_nan_and_inf_stay_visible_and_in_their_row(isa, bad):
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()), rotate=True)
    x = torch.randn(3, 64, generator=generator(1))
    others = sk.linear_int8(x, weight)
    x[1, 5] = bad
    y = sk.linear_int8(x, weight)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], others[[0, 2]])


@pytest.mark.parametrize("k", [1, 2, 3, 12, 20, 31, 32, 33, 64, 100, 4096])
def test_exact_at_every_length(isa, k):
    for m, n in ((1, 17), (3, 5), (9, 16)):
        assert torch.equal(raw(codes(m, k), codes(n, k, seed=1)), exact(codes(m, k), codes(n, k, seed=1)))
    high = codes(2, k, low=100), codes(3, k, low=100, seed=1)  # f32 sums of such codes are off by 3 at K = 4096
    assert torch.equal(raw(*high), exact(*high))


@pytest.mark.parametrize(
    ("x", "w", "k", "expected"),
    [
        (-128, -128, 64, 1048576),  # saturating pair sums lose this one
        (-128, -1, 32, 4096),  # negating -128 in 8 bits loses these two
        (-128, -128, 32, 524288),
        (127, 127, 64, 1032256),
        (-128, 127, 64, -1040384),
        (1, 127, 64, 8128),
        (-128, -128, 131071, 2147467264),  # the longest group: one more and the sum is 2^31
        (127, -127, 131071, -2114044159),
    ],
)
def test_extreme_codes(isa, x, w, k, expected):
    for m in (1, 2, 4, 5, 8):
        y = raw(torch.full((m, k), x, dtype=torch.int8), torch.full((2, k), w, dtype=torch.int8))
        assert torch.equal(y, torch.tensor(expected).float().expand(m, 2))


def test_alternating_signs_cancel(isa):
    sign = torch.tensor([127, -127], dtype=torch.int8).repeat(500)
    assert torch.equal(raw(sign.view(1, -1), sign.abs().view(1, -1)), torch.zeros(1, 1))
    assert torch.equal(raw(sign.view(1, -1), sign.view(1, -1)), torch.full((1, 1), 1000.0 * 127 * 127))


def test_a_sum_that_might_not_be_exact_is_refused():
    with pytest.raises(ValueError, match="group_size: expected at most 131071"):
        sk.Int8Weight.empty(1, 133144)
    weight = sk.pack_int8(torch.ones(1, 133144), group_size=133144 // 8)
    assert abs(sk.linear_int8(torch.ones(1, 133144), weight).item() - 133144) < 0.1


@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129])
def test_any_number_of_channels(isa, n):
    q, w = codes(6, 24), codes(n, 24, seed=1)
    assert torch.equal(raw(q, w), exact(q, w))


def test_long_and_thin(isa):
    q, w = codes(300, 1024), codes(4, 1024, seed=1)
    assert torch.equal(raw(q, w), exact(q, w))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rotate", [False, True])
def test_a_row_depends_on_that_row_alone(isa, threads, rotate):
    weight = sk.pack_int8(torch.randn(400, 768, generator=generator()), group_size=256, rotate=rotate)
    x = torch.randn(37, 768, generator=generator(1))
    torch.set_num_threads(1)
    alone = torch.cat([sk.linear_int8(row.view(1, -1), weight) for row in x])
    torch.set_num_threads(threads)
    try:
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 37):
            assert torch.equal(sk.linear_int8(x[:m], weight), alone[:m])
    finally:
        torch.set_num_threads(2)


def test_same_bits_on_every_instruction_set():
    weight = sk.pack_int8(torch.randn(200, 330, generator=generator()), group_size=110)
    rotated = sk.pack_int8(torch.randn(200, 330, generator=generator()), group_size=2, rotate=True)
    x = torch.randn(11, 330, generator=generator(1))
    results = []
    for name in ISAS:
        native.cpu.set_isa(name)
        results.append(torch.cat([sk.linear_int8(x, weight), sk.linear_int8(x, rotated)]))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_two_python_threads(isa):
    weight = sk.pack_int8(torch.randn(512, 576, generator=generator()))
    inputs = [torch.randn(4, 576, generator=generator(i)) for i in range(2)]
    expected = [sk.linear_int8(x, weight) for x in inputs]
    wrong = []

    def work(i):
        for _ in range(50):
            if not torch.equal(sk.linear_int8(inputs[i], weight), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert not wrong


# ---- values ----------------------------------------------------------------------------------------------------------


def test_a_zero_row_gives_the_bias(isa):
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()))
    bias = torch.randn(20, generator=generator(1))
    x = torch.randn(4, 64, generator=generator(2))
    others = sk.linear_int8(x, weight, bias)
    x[2] = 0
    y = sk.linear_int8(x, weight, bias)
    assert torch.equal(y[2], bias)
    assert torch.equal(y[[0, 1, 3]], others[[0, 1, 3]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_visible_and_in_their_row(isa, bad):
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()))
    x = torch.randn(3, 64, generator=generator(1))
    others = sk.linear_int8(x, weight)
    x[1, 5] = bad
    y = sk.linear_int8(x, weight)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], others[[0, 2]])


def test_large_bf16_and_f16_values(isa):
    big = sk.linear_int8(torch.full((1, 64), 70000.0, dtype=torch.bfloat16), sk.pack_int8(torch.ones(1, 64)))
    assert big.item() == 4489216  # 64 * bf16(70000)
    weight = sk.pack_int8((torch.full((1, 64), 127, dtype=torch.int8), torch.full((1, 1), 1e-3)))
    half = sk.linear_int8(torch.full((1, 64), 100.0, dtype=torch.float16), weight)
    assert half.item() == torch.tensor(812.8).half().item()  # the sum of the codes alone is beyond f16


def test_scales_of_one_give_one(isa):
    one = sk.linear_int8(torch.ones(1, 1), sk.pack_int8(torch.ones(1, 1)))
    assert abs(one.item() - 1) <= 2**-22


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_strided_and_misaligned_rows(isa):
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()))
    wide = torch.randn(6, 129, generator=generator(1))
    for x in (wide[:, :64], wide[:, 65:], wide[:, 3:67], wide[::2, 1:65], wide[:1, :64].expand(5, 64)):
        assert torch.equal(sk.linear_int8(x, weight), sk.linear_int8(x.contiguous(), weight))
        q, scale = sk.quantize_int8(x)
        room = torch.zeros(x.shape[0], 67, dtype=torch.int8)
        room[:, 1:65] = q
        assert torch.equal(sk.linear_int8((room[:, 1:65], scale), weight), sk.linear_int8((q, scale), weight))
    out = torch.full((6, 50), 7.0)
    sk.linear_int8(wide[:, :64], weight, out=out[:, 3:23])
    assert torch.equal(out[:, 3:23], sk.linear_int8(wide[:, :64], weight))
    assert (out[:, :3] == 7).all() and (out[:, 23:] == 7).all()


def test_leading_dimensions(isa):
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()), group_size=32)
    x = torch.randn(2, 3, 64, generator=generator(1))
    flat = sk.linear_int8(x.view(6, 64), weight)
    q, scale = sk.quantize_int8(x, group_size=32)
    assert torch.equal(sk.linear_int8(x, weight), flat.view(2, 3, 20))
    assert torch.equal(sk.linear_int8((q, scale), weight), flat.view(2, 3, 20))
    assert torch.equal(sk.linear_int8(x[0, 0], weight), flat[0])
    out = torch.empty(2, 3, 20)
    assert sk.linear_int8(x, weight, out=out) is out
    assert torch.equal(out, flat.view(2, 3, 20))
    assert sk.linear_int8(torch.empty(0, 3, 64), weight).shape == (0, 3, 20)
    assert sk.linear_int8(x, sk.Int8Weight.empty(0, 64)).shape == (2, 3, 0)


def fenced(packed, at):
    codes, scale = guarded_like(packed.codes, at=at), guarded_like(packed.scale, at=at)
    return sk.Int8Weight(packed.n, packed.k, packed.group_size, codes, scale, packed.rotated)


@pytest.mark.parametrize(("n", "k", "group"), [(16, 64, None), (33, 4, 2), (5, 1, None), (17, 24, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at", ["start", "end"])
def test_rotation_touches_nothing_else(isa, n, k, group, dtype, at):
    w, x = torch.randn(n, k, generator=generator()).to(dtype), torch.randn(3, k, generator=generator(1)).to(dtype)
    packed = sk.pack_int8(guarded_like(w, at=at), group_size=group, rotate=True)
    weight = fenced(packed, at)
    assert torch.equal(sk.linear_int8(guarded_like(x, at=at), weight), reference(x, packed))
    out = guarded((2, k), torch.float32, at=at)
    assert torch.equal(weight.rows(torch.tensor([n - 1, 0]), out=out), packed.dequantize()[[n - 1, 0]])


@pytest.mark.parametrize(("n", "k", "group"), [(17, 35, 7), (16, 64, None), (3, 130, 65), (33, 4, 2)])
@pytest.mark.parametrize("at", ["start", "end"])
def test_touches_nothing_else(isa, n, k, group, at):
    packed = sk.pack_int8(torch.randn(n, k, generator=generator()), group_size=group)
    weight = fenced(packed, at)
    for m in (1, 4, 5, 9):
        x = torch.randn(m, k, generator=generator(m)).bfloat16()
        q, scale = sk.quantize_int8(x, group_size=group)
        bias, out = guarded_like(torch.ones(n), at=at), guarded((m, n), torch.float32, at=at)
        pair = guarded_like(q, at=at), guarded_like(scale, at=at)
        assert torch.equal(sk.linear_int8(pair, weight, bias, out=out), reference((q, scale), packed, bias))
        half = guarded((m, n), torch.bfloat16, at=at)
        sk.linear_int8(guarded_like(x, at=at), weight, out=half)
        assert torch.equal(half, reference(x, packed))


def test_rows_far_apart():
    weight = sk.pack_int8(torch.randn(20, 64, generator=generator()))
    far = 2**30 + 8  # the third row starts beyond 2^31 elements
    x, out = guarded((3, 64), torch.float32, row_stride=far), guarded((3, 20), torch.float32, row_stride=far)
    x.copy_(torch.randn(3, 64, generator=generator(1)))
    sk.linear_int8(x, weight, out=out)
    assert torch.equal(out, sk.linear_int8(x.contiguous(), weight))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_refusals():
    weight = sk.pack_int8(torch.randn(20, 64), group_size=32)
    rotated = sk.pack_int8(torch.randn(20, 64), group_size=32, rotate=True)
    x, q, scale = torch.randn(2, 64), codes(2, 64), torch.ones(2, 2)
    buffer = torch.zeros(200)
    cases = [
        (TypeError, "weight: expected an Int8Weight", lambda: sk.linear_int8(x, torch.randn(20, 64))),
        (TypeError, "x: expected a torch.Tensor", lambda: sk.linear_int8(None, weight)),
        (TypeError, "x: expected dtype", lambda: sk.linear_int8(q, weight)),
        (TypeError, "x: expected dtype int8", lambda: sk.linear_int8((x, scale), weight)),
        (TypeError, "scale: expected dtype float32", lambda: sk.linear_int8((q, scale.double()), weight)),
        (ValueError, "x: expected a tensor or a pair", lambda: sk.linear_int8((q, scale, scale), weight)),
        (ValueError, "x: .* rotated weight", lambda: sk.linear_int8((q, scale), rotated)),
        (ValueError, "x: expected a last dimension of 64", lambda: sk.linear_int8(torch.randn(2, 63), weight)),
        (ValueError, "x: expected a contiguous", lambda: sk.linear_int8(torch.randn(2, 128)[:, ::2], weight)),
        (ValueError, "x: .* require grad", lambda: sk.linear_int8(torch.randn(2, 64, requires_grad=True), weight)),
        (ValueError, "x: .* sparse|x: .*strided", lambda: sk.linear_int8(x.to_sparse(), weight)),
        (ValueError, "x: ", lambda: sk.linear_int8(torch.empty(2, 64, device="meta"), weight)),
        (ValueError, "scale: expected shape", lambda: sk.linear_int8((q, torch.ones(2, 3)), weight)),
        (ValueError, "scale: expected shape", lambda: sk.linear_int8((q, torch.ones(1, 2)), weight)),
        (ValueError, "scale: expected shape", lambda: sk.linear_int8((q, torch.ones(2)), weight)),
        (ValueError, "bias: expected shape", lambda: sk.linear_int8(x, weight, torch.ones(19))),
        (TypeError, "bias: expected dtype", lambda: sk.linear_int8(x, weight, torch.ones(20, dtype=torch.int32))),
        (ValueError, "out: expected shape", lambda: sk.linear_int8(x, weight, out=torch.empty(2, 21))),
        (TypeError, "out: expected dtype", lambda: sk.linear_int8(x, weight, out=torch.empty(2, 20).half())),
        (ValueError, "out: ", lambda: sk.linear_int8(x, weight, out=torch.empty(1, 20).expand(2, 20))),
        (
            ValueError,
            "out: expected memory of its own",
            lambda: sk.linear_int8(buffer[:128].view(2, 64), weight, out=buffer[100:140].view(2, 20)),
        ),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
