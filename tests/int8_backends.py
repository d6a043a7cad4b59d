"""Everything that can run the quantise family here: the reference, and the cpu backend on each instruction set."""

import contextlib

import pytest
import torch

import specdec_kernels as sk
from instruction_sets import ISAS
from specdec_kernels import native

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BACKENDS = ("reference", *(f"cpu-{i}" for i in ISAS))

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@contextlib.contextmanager
def running_on(name):
    kind, _, isa = name.partition("-")
    if isa:
        assert native.cpu.set_isa(isa)
    try:
        with sk.use_backend(kind):
            yield
    finally:
        if isa:
            native.cpu.set_isa(native.cpu.machine_isa())


def on_reference(function, *args, **options):
    with sk.use_backend("reference"):
        return function(*args, **options)


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(got, want):
    """The same tuple of tensors, bit for bit (NaN equals NaN)."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
