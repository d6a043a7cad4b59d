"""Products with a weight matrix: int8 x int8 with exact sums (``linear_int8``) and f32 with a fixed order
(``linear_f32``).

In both, a row of the result depends on that row of x alone, bit for bit, however many rows a call has; and
a call with up to 8 rows reads the weights once. So verifying K drafts gives exactly the numbers that K + 1
single steps would give, at little more than the price of one.
"""

import torch

from . import registry
from .int8_weight import Int8Weight, pack_int8
from .validate import FLOATS, rows, shape, tensor

__all__ = ["Int8Weight", "linear_f32", "linear_int8", "pack_int8"]


def linear_int8(x, weight, bias=None, *, out=None):
    """y = x w^T (+ bias) with int8 codes on both sides.

    ``x`` is float [..., K] (f32, f16, bf16; quantised here with the weight's groups, exactly as
    ``quantize_int8`` does) or a pair (q int8 [..., K], scale f32 [..., 1] or [..., G]) used as it is.
    ``weight`` is an :class:`Int8Weight` [N, K], ``bias`` a float vector [N]. Result [..., N] in x's dtype,
    f32 for a pair.

        y[m, n] = sum over groups, ascending and in f32, of f32(acc) * f32(s_x * s_w);  acc: exact int32 sum
        of the codes

    Product and sum are two roundings, the bias is added last, then one rounding to the result's dtype:
    every backend gives the same bits. Rows may lie any distance apart; ``out`` must not overlap x.
    """
    if type(weight) is not Int8Weight:
        raise TypeError(f"weight: expected an Int8Weight (see pack_int8), got {type(weight).__name__}")
    device = weight.device
    if isinstance(x, (tuple, list)):
        if len(x) != 2:
            raise ValueError(f"x: expected a tensor or a pair (q, scale), got {len(x)} values")
        q, scale = x
        tensor("x", q, _CODES, device=device)
        tensor("scale", scale, _F32, device=device)
        dtype = torch.float32
    else:
        q, scale = tensor("x", x, FLOATS, device=device), None
        dtype = q.dtype
    lead, m, stride = _flat("x", q, weight.k)
    if lead is not None:
        q = q.reshape(m, weight.k)
    if scale is not None:
        groups = scale.shape[-1] if scale.dim() else 0
        if groups != 1 and groups != weight.groups:
            raise ValueError(f"scale: expected 1 or {weight.groups} scales per row of x, got shape {list(scale.shape)}")
        if lead is not None or scale.dim() != 2 or scale.shape[0] != m:
            shape("scale", scale, (*(lead if lead is not None else (m,)), groups))
            scale = scale.reshape(m, groups)
        rows("scale", scale)
    if bias is not None:
        tensor("bias", bias, FLOATS, device=device)
        shape("bias", bias, (weight.n,))
        bias = rows("bias", bias)
    out, result = _output(out, lead, m, weight.n, dtype, q, stride)
    if m:
        registry.call("linear_int8", device.type, q, scale, weight, bias, out)
    return result


def linear_f32(x, weight, *, out=None):
    """y = x w^T in f32: ``x`` [..., K], ``weight`` [N, K], result [..., N], all f32.

    Every output is summed in one fixed order (see ``csrc/cpu/linear_f32.cpp``), the same for any number of
    rows, threads and instruction set; the reference sums in f64 and rounds once.
    """
    tensor("weight", weight, _F32, ndim=2)
    n, k = weight.shape
    rows("weight", weight)
    tensor("x", x, _F32, device=weight.device)
    lead, m, stride = _flat("x", x, k)
    if lead is not None:
        x = x.reshape(m, k)
    out, result = _output(out, lead, m, n, torch.float32, x, stride)
    if m and n:
        registry.call("linear_f32", weight.device.type, x, weight, out)
    return result


_CODES = (torch.int8,)
_F32 = (torch.float32,)


def _flat(name, value, k):
    """(leading dimensions unless the tensor is a matrix, number of rows, row stride)."""
    sizes = value.shape
    if not sizes or sizes[-1] != k:
        raise ValueError(f"{name}: expected a last dimension of {k} like the weight's, got shape {list(sizes)}")
    if k > 1 and value.stride(-1) != 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(value.stride())}")
    if len(sizes) == 2:
        return None, sizes[0], value.stride(0)
    m = 1
    for size in sizes[:-1]:
        m *= size
    return sizes[:-1], m, k


def _output(out, lead, m, n, dtype, x, x_stride):
    """(the result as a matrix for the backend, the result in the caller's shape)."""
    if out is None:
        out = torch.empty((m, n), dtype=dtype, device=x.device)
        return out, (out if lead is None else out.view(*lead, n))
    tensor("out", out, (dtype,), device=x.device)
    shape("out", out, (m, n) if lead is None else (*lead, n))
    rows("out", out)
    result = out
    if lead is not None:
        try:
            out = out.view(m, n)
        except RuntimeError:
            raise ValueError(f"out: expected evenly spaced rows, got strides {list(out.stride())}") from None
    stride = out.stride(0)
    if m > 1 and stride < n:
        raise ValueError(f"out: expected rows that do not overlap, got strides {list(out.stride())}")
    if m and n:
        begin, x_begin = out.data_ptr(), x.data_ptr()
        end = begin + ((m - 1) * stride + n) * out.element_size()
        if begin < x_begin + ((m - 1) * x_stride + x.shape[-1]) * x.element_size() and x_begin < end:
            raise ValueError("out: expected memory of its own, got a tensor that overlaps x")
    return out, result
