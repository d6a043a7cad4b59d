"""The quantise family on the GPU. The arguments' form: quantize.py."""

from ..code_outputs import group_count
from ..native import DTYPE_CODE
from ..validate import row_stride


def bind(compiled, place):
    """The operations of this family on top of a compiled module."""

    def quantize_int8(x, group, symmetric, static, seed, offset, q, scale, zero_point, sums):
        cols = x.shape[-1]
        compiled.quantize_int8(
            DTYPE_CODE[x.dtype],
            x.data_ptr(),
            row_stride(x),
            q.data_ptr(),
            row_stride(q),
            *per_group(scale),
            *per_group(zero_point),
            *per_group(sums),
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
            *per_group(scale),
            *per_group(zero_point),
            q.shape[:-1].numel(),
            *group_count(q.shape[-1], scale, zero_point),
            *place(q),
        )

    return {"quantize_int8": quantize_int8, "dequantize_int8": dequantize_int8}


def per_group(value):
    """Address, row stride and group stride of a scale, zero point or sum: one value, one per row, or one per group.

    Of None: a null address.
    """
    if value is None:
        return 0, 0, 0
    if value.numel() == 1:
        return value.data_ptr(), 0, 0
    return value.data_ptr(), row_stride(value), (0 if value.shape[-1] == 1 else 1)
