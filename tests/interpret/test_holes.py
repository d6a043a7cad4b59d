"""Holes of the interpreter that the kernels are written around. A test that fails here: Triton has mended one."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def add_directly(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def add_in_float32(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float32) + tl.load(y + i).to(tl.float32))


@pytest.mark.parametrize(("kernel", "right"), [(add_directly, False), (add_in_float32, True)])
def test_bfloat16_arithmetic_is_right_only_in_float32(kernel, right):
    x, y = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(16, dtype=torch.float32 if right else torch.bfloat16)
    kernel[(1,)](x, y, out, N=16)
    assert torch.allclose(out.float(), x.float() + y.float(), rtol=0.01) == right


@triton.jit
def to_bfloat16(x, out):
    tl.store(out, tl.load(x).to(tl.bfloat16))


def test_conversion_to_bfloat16_cuts_off():
    x, out = torch.tensor([1.0 + 3 * 2.0**-9]), torch.empty(1, dtype=torch.bfloat16)
    to_bfloat16[(1,)](x, out)
    assert out.item() == 1.0 and x.bfloat16().item() == 1.0 + 2.0**-7


@triton.jit
def assert_something_false(out):
    tl.device_assert(tl.load(out) > 0, "never said")
    tl.store(out, 1)


def test_device_assert_says_nothing():
    out = torch.zeros(1, dtype=torch.int32)
    assert_something_false[(1,)](out)
    assert out.item() == 1


@triton.jit
def inline_assembly(out):
    x = tl.load(out)
    tl.store(out, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1))


def test_inline_assembly_raises():
    with pytest.raises(Exception, match="inline_asm"):
        inline_assembly[(1,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def read_behind(x, out):
    tl.store(out, tl.load(x + 4))


def test_a_read_out_of_bounds_goes_unnoticed():
    out = torch.zeros(1)
    read_behind[(1,)](torch.arange(8.0)[:4], out)
    assert out.item() == 4.0
