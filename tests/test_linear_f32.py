"""linear_f32: one fixed order of summation, whatever the rows, threads and instruction set."""

import pytest
import torch

import specdec_kernels as sk
from guard import guarded, guarded_like
from specdec_kernels import native

SHAPES = [(1, 1), (5, 15), (7, 16), (33, 17), (64, 576), (10, 40), (3, 1000)]


def floats(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_order(x, w):
    """The documented order in f64: sixteen partial sums, each rounded to f32 after every fused step, then a tree."""
    k = x.shape[0]
    sums = torch.zeros(16)
    for i in range(0, k, 16):
        a, b = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
        a[: min(16, k - i)], b[: min(16, k - i)] = x[i : i + 16].double(), w[i : i + 16].double()
        sums = (a * b + sums.double()).float()
    while sums.numel() > 1:
        half = sums.numel() // 2
        sums = sums[:half] + sums[half:]
    return sums


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_close_to_f64(isa, n, k):
    x, w = floats(9, k), floats(n, k, seed=1)
    bound = x.double().abs() @ w.double().abs().T * 2e-6
    assert ((sk.linear_f32(x, w).double() - x.double() @ w.double().T).abs() <= bound).all()
    with sk.use_backend("reference"):
        assert torch.equal(sk.linear_f32(x, w), (x.double() @ w.double().T).float())


@pytest.mark.parametrize("k", [1, 15, 16, 17, 50])
def test_the_documented_order(isa, k):
    x, w = floats(1, k), floats(1, k, seed=1)
    assert torch.equal(sk.linear_f32(x, w).view(1), in_order(x[0], w[0]))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_on_that_row_alone(isa, n, k, threads):
    x, w = floats(70, k), floats(n, k, seed=1)
    native.cpu.set_isa("scalar")
    torch.set_num_threads(1)
    alone = torch.cat([sk.linear_f32(row.view(1, -1), w) for row in x])
    native.cpu.set_isa(isa)
    torch.set_num_threads(threads)
    try:
        for m in (0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 64, 65, 70):
            assert torch.equal(sk.linear_f32(x[:m], w), alone[:m])
    finally:
        torch.set_num_threads(2)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bf16_weights_are_the_same_weights_in_f32(isa, n, k):
    x, w, bias = floats(9, k), floats(n, k + 3, seed=1).bfloat16()[:, 1:-2], floats(n, seed=2)
    for m in (1, 2, 5, 9):
        assert torch.equal(sk.linear_f32(x[:m], w), sk.linear_f32(x[:m], w.float()))
        assert torch.equal(sk.linear_f32(x[:m], w, bias), sk.linear_f32(x[:m], w.float(), bias))
    with sk.use_backend("reference"):
        assert torch.equal(sk.linear_f32(x, w, bias), sk.linear_f32(x, w.float(), bias))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bias_is_added_to_the_rounded_sum(isa, backend, dtype):
    x, w, bias = floats(9, 40), floats(21, 40, seed=1), floats(21, seed=2).to(dtype)
    with sk.use_backend(backend):
        assert torch.equal(sk.linear_f32(x, w, bias), sk.linear_f32(x, w) + bias.float())


def test_special_bf16_weights(isa):
    """Subnormals, signed zeros and infinities widen like any other number."""
    w = torch.tensor([[1e-40, -0.0, 1.0, 3e38], [float("inf"), 1.0, 1.0, 1.0]]).bfloat16()
    x = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.5, 0.25, 1.0, 1.0]])
    assert torch.equal(sk.linear_f32(x, w), sk.linear_f32(x, w.float())) and sk.linear_f32(x, w)[0, 0] == w[0, 0] > 0


def test_layouts(isa):
    x, w = floats(4, 3, 50), floats(20, 60, seed=1)
    y = sk.linear_f32(x, w[:, 5:55])
    assert torch.equal(y.view(12, 20), sk.linear_f32(x.view(12, 50), w[:, 5:55].contiguous()))
    out = torch.full((12, 30), 7.0)
    sk.linear_f32(x.view(12, 50), w[:, 5:55], out=out[:, 4:24])
    assert torch.equal(out[:, 4:24], y.view(12, 20)) and (out[:, :4] == 7).all() and (out[:, 24:] == 7).all()
    assert sk.linear_f32(floats(0, 8), floats(3, 8)).shape == (0, 3)
    assert sk.linear_f32(floats(2, 8), floats(0, 8)).shape == (2, 0)


@pytest.mark.parametrize("k", [1, 7, 9, 16, 23, 64])
@pytest.mark.parametrize("at", ["start", "end"])
def test_touches_nothing_else(isa, k, at):
    for m in (1, 4, 5, 9):
        x, w, out = guarded_like(floats(m, k), at=at), guarded_like(floats(3, k), at=at), guarded((m, 3), torch.float32)
        sk.linear_f32(x, w, out=out)
        assert torch.allclose(out, x @ w.T, atol=1e-5)
        bias, half = guarded_like(floats(3), at=at), guarded_like(w.bfloat16(), at=at)
        sk.linear_f32(x, half, bias, out=out)
        assert torch.allclose(out, x @ half.float().T + bias, atol=1e-5)


def test_refusals():
    x, w = floats(2, 8), floats(3, 8)
    cases = [
        (TypeError, "x: expected dtype float32", lambda: sk.linear_f32(x.half(), w)),
        (TypeError, "weight: expected dtype float32 or bfloat16", lambda: sk.linear_f32(x, w.half())),
        (ValueError, r"bias: expected shape \[3\]", lambda: sk.linear_f32(x, w, x[0])),
        (TypeError, "bias: expected dtype float32", lambda: sk.linear_f32(x, w, x[0].int())),
        (ValueError, "weight: expected 2 dimensions", lambda: sk.linear_f32(x, w[0])),
        (ValueError, "x: expected a last dimension of 8", lambda: sk.linear_f32(floats(2, 7), w)),
        (ValueError, "weight: expected a contiguous", lambda: sk.linear_f32(floats(2, 3), w.t())),
        (ValueError, "out: expected memory of its own", lambda: sk.linear_f32(w[:2], w, out=w.view(-1)[:6].view(2, 3))),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
