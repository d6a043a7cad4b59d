"""RMS norm and silu * up, plain and followed by int8 quantisation in the same pass.

The form that the backends get (tensors validated, rows evenly spaced, last dimension contiguous; residual and
residual_out are both None or both tensors):

    rms_norm(x, weight, eps, residual, residual_out, out)
    rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale)
    silu_mul(gate_up, out)
    silu_mul_quantize_int8(gate_up, group, q, scale)

A fused operation gives the codes of the plain one followed by ``quantize_int8``, bit for bit within a backend.
"""

import math

import torch

from . import registry, validate
from .quantize import _CODES, _SCALE, _group_size, _readable


def rms_norm(x, weight, eps, *, residual=None, residual_out=None, out=None):
    """h * f32(1 / sqrt(mean(h^2) + eps)) * weight over the last dimension, h = x + residual.

    The sum is rounded to x.dtype, the mean of squares is taken in f64, and each of the two products is computed in f32
    and rounded to x.dtype.

    Parameters
    ----------
    x : f32, f16 or bf16 [..., H], rows any distance apart.
    weight : [H], dtype of x, contiguous.
    eps : number >= 0.
    residual : like x; ``residual_out`` receives h. It may be ``residual`` or ``x`` itself (an update in place); any
        other overlap is refused.
    out : like x, memory of its own.

    Returns y, or (y, residual_out) with a residual.
    """
    x, residual, residual_out = _norm_arguments(x, weight, eps, residual, residual_out)
    out = _plain_output(x, out, x.shape)
    if residual is not None:
        validate.no_overlap("out", out, "residual_out", residual_out)
        validate.no_overlap("out", out, "residual", residual)
    validate.no_overlap("out", out, "weight", weight)
    registry.call("rms_norm", x.device.type, x, weight, eps, residual, residual_out, out)
    return out if residual is None else (out, residual_out)


def rms_norm_quantize_int8(x, weight, eps, *, residual=None, group_size=None, residual_out=None, out=None):
    """``quantize_int8(rms_norm(x, weight, eps, residual=residual), group_size=group_size)`` in one pass.

    Arguments as for :func:`rms_norm`; ``out`` is (q int8 [..., H], scale f32 [..., G]). Returns (q, scale), or
    (q, scale, residual_out) with a residual.
    """
    x, residual, residual_out = _norm_arguments(x, weight, eps, residual, residual_out)
    cols = x.shape[-1]
    group = cols if group_size is None else _group_size(group_size, cols)
    q, scale = _code_outputs(x, x.shape, cols // group if group else 1, out)
    if out is not None:
        if residual is not None:
            validate.no_overlap("out[0]", q, "residual_out", residual_out)
            validate.no_overlap("out[1]", scale, "residual_out", residual_out)
            validate.no_overlap("out[1]", scale, "residual", residual)
        validate.no_overlap("out[1]", scale, "weight", weight)
    registry.call("rms_norm_quantize_int8", x.device.type, x, weight, eps, residual, residual_out, group, q, scale)
    return (q, scale) if residual is None else (q, scale, residual_out)


def silu_mul(gate_up, *, out=None):
    """silu(gate) * up for gate_up [..., 2 * H] = (gate, up), silu(x) = x / (1 + exp(-x)).

    silu and the product are computed in f32 and each rounded to gate_up.dtype (f32, f16 or bf16). ``out`` is [..., H].
    """
    gate_up, shape = _halves(gate_up)
    out = _plain_output(gate_up, out, shape, "gate_up")
    registry.call("silu_mul", gate_up.device.type, gate_up, out)
    return out


def silu_mul_quantize_int8(gate_up, *, group_size=None, out=None):
    """``quantize_int8(silu_mul(gate_up), group_size=group_size)`` in one pass; ``out`` is (q, scale)."""
    gate_up, shape = _halves(gate_up)
    cols = shape[-1]
    group = cols if group_size is None else _group_size(group_size, cols)
    q, scale = _code_outputs(gate_up, shape, cols // group if group else 1, out, "gate_up")
    registry.call("silu_mul_quantize_int8", gate_up.device.type, gate_up, group, q, scale)
    return q, scale


def _norm_arguments(x, weight, eps, residual, residual_out):
    validate.tensor("x", x, validate.FLOATS)
    x = _readable("x", x)
    validate.tensor("weight", weight, (x.dtype,), 1, x.device)
    if weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight: expected shape [{x.shape[-1]}], got {list(weight.shape)}")
    validate.rows("weight", weight)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}")
    if residual is None:
        if residual_out is not None:
            raise ValueError("residual_out: expected None without a residual, got a tensor")
        return x, None, None
    validate.tensor("residual", residual, (x.dtype,), None, x.device)
    if residual.shape != x.shape:
        raise ValueError(f"residual: expected shape {list(x.shape)} like x, got {list(residual.shape)}")
    if residual_out is None:
        return x, _readable("residual", residual), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual_out is not residual:
        validate.tensor("residual_out", residual_out, (x.dtype,), None, x.device)
        if residual_out.shape != x.shape:
            raise ValueError(f"residual_out: expected shape {list(x.shape)} like x, got {list(residual_out.shape)}")
    validate.output_rows("residual_out", residual_out)
    residual = _readable("residual", residual)
    for name, value in (("residual", residual), ("x", x)):
        if not _same_memory(residual_out, value):
            validate.no_overlap("residual_out", residual_out, name, value)
    validate.no_overlap("residual_out", residual_out, "weight", weight)
    return x, residual, residual_out


def _same_memory(a, b):
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _halves(gate_up):
    validate.tensor("gate_up", gate_up, validate.FLOATS)
    gate_up = _readable("gate_up", gate_up)
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(f"gate_up: expected an even last dimension (gate and up side by side), got {width}")
    return gate_up, (*gate_up.shape[:-1], width // 2)


def _plain_output(x, out, shape, name="x"):
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    return _checked("out", out, (x.dtype,), x, shape, name)


def _code_outputs(x, shape, groups, out, name="x"):
    per_group = (*shape[:-1], groups)
    if out is None:
        q = torch.empty(shape, dtype=torch.int8, device=x.device)
        return q, torch.empty(per_group, dtype=torch.float32, device=x.device)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} tensors" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected (q, scale), got {got}")
    q, scale = out
    _checked("out[0]", q, _CODES, x, shape, name)
    _checked("out[1]", scale, _SCALE, x, per_group, name)
    validate.no_overlap("out[1]", scale, "out[0]", q)
    return q, scale


def _checked(name, value, dtypes, x, shape, x_name):
    validate.tensor(name, value, dtypes, None, x.device)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
    validate.output_rows(name, value)
    validate.no_overlap(name, value, x_name, x)
    return value
