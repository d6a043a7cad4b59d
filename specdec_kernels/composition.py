"""The decoder's fused operations as what they are specified to be: single operations, one after another.

Backends without kernels of their own for them take these (the form of the arguments: decoder.py). Each single operation
is served by whichever backend would serve it alone.
"""

import torch

from .registry import call
from .validate import device_type


def rms_norm_linear(x, norm_weight, eps, residual, residual_out, weight, bias, out):
    normed = torch.empty_like(x)
    call("rms_norm", device_type(x), x, norm_weight, eps, residual, residual_out, normed)
    _linear(normed, weight, bias, out)


def rope_attend(
    q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard, page_table, lengths, mask, scale, out
):  # fmt: skip
    device, caches = device_type(q), (k_cache, k_scale, v_cache, v_scale)
    call("rope_write_kv_int8", device, q, k, v, cos, sin, *caches, slots, hadamard)
    call("attend_int8", device, q.unflatten(0, out.shape[:2]), *caches, page_table, lengths, mask, scale, out)


def gated_mlp(x, norm_weight, eps, residual, residual_out, gate_up, down, activation, out):
    device, width = device_type(x), down.shape[1]
    hidden, gated = x.new_empty((x.shape[0], 2 * width)), x.new_empty((x.shape[0], width))
    rms_norm_linear(x, norm_weight, eps, residual, residual_out, gate_up, None, hidden)
    if activation == "silu":
        call("silu_mul", device, hidden, gated)
    else:
        call("gelu_mul", device, hidden, activation == "gelu_tanh", gated)
    _linear(gated, down, None, out)


def _linear(x, weight, bias, out):
    if isinstance(weight, torch.Tensor):
        call("linear_f32", device_type(x), x, weight, bias, out)
    else:
        call("linear_int8", device_type(x), x, None, weight, bias, out)
