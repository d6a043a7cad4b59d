"""linear_int8, linear_f32 and the packed weight: equal bits on every instruction set, for any rows and threads."""

import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native

ISAS = [isa for isa in native.ISA_NAMES if native.cpu and native.cpu.set_isa(isa)]


@pytest.fixture(params=ISAS)
def isa(request):
    native.cpu.set_isa(request.param)
    yield request.param
    native.cpu.set_isa(native.cpu.machine_isa())


def reference(x, weight, bias=None):
    with sk.use_backend("reference"):
        return sk.linear_int8(x, weight, bias)


SHAPES = [(1, 1, None), (17, 6, 3), (40, 96, 32), (33, 130, None), (64, 576, 192), (100, 512, 256), (5, 35, 7)]


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_equals_the_reference(isa, n, k, group):
    gen = torch.Generator().manual_seed(n * 1000 + k)
    w = torch.randn(n, k, generator=gen)
    with sk.use_backend("reference"):
        expected = sk.pack_int8(w, group_size=group)
    weight = sk.pack_int8(w, group_size=group)
    assert torch.equal(weight.codes, expected.codes) and torch.equal(weight.scale, expected.scale)
    bias = torch.randn(n, generator=gen)
    for m in (0, 1, 2, 3, 4, 5, 7, 8, 9, 17, 70):
        x = torch.randn(m, k, generator=gen)
        assert torch.equal(sk.linear_int8(x, weight, bias), reference(x, weight, bias))
