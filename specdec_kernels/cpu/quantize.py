"""The quantise family on the CPU. The arguments' form: quantize.py, norms.py, gates.py."""

from .. import native
from ..code_outputs import group_count
from ..native import DTYPE_CODE, launch
from ..registry import Unsupported
from ..validate import row_stride

_quantize = native.cpu.quantize_int8
_dequantize = native.cpu.dequantize_int8
_rms_norm = native.cpu.rms_norm
_silu_mul = native.cpu.silu_mul
_threads = native.threads
_NONE = 0, 0, 0  # no zero point: null address


def quantize_int8(x, group, symmetric, static, seed, offset, q, scale, zero_point, sums):
    _no_sums(sums)
    rows, cols, stride = _rows(x)
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
        *_per_group(scale),
        *(_NONE if symmetric else _per_group(zero_point)),
        symmetric,
        static,
        seed is not None,
        seed or 0,
        offset & 0xFFFFFFFFFFFFFFFF,
        _threads(),
    )


def dequantize_int8(q, scale, zero_point, out):
    rows, cols, stride = _rows(q)
    launch(
        _dequantize,
        DTYPE_CODE[out.dtype],
        q.data_ptr(),
        rows,
        cols,
        group_count(cols, scale, zero_point)[1],
        stride,
        *_per_group(scale),
        *(_NONE if zero_point is None else _per_group(zero_point)),
        out.data_ptr(),
        row_stride(out),
        _threads(),
    )


def rms_norm(x, weight, eps, residual, residual_out, out):
    if out.numel():
        _norm(x, weight, eps, residual, residual_out, out.data_ptr(), row_stride(out), 0, 0, 0, *_NONE)


def rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale, sums):
    _no_sums(sums)
    _norm(x, weight, eps, residual, residual_out, 0, 0, q.data_ptr(), row_stride(q), group, *_per_group(scale))


def silu_mul(gate_up, out):
    if out.numel() == 0:
        return
    rows, cols, stride = _rows(gate_up)
    code = DTYPE_CODE[gate_up.dtype]
    output = out.data_ptr(), row_stride(out), 0, 0, 0, *_NONE
    launch(_silu_mul, code, gate_up.data_ptr(), rows, cols // 2, stride, *output, _threads())


def silu_mul_quantize_int8(gate_up, group, q, scale, sums):
    _no_sums(sums)
    rows, cols, stride = _rows(gate_up)
    code = DTYPE_CODE[gate_up.dtype]
    output = 0, 0, q.data_ptr(), row_stride(q), group, *_per_group(scale)
    launch(_silu_mul, code, gate_up.data_ptr(), rows, cols // 2, stride, *output, _threads())


def _no_sums(sums):
    if sums is not None:
        raise Unsupported("sums of codes")


def _norm(x, weight, eps, residual, residual_out, *output):
    rows, cols, stride = _rows(x)
    if residual is None:
        add = 0, 0, 0, 0
    else:
        add = residual.data_ptr(), row_stride(residual), residual_out.data_ptr(), row_stride(residual_out)
    code = DTYPE_CODE[x.dtype]
    launch(_rms_norm, code, x.data_ptr(), rows, cols, stride, weight.data_ptr(), eps, *add, *output, _threads())


def _rows(value):
    """Number of rows, their length, and the elements from one to the next."""
    shape = value.shape
    cols = shape[-1]
    rows = value.numel() // cols if cols else shape[:-1].numel()
    return rows, cols, cols if value.is_contiguous() else row_stride(value)


def _per_group(value):
    """Address, row stride and group stride of a scale or zero point that holds one value, one per row, or per group."""
    if value.numel() == 1:
        return value.data_ptr(), 0, 0
    return value.data_ptr(), row_stride(value), (0 if value.shape[-1] == 1 else 1)
