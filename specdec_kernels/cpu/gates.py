"""silu * up and gelu * up on the CPU. The arguments' form: specdec_kernels/gates.py."""

from .. import native
from ..native import DTYPE_CODE, launch
from .rows import codes, rows_of, values

_kernel = native.cpu.gate_mul
_threads = native.threads
_SILU, _GELU, _GELU_TANH = range(3)  # Gate in csrc/cpu/quantize.h


def silu_mul(gate_up, out):
    if out.numel():
        _gate(_SILU, gate_up, values(out))


def gelu_mul(gate_up, tanh, out):
    if out.numel():
        _gate(_GELU_TANH if tanh else _GELU, gate_up, values(out))


def silu_mul_quantize_int8(gate_up, group, q, scale, sums):
    _gate(_SILU, gate_up, codes(group, q, scale, sums))


def gelu_mul_quantize_int8(gate_up, tanh, group, q, scale, sums):
    _gate(_GELU_TANH if tanh else _GELU, gate_up, codes(group, q, scale, sums))


def _gate(which, gate_up, output):
    rows, cols, stride = rows_of(gate_up)
    launch(_kernel, which, DTYPE_CODE[gate_up.dtype], gate_up.data_ptr(), rows, cols // 2, stride, *output, _threads())
