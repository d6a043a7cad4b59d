"""Products with a weight matrix: int8 x int8 with exact sums (``linear_int8``) and floats in a fixed order
(``linear_f32``).

In both, a row of the result depends on that row of x alone, bit for bit, however many rows a call has; and
a call with a few rows reads the weights once. So verifying K drafts gives exactly the numbers that K + 1
single steps would give, at little more than the price of one.
"""

import torch

from . import native, registry
from .int8_weight import Int8Weight, pack_int8
from .validate import FLOATS, no_overlap, output, outside, rows, shape, tensor

__all__ = ["Int8Weight", "linear_f32", "linear_int8", "pack_int8"]


def linear_int8(x, weight, bias=None, *, out=None):
    """y = x w^T (+ bias) with int8 codes on both sides.

    ``x`` is float [..., K] (f32, f16, bf16; quantised here with the weight's groups, exactly as ``quantize_int8``
    does, and for a rotated weight each group is rotated first, see rotation.py) or a pair (q int8 [..., K], scale
    f32 [..., 1] or [..., G]) used as it is, which a rotated weight refuses. ``weight`` is an :class:`Int8Weight`
    [N, K], ``bias`` a float vector [N]. Result [..., N] in x's dtype, f32 for a pair.

        y[m, n] = sum over groups, ascending and in f32, of f32(acc) * f32(s_x * s_w);  acc: exact int32 sum
        of the codes

    Product and sum are two roundings, the bias is added last, then one rounding to the result's dtype:
    every backend gives the same bits. Rows may lie any distance apart; ``out`` needs memory of its own.
    """
    if type(weight) is not Int8Weight:
        raise TypeError(f"weight: expected an Int8Weight (see pack_int8), got {type(weight).__name__}")
    n, k, device = weight.n, weight.k, weight.device
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ValueError(f"x: expected a tensor or a pair (q, scale), got {len(x)} values")
        if weight.rotated:
            raise ValueError("x: expected a float tensor for a rotated weight, got (q, scale): codes can't be rotated")
        x, scale = x
        tensor("x", x, _CODES, None, device)
        dtype = torch.float32
    else:
        scale = None
        dtype = tensor("x", x, FLOATS, None, device).dtype
    matrix, lead = _matrix("x", x, k)
    if scale is not None:
        scale = _scales(tensor("scale", scale, _F32, None, device), lead, matrix.shape[0], weight.groups)
    if bias is not None:
        shape("bias", tensor("bias", bias, FLOATS, None, device), (n,))
        rows("bias", bias)
    result, out = _output(out, matrix, lead, n, dtype, weight.spans, bias=bias, scale=scale)
    if lead is None or matrix.shape[0]:
        registry.call("linear_int8", weight.device_type, matrix, scale, weight, bias, out)
    return result


def linear_f32(x, weight, bias=None, *, out=None):
    """y = x w^T (+ bias) in f32: ``x`` f32 [..., K], ``weight`` f32 or bf16 [N, K], result f32 [..., N].

    Every output is summed in one fixed order (see ``csrc/cpu/linear_f32.cpp``), the same for any number of
    rows, threads and instruction set; the reference sums in f64 and rounds once. ``bias``, a float vector [N], is
    added to the rounded sum. A bf16 weight gives the bits of the same weight in f32 and is read in half the time.
    """
    n, k = tensor("weight", weight, _WEIGHTS, 2).shape
    rows("weight", weight)
    matrix, lead = _matrix("x", tensor("x", x, _F32, None, weight.device), k)
    if bias is not None:
        shape("bias", tensor("bias", bias, FLOATS, None, weight.device), (n,))
        rows("bias", bias)
    result, out = _output(out, matrix, lead, n, torch.float32, (), weight=weight, bias=bias)
    if lead is None or matrix.shape[0]:
        registry.call("linear_f32", weight.device.type, matrix, weight, bias, out)
    return result


_CODES = (torch.int8,)
_F32 = (torch.float32,)
_WEIGHTS = (torch.float32, torch.bfloat16)


# These run on every call of a decoder: one look at shape and strides each, everything else only in odd cases.


def _matrix(name, value, k):
    """``(value as a matrix [M, k], its leading dimensions)``; None for the latter if it is a matrix already."""
    sizes = value.shape
    if not sizes or sizes[-1] != k:
        raise ValueError(f"{name}: expected a last dimension of {k} like the weight's, got shape {list(sizes)}")
    if k > 1 and value.stride()[-1] != 1 and value.numel():
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(value.stride())}")
    if len(sizes) == 2:
        return value, None
    lead = sizes[:-1]
    return _flat(name, value, lead.numel(), k), lead


def _flat(name, value, m, columns):
    """The value as a matrix [m, columns], a copy if its rows are not evenly spaced."""
    matrix = value.reshape(m, columns)
    if matrix.data_ptr() != value.data_ptr():
        native.not_recordable(f"{name} had to be copied: its rows are not evenly spaced")
    return matrix


def _scales(scale, lead, m, groups):
    """The scales of x as a matrix [m, 1] or [m, groups]."""
    sizes = scale.shape
    if sizes != (m, groups) or lead is not None:
        if not sizes or sizes[-1] not in (1, groups) or sizes[:-1] != (lead if lead is not None else (m,)):
            like = "[M" if lead is None else f"[{', '.join(map(str, lead))}"
            raise ValueError(f"scale: expected shape {like}, 1] or {like}, {groups}], got {list(sizes)}")
        scale = _flat("scale", scale, m, sizes[-1])
    return rows("scale", scale)


def _output(out, x, lead, n, dtype, spans, **inputs):
    """``(the result in the caller's shape, the same memory as a matrix [M, n] for the backend)``.

    ``spans`` of addresses and ``inputs`` (tensors or None) are what it must not overlap besides x.
    """
    m = x.shape[0]
    if out is None:
        out = torch.empty((m, n), dtype=dtype, device=x.device)
        return (out if lead is None else out.view(*lead, n)), out
    output("out", out, dtype, (m, n) if lead is None else (*lead, n), x.device)
    if not (out.is_contiguous() and x.is_contiguous() and _apart(out, x)):
        no_overlap("out", out, "x", x)
    for name, other in inputs.items():
        if other is not None:
            no_overlap("out", out, name, other)
    if spans:
        outside("out", out, spans)
    return out, (out if lead is None else out.view(m, n))


def _apart(a, b):
    """Whether two contiguous tensors share no byte."""
    start, other = a.data_ptr(), b.data_ptr()
    return start >= other + b.nbytes or other >= start + a.nbytes
