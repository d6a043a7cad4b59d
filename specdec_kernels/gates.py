"""silu(gate) * up and gelu(gate) * up, plain and followed by int8 quantisation in the same pass.

The form that the backends get (tensors validated, rows evenly spaced, last dimension contiguous; ``tanh`` is a bool,
sums may be None):

    silu_mul(gate_up, out)
    silu_mul_quantize_int8(gate_up, group, q, scale, sums)
    gelu_mul(gate_up, tanh, out)
    gelu_mul_quantize_int8(gate_up, tanh, group, q, scale, sums)

A fused operation gives the codes of the plain one followed by ``quantize_int8``, bit for bit within a backend.
Gated units: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from . import registry, validate
from .code_outputs import code_outputs, group_length, plain_output, readable


def silu_mul(gate_up, *, out=None):
    """silu(gate) * up for gate_up [..., 2 * H] = (gate, up), silu(x) = x / (1 + exp(-x)).

    silu and the product are computed in f32 and each rounded to gate_up.dtype (f32, f16 or bf16). ``out`` is [..., H],
    memory of its own. Raises TypeError or ValueError with the argument's name.
    """
    gate_up, shape = _halves(gate_up)
    out = plain_output(gate_up, shape, out, {"gate_up": gate_up}, {})
    registry.call("silu_mul", validate.device_type(gate_up), gate_up, out)
    return out


def silu_mul_quantize_int8(gate_up, *, group_size=None, return_sums=False, out=None):
    """``quantize_int8(silu_mul(gate_up), group_size=group_size)`` in one pass.

    ``out`` and what is returned: (q int8 [..., H], scale f32 [..., G]) and, with ``return_sums``, sums int32 [..., G].
    """
    gate_up, shape = _halves(gate_up)
    group = group_length(group_size, shape[-1], return_sums)
    result = code_outputs(gate_up, shape, group, True, return_sums, out, {"gate_up": gate_up}, {})
    registry.call(
        "silu_mul_quantize_int8",
        validate.device_type(gate_up),
        gate_up,
        group,
        result[0],
        result[1],
        result[2] if return_sums else None,
    )
    return result


def gelu_mul(gate_up, *, approximate="none", out=None):
    """gelu(gate) * up for gate_up [..., 2 * H] = (gate, up).

        approximate="none":  gelu(x) = 0.5 * x * (1 + erf(x / sqrt(2)))
        approximate="tanh":  gelu(x) = 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))

    gelu and the product are computed in f32 and each rounded to gate_up.dtype (f32, f16 or bf16). ``out`` is [..., H],
    memory of its own. (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.)
    """
    tanh = _is_tanh(approximate)
    gate_up, shape = _halves(gate_up)
    out = plain_output(gate_up, shape, out, {"gate_up": gate_up}, {})
    registry.call("gelu_mul", validate.device_type(gate_up), gate_up, tanh, out)
    return out


def gelu_mul_quantize_int8(gate_up, *, approximate="none", group_size=None, return_sums=False, out=None):
    """``quantize_int8(gelu_mul(gate_up, approximate=approximate), group_size=group_size)`` in one pass.

    ``out`` and what is returned as for :func:`silu_mul_quantize_int8`.
    """
    tanh = _is_tanh(approximate)
    gate_up, shape = _halves(gate_up)
    group = group_length(group_size, shape[-1], return_sums)
    result = code_outputs(gate_up, shape, group, True, return_sums, out, {"gate_up": gate_up}, {})
    registry.call(
        "gelu_mul_quantize_int8",
        validate.device_type(gate_up),
        gate_up,
        tanh,
        group,
        result[0],
        result[1],
        result[2] if return_sums else None,
    )
    return result


def _halves(gate_up):
    validate.tensor("gate_up", gate_up, validate.FLOATS)
    gate_up = readable("gate_up", gate_up)
    width = gate_up.shape[-1]
    if width % 2:
        raise ValueError(f"gate_up: expected an even last dimension (gate and up side by side), got {width}")
    return gate_up, (*gate_up.shape[:-1], width // 2)


def _is_tanh(approximate):
    if approximate == "none":
        return False
    if approximate == "tanh":
        return True
    raise ValueError(f'approximate: expected "none" or "tanh", got {approximate!r}')
