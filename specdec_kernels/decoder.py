"""A decoder layer in four calls: ``rms_norm_linear``, ``rope_attend``, ``linear_int8``, ``gated_mlp``.

Each is specified as single operations of this library one after another, and gives their bits within a backend. What
lies between them never leaves the call: the cpu backend keeps it in buffers of its own, and the steps of few rows need
no threads to be woken. A backend without a kernel of its own serves a call by making the single ones (composition.py).

The form that the backends get (checked; x is a matrix with rows any distance apart; residual and residual_out are both
None or both tensors; a weight is an Int8Weight or an f32 or bf16 matrix; ``out`` of rope_attend is [B, R, H, Dv]):

    rms_norm_linear(x, norm_weight, eps, residual, residual_out, weight, bias, out)
    rope_attend(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard,
                page_table, lengths, mask, scale, out)
    gated_mlp(x, norm_weight, eps, residual, residual_out, gate_up, down, activation, out)
"""

import torch

from . import registry, validate
from .attention import attend_arguments, rope_write_arguments
from .code_outputs import plain_output
from .int8_weight import Int8Weight
from .norms import norm_arguments

_WEIGHTS = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def rms_norm_linear(x, norm_weight, eps, weight, *, residual=None, residual_out=None, bias=None, out=None):
    """``linear_int8(rms_norm(x, norm_weight, eps, residual=residual), weight, bias)``, or ``linear_f32``.

    x : f32, f16 or bf16 [M, H], rows any distance apart; f32 if ``weight`` is a float matrix.
    weight : Int8Weight, float32 or bfloat16 [N, H]; ``bias`` a float vector [N].
    norm_weight, eps, residual, residual_out : as for ``rms_norm``.
    out : [M, N], dtype of x, memory of its own.

    Returns y [M, N], or (y, residual_out) with a residual. Raises TypeError or ValueError with the argument's name.
    """
    x, residual, residual_out, inputs, outputs = _normed(x, norm_weight, eps, residual, residual_out)
    n = _matrix("weight", weight, x, x.shape[1], inputs)
    if bias is not None:
        inputs["bias"] = validate.rows("bias", validate.vector("bias", bias, validate.FLOATS, n, x.device))
    out = plain_output(x, (x.shape[0], n), out, inputs, outputs)
    registry.call(
        "rms_norm_linear",
        validate.device_type(x),
        x,
        norm_weight,
        eps,
        residual,
        residual_out,
        weight,
        bias,
        out,
    )
    return out if residual is None else (out, residual_out)


def rope_attend(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    k_scale,
    v_cache,
    v_scale,
    slots,
    page_table,
    lengths,
    *,
    hadamard=False,
    mask=None,
    scale=None,
    out=None,
):
    """``rope_write_kv_int8`` of T new tokens, then ``attend_int8`` of their queries; returns [T, H, Dv] in q's dtype.

    q : [T, H, D], rotated in place; k [T, H_kv, D], v [T, H_kv, Dv]; cos, sin, slots, caches, scales and hadamard as
        for ``rope_write_kv_int8``.
    page_table, lengths, mask, scale : as for ``attend_int8`` with B requests (the rows of page_table) of R = T / B
        tokens each: rows b * R .. b * R + R - 1 are those of request b.
    out : contiguous [T, H, Dv].

    Raises TypeError or ValueError with the argument's name.
    """
    validate.tensor("q", q, validate.FLOATS, 3)
    validate.tensor("page_table", page_table, (torch.int32,), 2, q.device)
    tokens, heads = q.shape[:2]
    requests = page_table.shape[0]
    if tokens % requests if requests else tokens:
        raise ValueError(f"page_table: expected a number of requests that divides {tokens} tokens, got {requests}")
    write = rope_write_arguments(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard)
    rows = tokens // requests if requests else 0
    if out is None:
        out = q.new_empty((tokens, heads, v.shape[2]))
    elif validate.tensor("out", out, (q.dtype,), 3, q.device).shape != (tokens, heads, v.shape[2]):
        raise ValueError(f"out: expected shape [{tokens}, {heads}, {v.shape[2]}], got {list(out.shape)}")
    queries, attended = q.unflatten(0, (requests, rows)), out.unflatten(0, (requests, rows))
    attend = attend_arguments(queries, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, attended)
    registry.call("rope_attend", validate.device_type(q), *write, *attend[5:])
    return out


def gated_mlp(x, norm_weight, eps, gate_up, down, *, residual=None, residual_out=None, activation="silu", out=None):
    """The feed-forward half of a layer: ``down`` applied to act(gate) * up, (gate, up) = ``gate_up`` of the normed x.

    y = linear(silu_mul(rms_norm_linear(x, norm_weight, eps, gate_up)), down); with ``activation`` "gelu" or "gelu_tanh"
    ``gelu_mul`` takes the place of ``silu_mul``.

    x : f32, f16 or bf16 [M, H], rows any distance apart; f32 if a weight is a float matrix.
    gate_up : Int8Weight, float32 or bfloat16 [2 * I, H], gate above up; down : likewise [N, I].
    norm_weight, eps, residual, residual_out : as for ``rms_norm``.
    out : [M, N], dtype of x, memory of its own.

    Returns y [M, N], or (y, residual_out) with a residual. Raises TypeError or ValueError with the argument's name.
    """
    x, residual, residual_out, inputs, outputs = _normed(x, norm_weight, eps, residual, residual_out)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    width = _matrix("gate_up", gate_up, x, x.shape[1], inputs)
    if width % 2:
        raise ValueError(f"gate_up: expected an even number of rows (gate above up), got {width}")
    n = _matrix("down", down, x, width // 2, inputs)
    out = plain_output(x, (x.shape[0], n), out, inputs, outputs)
    registry.call(
        "gated_mlp",
        validate.device_type(x),
        x,
        norm_weight,
        eps,
        residual,
        residual_out,
        gate_up,
        down,
        activation,
        out,
    )
    return out if residual is None else (out, residual_out)


def _normed(x, norm_weight, eps, residual, residual_out):
    validate.tensor("x", x, validate.FLOATS, 2)
    return norm_arguments(x, norm_weight, None, eps, residual, residual_out, weight_name="norm_weight")


def _matrix(name, weight, x, columns, inputs):
    """The number of rows of a weight for products of ``columns`` terms with x; its memory is added to ``inputs``."""
    if type(weight) is Int8Weight:
        n, k = weight.n, weight.k
        if weight.device != x.device:
            raise ValueError(f"{name}: expected a weight on {x.device} like x, got one on {weight.device}")
        inputs[name], inputs[f"{name}.scale"] = weight.codes, weight.scale
    else:
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name}: expected an Int8Weight or a float matrix, got {type(weight).__name__}")
        n, k = validate.rows(name, validate.tensor(name, weight, _WEIGHTS, 2, x.device)).shape
        inputs[name] = weight
        if x.dtype is not torch.float32:
            raise TypeError(f"x: expected float32 to go with a float {name}, got {x.dtype}")
    if k != columns:
        raise ValueError(f"{name}: expected rows of {columns} values, got {k}")
    return n
