"""int8 quantisation, spelled out. The arguments' form: specdec_kernels/quantize.py."""

import torch

from ..code_outputs import group_count
from .philox import philox4x32

_SMALLEST_SCALE = 2.0**-126
_ROUNDING = 4 << 24  # the Philox stream of stochastic rounding


def quantize_int8(x, group, symmetric, static, seed, offset, q, scale, zero_point, sums):
    groups = x.shape[-1] // group if group else 1
    values = x.float().unflatten(-1, (groups, group))  # [..., G, group]
    if not static:
        s, zero = _symmetric_grid(values) if symmetric else _asymmetric_grid(values)
        scale.copy_(s.squeeze(-1))
        if not symmetric:
            zero_point.copy_(zero.squeeze(-1))
    else:
        s = _spread(scale, values)
        zero = 0 if symmetric else _spread(zero_point, values)
    if x.numel() == 0:
        if sums is not None:
            sums.zero_()
        return
    v = values / s
    if seed is None:
        rounded = torch.round(v)  # half to even
    else:
        below = torch.floor(v)
        rounded = below + (_uniform(seed, offset, v) < v - below)
    codes = (rounded.double() + zero).clamp(-127 if symmetric else -128, 127)  # exact for any int32 zero point
    blank = values.isnan() | ~((s > 0) & s.isfinite())
    codes = torch.where(blank, 0, codes).to(torch.int8)
    q.copy_(codes.reshape(x.shape))
    if sums is not None:
        sums.copy_(codes.sum(-1, dtype=torch.int32))


def dequantize_int8(q, scale, zero_point, out):
    groups, group = group_count(q.shape[-1], scale, zero_point)
    values = q.unflatten(-1, (groups, group)).double()
    if zero_point is not None:
        values = values - _spread(zero_point, values)
    out.copy_((values.float() * _spread(scale, values)).reshape(out.shape))


def _symmetric_grid(values):
    if values.shape[-1] == 0:
        return torch.zeros_like(values.sum(-1, keepdim=True)), 0
    magnitude = values.abs().amax(-1, keepdim=True)  # NaN if any is
    return torch.where(magnitude < 127 * _SMALLEST_SCALE, 0.0, _divide(magnitude, 127)), 0


def _asymmetric_grid(values):
    if values.shape[-1] == 0:
        zeros = torch.zeros_like(values.sum(-1, keepdim=True))
        return zeros, zeros.int()
    high = values.amax(-1, keepdim=True).clamp(min=0)
    low = values.amin(-1, keepdim=True).clamp(max=0)
    s = _divide(high, 255) - _divide(low, 255)
    s = torch.where(s < _SMALLEST_SCALE, 0.0, s)
    zero = torch.where((s > 0) & s.isfinite(), torch.round(-128 - low / s), 0.0)
    return s, zero.int()


def _divide(values, number):
    """IEEE division; ``values / number`` multiplies by the reciprocal on CUDA."""
    return values / torch.full_like(values, number)


def _spread(value, values):
    """A given scale or zero point as [..., G, 1]."""
    return value.reshape(()) if value.numel() == 1 else value.unsqueeze(-1).expand(*values.shape[:-1], 1)


def _uniform(seed, offset, like):
    """u of every element in row-major order: 24 bits, exact in f32."""
    index = torch.arange(like.numel(), device=like.device) + (offset if offset < 2**63 else offset - 2**64)
    counter = (index >> 2) & (2**62 - 1)  # the offset counts modulo 2^64
    key = seed & 0xFFFFFFFF, seed >> 32
    words = philox4x32(key, (counter & 0xFFFFFFFF, counter >> 32, _ROUNDING, 0))
    word = torch.stack(words, -1).gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)
    return ((word >> 8).float() * 2.0**-24).reshape(like.shape)
