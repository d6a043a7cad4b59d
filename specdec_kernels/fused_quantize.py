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
import numbers

from . import registry, validate
from .code_outputs import code_outputs, group_length, readable


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
    x, residual, residual_out, inputs, outputs = _norm_arguments(x, weight, eps, residual, residual_out)
    out = _plain_output(x, x.shape, out, inputs, outputs)
    registry.call("rms_norm", validate.device_type(x), x, weight, eps, residual, residual_out, out)
    return out if residual is None else (out, residual_out)


def rms_norm_quantize_int8(x, weight, eps, *, residual=None, group_size=None, residual_out=None, out=None):
    """``quantize_int8(rms_norm(x, weight, eps, residual=residual), group_size=group_size)`` in one pass.

    Arguments as for :func:`rms_norm`; ``out`` is (q int8 [..., H], scale f32 [..., G]). Returns (q, scale), or
    (q, scale, residual_out) with a residual.
    """
    x, residual, residual_out, inputs, outputs = _norm_arguments(x, weight, eps, residual, residual_out)
    group = group_length(group_size, x.shape[-1])
    q, scale = code_outputs(x, x.shape, group, True, out, inputs, outputs)
    registry.call(
        "rms_norm_quantize_int8", validate.device_type(x), x, weight, eps, residual, residual_out, group, q, scale
    )
    return (q, scale) if residual is None else (q, scale, residual_out)


def silu_mul(gate_up, *, out=None):
    """silu(gate) * up for gate_up [..., 2 * H] = (gate, up), silu(x) = x / (1 + exp(-x)).

    silu and the product are computed in f32 and each rounded to gate_up.dtype (f32, f16 or bf16). ``out`` is [..., H].
    """
    gate_up, shape = _halves(gate_up)
    out = _plain_output(gate_up, shape, out, {"gate_up": gate_up}, {})
    registry.call("silu_mul", validate.device_type(gate_up), gate_up, out)
    return out


def silu_mul_quantize_int8(gate_up, *, group_size=None, out=None):
    """``quantize_int8(silu_mul(gate_up), group_size=group_size)`` in one pass; ``out`` is (q, scale)."""
    gate_up, shape = _halves(gate_up)
    group = group_length(group_size, shape[-1])
    q, scale = code_outputs(gate_up, shape, group, True, out, {"gate_up": gate_up}, {})
    registry.call("silu_mul_quantize_int8", validate.device_type(gate_up), gate_up, group, q, scale)
    return q, scale


def _norm_arguments(x, weight, eps, residual, residual_out):
    """The checked x, residual and residual_out, and by name the inputs and outputs that must not overlap."""
    validate.tensor("x", x, validate.FLOATS)
    x = readable("x", x)
    validate.tensor("weight", weight, (x.dtype,), 1, x.device)
    if weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight: expected shape [{x.shape[-1]}], got {list(weight.shape)}")
    validate.rows("weight", weight)
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}")
    inputs = {"x": x, "weight": weight}
    if residual is None:
        if residual_out is not None:
            raise ValueError("residual_out: expected None without a residual, got a tensor")
        return x, None, None, inputs, {}
    validate.tensor("residual", residual, (x.dtype,), None, x.device)
    if residual.shape != x.shape:
        raise ValueError(f"residual: expected shape {list(x.shape)} like x, got {list(residual.shape)}")
    if residual_out is None:
        inputs["residual"] = readable("residual", residual)
        return x, inputs["residual"], x.new_empty(x.shape), inputs, {}
    validate.output("residual_out", residual_out, x.dtype, x.shape, x.device)
    # An update in place: the output takes the place of the input that it replaces.
    if _same_memory(residual_out, residual):
        residual = residual_out
    else:
        residual = inputs["residual"] = readable("residual", residual)
    if _same_memory(residual_out, x):
        del inputs["x"]
    return x, residual, residual_out, inputs, {"residual_out": residual_out}


def _same_memory(a, b):
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())


def _halves(gate_up):
    validate.tensor("gate_up", gate_up, validate.FLOATS)
    gate_up = readable("gate_up", gate_up)
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(f"gate_up: expected an even last dimension (gate and up side by side), got {width}")
    return gate_up, (*gate_up.shape[:-1], width // 2)


def _plain_output(x, shape, out, inputs, outputs):
    if out is None:
        out = x.new_empty(shape)
    else:
        outputs["out"] = validate.output("out", out, x.dtype, shape, x.device)
    if outputs:
        validate.disjoint(outputs, inputs)
    return out
