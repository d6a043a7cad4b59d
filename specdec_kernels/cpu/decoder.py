"""The decoder family on the CPU (the arguments' form: decoder.py)."""

from .. import native
from ..int8_weight import Int8Weight
from ..native import DTYPE_CODE, launch
from .attention import attend, rope_write

_rms_norm_linear = native.cpu.rms_norm_linear
_rope_attend = native.cpu.rope_attend
_gated_mlp = native.cpu.gated_mlp
_GATE = {"silu": 0, "gelu": 1, "gelu_tanh": 2}  # sk::Gate


def rms_norm_linear(x, norm_weight, eps, residual, residual_out, weight, bias, out):
    launch(
        _rms_norm_linear,
        _norm(x, norm_weight, eps, residual, residual_out),
        _matrix(weight),
        *((0, 0) if bias is None else (bias.data_ptr(), DTYPE_CODE[bias.dtype])),
        out.data_ptr(),
        out.stride(0),
        native.threads(),
    )


def rope_attend(
    q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard, page_table, lengths, mask, scale, out
):  # fmt: skip
    queries = q.unflatten(0, out.shape[:2])
    launch(
        _rope_attend,
        rope_write(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard),
        attend(queries, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out),
        native.threads(),
    )


def gated_mlp(x, norm_weight, eps, residual, residual_out, gate_up, down, activation, out):
    launch(
        _gated_mlp,
        _norm(x, norm_weight, eps, residual, residual_out),
        _matrix(gate_up),
        _GATE[activation],
        _matrix(down),
        out.data_ptr(),
        out.stride(0),
        native.threads(),
    )


def _norm(x, weight, eps, residual, residual_out):
    """sk::NormArgs without an output, field by field."""
    rows, cols = x.shape
    if residual is None:
        add = 0, 0, 0, 0
    else:
        add = residual.data_ptr(), residual.stride(0), residual_out.data_ptr(), residual_out.stride(0)
    return DTYPE_CODE[x.dtype], x.data_ptr(), rows, cols, x.stride(0), weight.data_ptr(), eps, *add


def _matrix(weight):
    """sk::Int8Matrix or sk::FloatMatrix, field by field."""
    if type(weight) is Int8Weight:
        return weight.native
    return weight.data_ptr(), DTYPE_CODE[weight.dtype], *weight.shape, weight.stride(0)
