"""Norms and gates on the GPU, plain and quantising. The arguments' form: norms.py, gates.py."""

from ..native import DTYPE_CODE
from ..validate import row_stride
from .quantize import per_group

SILU, GELU, GELU_TANH = 0, 1, 2  # as in csrc/gpu/launch.h
_NO_ROWS = 0, 0
_NO_CODES = _NO_ROWS, (0, 0, 0), (0, 0, 0)


def bind(compiled, place):
    """The operations of these families on top of a compiled module."""

    def norm(x, weight, bias, eps, residual, residual_out, centred, out, group, codes):
        compiled.norm(
            DTYPE_CODE[x.dtype],
            x.shape[:-1].numel(),
            x.shape[-1],
            _rows(x),
            _rows(residual),
            _rows(residual_out),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            eps,
            centred,
            _rows(out),
            group,
            *codes,
            *place(x),
        )

    def gate_mul(gate_up, gate, out, group, codes):
        width = gate_up.shape[-1] // 2
        compiled.gate_mul(
            DTYPE_CODE[gate_up.dtype],
            gate,
            gate_up.shape[:-1].numel(),
            width // group if group else 1,
            group,
            _rows(gate_up),
            _rows(out),
            *codes,
            *place(gate_up),
        )

    def rms_norm(x, weight, eps, residual, residual_out, out):
        norm(x, weight, None, eps, residual, residual_out, False, out, x.shape[-1], _NO_CODES)

    def rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale, sums):
        norm(x, weight, None, eps, residual, residual_out, False, None, group, _codes(q, scale, sums))

    def layer_norm(x, weight, bias, eps, residual, residual_out, out):
        norm(x, weight, bias, eps, residual, residual_out, True, out, x.shape[-1], _NO_CODES)

    def layer_norm_quantize_int8(x, weight, bias, eps, residual, residual_out, group, q, scale, sums):
        norm(x, weight, bias, eps, residual, residual_out, True, None, group, _codes(q, scale, sums))

    def silu_mul(gate_up, out):
        gate_mul(gate_up, SILU, out, out.shape[-1], _NO_CODES)

    def silu_mul_quantize_int8(gate_up, group, q, scale, sums):
        gate_mul(gate_up, SILU, None, group, _codes(q, scale, sums))

    def gelu_mul(gate_up, tanh, out):
        gate_mul(gate_up, GELU_TANH if tanh else GELU, out, out.shape[-1], _NO_CODES)

    def gelu_mul_quantize_int8(gate_up, tanh, group, q, scale, sums):
        gate_mul(gate_up, GELU_TANH if tanh else GELU, None, group, _codes(q, scale, sums))

    return {
        f.__name__: f
        for f in (
            rms_norm,
            rms_norm_quantize_int8,
            layer_norm,
            layer_norm_quantize_int8,
            silu_mul,
            silu_mul_quantize_int8,
            gelu_mul,
            gelu_mul_quantize_int8,
        )
    }


def _rows(value):
    """Address and row stride."""
    return _NO_ROWS if value is None else (value.data_ptr(), row_stride(value))


def _codes(q, scale, sums):
    return _rows(q), per_group(scale), per_group(sums)
