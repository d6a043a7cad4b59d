"""RMS norm and layer norm, plain and followed by int8 quantisation in the same pass.

The form that the backends get (tensors validated, rows evenly spaced, last dimension contiguous; residual and
residual_out are both None or both tensors; bias and sums may be None):

    rms_norm(x, weight, eps, residual, residual_out, out)
    rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale, sums)
    layer_norm(x, weight, bias, eps, residual, residual_out, out)
    layer_norm_quantize_int8(x, weight, bias, eps, residual, residual_out, group, q, scale, sums)

A fused operation gives the codes of the plain one followed by ``quantize_int8``, bit for bit within a backend.
"""

import math
import numbers

from . import registry, validate
from .code_outputs import code_outputs, group_length, plain_output, readable


def rms_norm(x, weight, eps, *, residual=None, residual_out=None, out=None):
    """h * f32(1 / sqrt(mean(h^2) + eps)) * weight over the last dimension, h = x + residual.

    The sum is rounded to x.dtype, the mean of squares is taken in f64, and each of the two products is computed in f32
    and rounded to x.dtype. (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.)

    Parameters
    ----------
    x : f32, f16 or bf16 [..., H], rows any distance apart.
    weight : [H], dtype of x, contiguous.
    eps : number >= 0.
    residual : like x; ``residual_out`` receives h. It may be ``residual`` or ``x`` itself (an update in place); any
        other overlap is refused.
    out : like x, memory of its own.

    Returns y, or (y, residual_out) with a residual. Raises TypeError or ValueError with the argument's name.
    """
    x, residual, residual_out, inputs, outputs = norm_arguments(x, weight, None, eps, residual, residual_out)
    out = plain_output(x, x.shape, out, inputs, outputs)
    registry.call("rms_norm", validate.device_type(x), x, weight, eps, residual, residual_out, out)
    return out if residual is None else (out, residual_out)


def rms_norm_quantize_int8(
    x, weight, eps, *, residual=None, group_size=None, return_sums=False, residual_out=None, out=None
):
    """``quantize_int8(rms_norm(x, weight, eps, residual=residual), group_size=group_size)`` in one pass.

    Arguments as for :func:`rms_norm` and :func:`quantize_int8`; ``out`` is (q int8 [..., H], scale f32 [..., G]) and,
    with ``return_sums``, sums int32 [..., G] behind them. Returns (q, scale[, sums][, residual_out]), the last with a
    residual.
    """
    x, residual, residual_out, inputs, outputs = norm_arguments(x, weight, None, eps, residual, residual_out)
    group = group_length(group_size, x.shape[-1], return_sums)
    result = code_outputs(x, x.shape, group, True, return_sums, out, inputs, outputs)
    registry.call(
        "rms_norm_quantize_int8",
        validate.device_type(x),
        x,
        weight,
        eps,
        residual,
        residual_out,
        group,
        result[0],
        result[1],
        result[2] if return_sums else None,
    )
    return result if residual is None else (*result, residual_out)


def layer_norm(x, weight, eps, *, bias=None, residual=None, residual_out=None, out=None):
    """(h - mean) * f32(1 / sqrt(variance + eps)) * weight + bias over the last dimension, h = x + residual.

    The sum h is rounded to x.dtype. Mean and variance (mean of (h - mean)^2) are taken in f64. Then in f32: h less the
    mean, rounded to f32, times the inverse, rounded to x.dtype; times weight, rounded to x.dtype; plus bias, rounded to
    x.dtype. (Ba, Kiros and Hinton, "Layer Normalization", 2016.)

    ``bias`` is [H], dtype of x, contiguous, or None; the other arguments, what is returned and what is refused are as
    for :func:`rms_norm`.
    """
    x, residual, residual_out, inputs, outputs = norm_arguments(x, weight, bias, eps, residual, residual_out)
    out = plain_output(x, x.shape, out, inputs, outputs)
    registry.call("layer_norm", validate.device_type(x), x, weight, bias, eps, residual, residual_out, out)
    return out if residual is None else (out, residual_out)


def layer_norm_quantize_int8(
    x, weight, eps, *, bias=None, residual=None, group_size=None, return_sums=False, residual_out=None, out=None
):
    """``quantize_int8(layer_norm(x, weight, eps, bias=bias, residual=residual), group_size=group_size)`` in one pass.

    Arguments as for :func:`layer_norm`; ``out``, ``return_sums`` and what is returned as for
    :func:`rms_norm_quantize_int8`.
    """
    x, residual, residual_out, inputs, outputs = norm_arguments(x, weight, bias, eps, residual, residual_out)
    group = group_length(group_size, x.shape[-1], return_sums)
    result = code_outputs(x, x.shape, group, True, return_sums, out, inputs, outputs)
    registry.call(
        "layer_norm_quantize_int8",
        validate.device_type(x),
        x,
        weight,
        bias,
        eps,
        residual,
        residual_out,
        group,
        result[0],
        result[1],
        result[2] if return_sums else None,
    )
    return result if residual is None else (*result, residual_out)


def norm_arguments(x, weight, bias, eps, residual, residual_out, *, weight_name="weight"):
    """The checked x, residual and residual_out, and by name the inputs and outputs that must not overlap."""
    validate.tensor("x", x, validate.FLOATS)
    x = readable("x", x)
    inputs = {"x": x, weight_name: _per_column(weight_name, weight, x)}
    if bias is not None:
        inputs["bias"] = _per_column("bias", bias, x)
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    if not _finite(eps) or eps < 0:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}")
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


def _finite(number):
    try:
        return math.isfinite(number)
    except OverflowError:  # an int beyond all floats
        return False


def _per_column(name, value, x):
    validate.tensor(name, value, (x.dtype,), 1, x.device)
    if value.shape[0] != x.shape[-1]:
        raise ValueError(f"{name}: expected shape [{x.shape[-1]}], got {list(value.shape)}")
    return validate.rows(name, value)


def _same_memory(a, b):
    return a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride())
