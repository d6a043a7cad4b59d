"""The quantise family on the GPU. The arguments' form: quantize.py."""

from ..code_outputs import group_count
from ..native import DTYPE_CODE
from ..registry import Unsupported
from ..validate import row_stride

_NONE = 0, 0, 0  # no zero point: null address


def bind(compiled, place):
    """The operations of this family on top of a compiled module."""

    def quantize_int8(x, group, symmetric, static, seed, offset, q, scale, zero_point, sums):
        if sums is not None:
            raise Unsupported("sums of codes")
        cols = x.shape[-1]
        compiled.quantize_int8(
            DTYPE_CODE[x.dtype],
            x.data_ptr(),
            row_stride(x),
            q.data_ptr(),
            row_stride(q),
            *_per_group(scale),
            *(_NONE if symmetric else _per_group(zero_point)),
            x.shape[:-1].numel(),
            cols // group if group else 1,
            group,
            static,
            seed is not None,
            seed or 0,
            offset & 0xFFFFFFFFFFFFFFFF,
            *place(x),
        )

    def dequantize_int8(q, scale, zero_point, out):
        compiled.dequantize_int8(
            DTYPE_CODE[out.dtype],
            q.data_ptr(),
            row_stride(q),
            out.data_ptr(),
            row_stride(out),
            *_per_group(scale),
            *(_NONE if zero_point is None else _per_group(zero_point)),
            q.shape[:-1].numel(),
            *group_count(q.shape[-1], scale, zero_point),
            *place(q),
        )

    return {"quantize_int8": quantize_int8, "dequantize_int8": dequantize_int8}


def _per_group(value):
    """Address, row stride and group stride of a scale or zero point: one value, one per row, or one per group."""
    if value.numel() == 1:
        return value.data_ptr(), 0, 0
    return value.data_ptr(), row_stride(value), (0 if value.shape[-1] == 1 else 1)
