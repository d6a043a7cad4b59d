"""RMS norm and layer norm on the CPU. The arguments' form: specdec_kernels/norms.py."""

from .. import native
from ..native import DTYPE_CODE, launch
from ..validate import row_stride
from .rows import codes, rows_of, values

_kernel = native.cpu.norm
_threads = native.threads


def rms_norm(x, weight, eps, residual, residual_out, out):
    if out.numel():
        _norm(False, x, weight, None, eps, residual, residual_out, values(out))


def layer_norm(x, weight, bias, eps, residual, residual_out, out):
    if out.numel():
        _norm(True, x, weight, bias, eps, residual, residual_out, values(out))


def rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale, sums):
    _norm(False, x, weight, None, eps, residual, residual_out, codes(group, q, scale, sums))


def layer_norm_quantize_int8(x, weight, bias, eps, residual, residual_out, group, q, scale, sums):
    _norm(True, x, weight, bias, eps, residual, residual_out, codes(group, q, scale, sums))


def _norm(layer, x, weight, bias, eps, residual, residual_out, output):
    rows, cols, stride = rows_of(x)
    if residual is None:
        add = 0, 0, 0, 0
    else:
        add = residual.data_ptr(), row_stride(residual), residual_out.data_ptr(), row_stride(residual_out)
    dtype, weights = DTYPE_CODE[x.dtype], (weight.data_ptr(), 0 if bias is None else bias.data_ptr())
    launch(_kernel, layer, dtype, x.data_ptr(), rows, cols, stride, *weights, eps, *add, *output, _threads())
