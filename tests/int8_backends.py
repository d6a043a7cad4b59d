"""Everything that can run the int8 operations here, and what their tests share.

``TRITON_INTERPRET=1 pytest tests/test_quantize*.py`` runs the same tests on the interpreted Triton kernels.
"""

import contextlib

import pytest
import torch

import verify_cases
from instruction_sets import ISAS
from specdec_kernels import gpu
from verify_cases import EMULATED, running

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = verify_cases.BACKENDS == ["triton"]  # this process is for the Triton kernels
# The reference, the cpu backend as isa-threads, the GPU kernels on the emulator.
BACKENDS = ["triton"] if INTERPRETED else [*verify_cases.BACKENDS, EMULATED]
OTHERS = [name for name in BACKENDS if name != "reference"]  # to be compared with it
CPU = [name for name in BACKENDS if name.partition("-")[0] in ISAS]
# Those with norms, gates and sums of codes.
ROW_BACKENDS = [b for b in BACKENDS if b != EMULATED or hasattr(gpu, "fused")]
# Every kernel once, for inputs so small that one thread does all the work anyway.
FEW_BACKENDS = [name for name in ROW_BACKENDS if name not in CPU[0::4] + CPU[3::4]] if CPU else BACKENDS

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def on_reference(function, *args, **options):
    with running("reference"):
        return function(*args, **options)


@contextlib.contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got, want):
    """The same tuple of tensors, bit for bit (NaN equals NaN)."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def differ_rarely(got, want):
    """Codes and scales of a fused operation on two backends: the last bits of exp and sums of squares may differ."""
    gap = (got[0].int() - want[0].int()).abs()
    assert gap.numel() == 0 or (gap.max() <= 1 and gap.double().mean() <= 1e-4)
    torch.testing.assert_close(got[1], want[1], rtol=1e-2, atol=0)
