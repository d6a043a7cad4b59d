"""silu * up and gelu * up, spelled out. The arguments' form: specdec_kernels/gates.py."""

import math

import torch

from .quantize import quantize_int8


def silu_mul(gate_up, out):
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(_gated(gate / (1 + torch.exp(-gate)), up, gate_up.dtype))


def gelu_mul(gate_up, tanh, out):
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(_gated(_gelu(gate.double(), tanh).float(), up, gate_up.dtype))


def silu_mul_quantize_int8(gate_up, group, q, scale, sums):
    y = gate_up.new_empty(q.shape)
    silu_mul(gate_up, y)
    quantize_int8(y, group, True, False, None, 0, q, scale, None, sums)


def gelu_mul_quantize_int8(gate_up, tanh, group, q, scale, sums):
    y = gate_up.new_empty(q.shape)
    gelu_mul(gate_up, tanh, y)
    quantize_int8(y, group, True, False, None, 0, q, scale, None, sums)


def _gelu(x, tanh):
    """In forms that cancel nothing: 1 + erf(z) = erfc(-z), (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    if tanh:
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def _gated(gate, up, dtype):
    return (gate.to(dtype).float() * up).to(dtype)
