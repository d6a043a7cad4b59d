"""expand: a packed int8 matrix as ordinary rows of floats.

For calls with many rows, where the floating-point units pay for themselves: the weights travel as int8 and become
floats on arrival, in a scratch matrix that a library's dense product reads. Calls with few rows multiply by the codes
themselves (linear_int8) and never need this.
"""

import torch

from . import registry
from .int8_weight import Int8Weight
from .validate import FLOATS, output, outside


def expand(weight, *, dtype=torch.bfloat16, out=None):
    """The matrix W of an :class:`Int8Weight`, float [N, K] in ordinary row order.

    W[i, j] = code * scale in f32, rotated back if the weight is rotated, then rounded once to ``dtype``: the bits of
    ``weight.dequantize().to(dtype)``, of which it makes no float32 copy.

    weight: Int8Weight [N, K].
    dtype:  float32, float16 or bfloat16.
    out:    [N, K] of ``dtype`` on the weight's device, rows any distance apart; must not overlap the weight.

    Returns ``out``, or a new tensor. On a GPU it neither waits nor allocates when ``out`` is given, so a CUDA graph
    can hold it. Raises TypeError or ValueError that names the argument.
    """
    if not isinstance(weight, Int8Weight):
        raise TypeError(f"weight: expected an Int8Weight, got {type(weight).__name__}")
    if dtype not in FLOATS:
        raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
    if out is None:
        out = torch.empty(weight.n, weight.k, dtype=dtype, device=weight.device)
    else:
        outside("out", output("out", out, dtype, (weight.n, weight.k), weight.device), weight.spans)
    if weight.n:
        registry.call("expand", weight.device_type, weight, out)
    return out
