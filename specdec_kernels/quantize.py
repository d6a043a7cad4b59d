"""int8 quantisation and dequantisation: one scale (and zero point) per row or per group of a row.

The form that the backends get (tensors validated, rows evenly spaced, last dimension contiguous):

    quantize_int8(x, group, symmetric, static, seed, offset, q, scale, zero_point, sums)
    dequantize_int8(q, scale, zero_point, out)

``group`` divides H; q, scale, zero_point and sums are outputs, except that scale and zero_point are inputs if
``static``; zero_point is None if ``symmetric``, sums is None or int32 [..., G]; ``seed`` is None for
round-half-to-even. A scale or zero point that is an input holds one value, one per row [..., 1] or one per group
[..., G].
"""

import math
import numbers

import torch

from . import registry, validate
from .code_outputs import code_outputs, group_count, group_length, integer, readable

_MAX_FLOAT = torch.finfo(torch.float32).max


def quantize_int8(
    x,
    *,
    group_size=None,
    scale=None,
    zero_point=None,
    symmetric=True,
    stochastic_seed=None,
    stochastic_offset=0,
    return_sums=False,
    out=None,
):
    """Quantises ``x`` to int8 codes: ``(q, scale)``, or ``(q, scale, zero_point)`` if not ``symmetric``.

    x ~ (q - zero_point) * scale. With amax, max and min over a row or group of x, all in IEEE f32:

        symmetric:   scale = amax / 127                      q = clamp(round(x / scale), -127, 127)
        asymmetric:  scale = max / 255 - min / 255           q = clamp(round(x / scale) + zero_point, -128, 127)
                     zero_point = round(-128 - min / scale)  (the range is first widened to contain 0)

    Ties round to even. A group whose scale would be below 2^-126 gets scale 0; NaN in a group makes its scale NaN, Inf
    makes it inf; in all three cases q and zero_point are 0, and other groups are not touched. One huge value makes all
    small ones of its group 0; smaller groups keep it among fewer.

    Parameters
    ----------
    x : f32, f16 or bf16 [..., H]. The last dimension must be contiguous; rows may be any distance apart (leading
        dimensions that can't be walked with one stride cost a copy).
    group_size : values per scale, a divisor of H; None for one scale per row, or for the groups of a given scale.
    scale, zero_point : given instead of computed (a number, or f32 and int32 tensors [..., 1] or [..., G]), zero_point
        exactly when not symmetric. A NaN in x then gives code 0, Inf clamps. Returned as given.
    stochastic_seed : rounds v = x / scale to floor(v) + (u < v - floor(v)) with u = the upper 24 bits of Philox word
        (i & 3) at counter (i >> 2, 4 << 24, 0), i = ``stochastic_offset`` + the index of the element in x. The mean of
        q is then v, integers stay, and chunks with their offsets give the same codes as the whole.
    return_sums : also return, as the last one, the exact sum of each group's codes, int32 [..., G] (for a matrix
        product with zero points).
    out : the tuple to write to: q, scale, zero_point if not symmetric, sums if asked for; shapes [..., H] and [..., G],
        rows any distance apart, memory of their own. With a given scale: q, or the tuple with the given tensors in it.

    Returns int8 [..., H], f32 [..., G], int32 [..., G] and int32 [..., G], G = H / group_size or 1.
    Raises TypeError or ValueError with the argument's name; on the CPU also for a given scale that is not positive and
    finite.
    """
    validate.tensor("x", x, validate.FLOATS)
    x = readable("x", x)
    cols = x.shape[-1]
    group = group_length(group_size, cols, return_sums)
    if stochastic_seed is not None:
        stochastic_seed = integer("stochastic_seed", stochastic_seed) & 0xFFFFFFFFFFFFFFFF
    if stochastic_offset != 0:
        stochastic_offset = integer("stochastic_offset", stochastic_offset)
        if not 0 <= stochastic_offset < 2**64:
            raise ValueError(f"stochastic_offset: expected an index in [0, 2^64), got {stochastic_offset}")
    if scale is None:
        if zero_point is not None:
            raise ValueError("zero_point: expected None without a scale, got one")
        result = code_outputs(x, x.shape, group, symmetric, return_sums, out, {"x": x}, {})
        q, scales = result[0], result[1]
        zero_points = None if symmetric else result[2]
    else:
        if (zero_point is None) is not bool(symmetric):
            raise ValueError(
                "zero_point: expected one exactly when a scale is given and symmetric=False, "
                f"got {'none' if zero_point is None else 'one'} with symmetric={symmetric}"
            )
        scales, zero_points, group = _static(x, scale, zero_point, None if group_size is None else group)
        result = _static_outputs(x, group, scale, zero_point, return_sums, out)
        q = result[0]
    registry.call(
        "quantize_int8",
        validate.device_type(x),
        x,
        group,
        bool(symmetric),
        scale is not None,
        stochastic_seed,
        stochastic_offset,
        q,
        scales,
        zero_points,
        result[-1] if return_sums else None,
    )
    return result


def dequantize_int8(q, scale, zero_point=None, *, dtype=torch.float32):
    """(q - zero_point) * scale: int8 codes [..., H] back to values, computed in f32 and rounded once to ``dtype``.

    ``scale`` (f32) and ``zero_point`` (int32) are numbers or tensors of shape [..., 1] or [..., G], G a divisor of H.
    ``dtype`` is float32, float16 or bfloat16. Returns a contiguous tensor [..., H].
    """
    validate.tensor("q", q, (torch.int8,))
    q = readable("q", q)
    if dtype not in validate.FLOATS:
        raise TypeError(f"dtype: expected float32 or float16 or bfloat16, got {dtype}")
    scale = _per_group("scale", scale, torch.float32, q)
    if zero_point is not None:
        zero_point = _per_group("zero_point", zero_point, torch.int32, q)
    _common_group(q, scale, zero_point)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    registry.call("dequantize_int8", validate.device_type(q), q, scale, zero_point, out)
    return out


def _static_outputs(x, group, scale, zero_point, return_sums, out):
    """(q, scale[, zero_point][, sums]) for a given scale: out is q, or the tuple that the call returns."""
    given = (scale,) if zero_point is None else (scale, zero_point)
    per_group = (*x.shape[:-1], x.shape[-1] // group if group else 1)
    if out is None:
        q = x.new_empty(x.shape, dtype=torch.int8)
        return (q, *given, x.new_empty(per_group, dtype=torch.int32)) if return_sums else (q, *given)
    if not isinstance(out, (tuple, list)):
        out = (out, *given)
    if len(out) != 1 + len(given) + bool(return_sums) or any(a is not b for a, b in zip(out[1:], given, strict=False)):
        more = " and sums" if return_sums else ""
        raise ValueError(f"out: expected q, or q with the given scale and zero point themselves{more}, got others")
    outputs = {"out": validate.output("out", out[0], torch.int8, x.shape, x.device)}
    if return_sums:
        outputs["out[-1]"] = validate.output("out[-1]", out[-1], torch.int32, per_group, x.device)
    inputs = {"x": x, "scale": scale, "zero_point": zero_point}
    validate.disjoint(outputs, {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor)})
    return tuple(out)


def _static(x, scale, zero_point, group):
    """Given scale and zero point as tensors, and the group length: theirs, or the caller's if they have no groups."""
    scale = _per_group("scale", scale, torch.float32, x)
    if zero_point is not None:
        zero_point = _per_group("zero_point", zero_point, torch.int32, x)
    implied = _common_group(x, scale, zero_point)
    if group not in (None, implied) and implied != x.shape[-1]:
        raise ValueError(f"group_size: expected {implied}, which the given scale implies, got {group}")
    if x.is_cpu and scale.numel():
        low, high = torch.aminmax(scale)
        if not (low.item() > 0 and high.item() <= _MAX_FLOAT):  # NaN fails both
            raise ValueError(f"scale: expected positive finite values, got some in {low.item()} to {high.item()}")
    return scale, zero_point, implied if group is None else group


def _per_group(name, value, dtype, x):
    """A number or tensor as a tensor that holds one value, one per row, or one per group of x."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if dtype is torch.int32:
            value = integer(name, value)
            if not -(2**31) <= value < 2**31:
                raise ValueError(f"{name}: expected an int32, got {value}")
        elif abs(value) > _MAX_FLOAT:
            value = math.inf if value > 0 else -math.inf  # of an int that torch can't convert, too
        return torch.tensor([value], dtype=dtype, device=x.device)
    validate.tensor(name, value, (dtype,), device=x.device)
    if value.numel() == 1:
        return value
    cols = x.shape[-1]
    if value.shape[:-1] != x.shape[:-1] or (value.shape[-1] != 1 and (value.shape[-1] == 0 or cols % value.shape[-1])):
        lead = ", ".join(str(n) for n in x.shape[:-1])
        raise ValueError(
            f"{name}: expected a number, shape [{lead}, 1] or [{lead}, G] with G a divisor of {cols}, "
            f"got shape {list(value.shape)}"
        )
    return readable(name, value)


def _common_group(x, scale, zero_point):
    groups, group = group_count(x.shape[-1], scale, zero_point)
    if zero_point is not None and scale.numel() > 1 and zero_point.numel() > 1:
        counts = scale.shape[-1], zero_point.shape[-1]
        if 1 not in counts and counts[0] != counts[1]:
            raise ValueError(f"zero_point: expected {counts[0]} groups like scale or 1, got {counts[1]}")
    if groups > 1 and groups * group != x.shape[-1]:
        raise ValueError(f"scale: expected a number of groups that divides {x.shape[-1]}, got {groups}")
    return group
