"""expand: a packed int8 matrix as floats, on every CPU backend, bit for bit what dequantize() and a cast give."""

import pytest
import torch

import specdec_kernels as sk
from guard import guarded, guarded_like
from instruction_sets import ISAS
from int8_backends import randn, same, torch_threads
from specdec_kernels import native, record

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [
    (1, 1, 1, False),
    (37, 46, 23, False),
    (16, 13, None, False),
    (50, 5000, None, False),
    (0, 8, 4, True),
    (17, 8, 1, True),
    (3, 6, 2, True),
    (40, 576, 64, True),
    (5, 8192, 4096, True),
]


@pytest.fixture(params=[*ISAS, "reference"])
def backend(request):
    if request.param == "reference":
        with sk.use_backend("reference"):
            yield
    else:
        native.cpu.set_isa(request.param)
        with sk.use_backend("cpu"):
            yield
        native.cpu.set_isa(native.cpu.machine_isa())


@pytest.mark.parametrize(("n", "k", "group", "rotate"), SHAPES)
def test_the_bits_of_a_cast(backend, n, k, group, rotate):
    weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
    for dtype in FLOATS:
        want = weight.dequantize().to(dtype)
        same([sk.expand(weight, dtype=dtype)], [want])
        wide = torch.full((n, k + 3), 7.0).to(dtype)
        assert sk.expand(weight, dtype=dtype, out=wide[:, 2:-1]).data_ptr() == wide[:, 2:-1].data_ptr()
        assert torch.equal(wide[:, 2:-1], want) and (wide[:, [0, 1, -1]] == 7).all()
    assert sk.expand(weight).dtype is torch.bfloat16


def test_hard_scales(backend):
    """Overflow to Inf, NaN, subnormal numbers, signed zeros: the bits of torch's own rounding."""
    q = torch.randint(-128, 128, (16, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([torch.inf, torch.nan, 1e38, 600.0, 1e-7, 1e-39, 0.0, -1.0])
    weight = sk.pack_int8((q, scale.repeat(2)[:, None].expand(16, 8).contiguous()))
    for dtype in FLOATS:
        got, want = sk.expand(weight, dtype=dtype), weight.dequantize().to(dtype)
        same([got], [want])
        assert torch.equal(got.signbit() | got.isnan(), want.signbit() | want.isnan())  # -0, too


@pytest.mark.parametrize("at", ["start", "end"])
def test_it_touches_nothing_beside_its_tensors(backend, at):
    for n, k, group, rotate in ((37, 46, 23, False), (35, 192, 64, True), (3, 10, 5, False)):
        weight = sk.pack_int8(randn(n, k), group_size=group, rotate=rotate)
        fenced = [guarded_like(part, at=at) for part in (weight.codes, weight.scale)]
        fenced = sk.Int8Weight(n, k, group, *fenced, rotate)
        for dtype in FLOATS:
            out = guarded((n, k), dtype, at=at)
            assert torch.equal(sk.expand(fenced, dtype=dtype, out=out), weight.dequantize().to(dtype))


def test_threads_change_no_bit():
    weight = sk.pack_int8(randn(500, 320), group_size=64, rotate=True)
    with sk.use_backend("cpu"):
        results = []
        for threads in (1, 2):
            with torch_threads(threads):
                results.append(sk.expand(weight))
    assert torch.equal(*results)


def test_it_is_recorded():
    weight = sk.pack_int8(randn(20, 64), group_size=32)
    out = torch.zeros(20, 64, dtype=torch.bfloat16)
    with sk.use_backend("cpu"), record() as recording:
        sk.expand(weight, out=out)
    weight.scale.mul_(2)
    recording.run()
    assert torch.equal(out, weight.dequantize().bfloat16())


def test_what_is_refused():
    weight = sk.pack_int8(randn(16, 64))
    overlapping = weight.codes.view(torch.bfloat16).view(-1).as_strided((16, 64), (0, 1))
    cases = [
        (TypeError, "weight: expected an Int8Weight, got Tensor", lambda: sk.expand(randn(4, 4))),
        (TypeError, "dtype: expected float32, float16 or bfloat16", lambda: sk.expand(weight, dtype=torch.float64)),
        (TypeError, "out: expected dtype bfloat16, got float32", lambda: sk.expand(weight, out=torch.empty(16, 64))),
        (ValueError, "out: expected shape", lambda: sk.expand(weight, out=torch.empty(16, 63).bfloat16())),
        (
            ValueError,
            "out: expected a contiguous last",
            lambda: sk.expand(weight, out=torch.empty(64, 16).bfloat16().t()),
        ),
        (ValueError, "out: expected evenly spaced rows", lambda: sk.expand(weight, out=overlapping)),
        (
            ValueError,
            "out: expected memory of its own",
            lambda: sk.expand(weight, dtype=torch.float32, out=inside(weight)),
        ),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()


def inside(weight):
    """A tensor of the right shape that ends in the weight's memory."""
    whole = torch.zeros(2 * 16 * 64 * 4 // 4)
    weight.codes = whole.view(torch.uint8)[4096:5120].view(weight.codes.shape)
    weight.spans = ((weight.codes.data_ptr(), weight.codes.data_ptr() + 1024), *weight.spans[1:])
    return whole[64 : 64 + 1024].view(16, 64)
