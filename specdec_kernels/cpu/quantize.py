"""int8 quantisation on the CPU. The arguments' form: specdec_kernels/quantize.py."""

from .. import native
from ..code_outputs import group_count
from ..native import DTYPE_CODE, launch
from ..validate import row_stride
from .rows import NONE, per_group, rows_of

_quantize = native.cpu.quantize_int8
_dequantize = native.cpu.dequantize_int8
_threads = native.threads


def quantize_int8(x, group, symmetric, static, seed, offset, q, scale, zero_point, sums):
    rows, cols, stride = rows_of(x)
    launch(
        _quantize,
        DTYPE_CODE[x.dtype],
        x.data_ptr(),
        rows,
        cols,
        group,
        stride,
        q.data_ptr(),
        cols if q.is_contiguous() else row_stride(q),
        *per_group(scale),
        *(NONE if symmetric else per_group(zero_point)),
        *(NONE if sums is None else per_group(sums)),
        symmetric,
        static,
        seed is not None,
        seed or 0,
        offset & 0xFFFFFFFFFFFFFFFF,
        _threads(),
    )


def dequantize_int8(q, scale, zero_point, out):
    rows, cols, stride = rows_of(q)
    launch(
        _dequantize,
        DTYPE_CODE[out.dtype],
        q.data_ptr(),
        rows,
        cols,
        group_count(cols, scale, zero_point)[1],
        stride,
        *per_group(scale),
        *(NONE if zero_point is None else per_group(zero_point)),
        out.data_ptr(),
        row_stride(out),
        _threads(),
    )
