"""Decoding of the block formats that GGUF files hold.

A tensor in such a file is rows of blocks. A block holds ``n`` consecutive elements as small integers with an
f16 scale (some formats add a minimum, or 6- to 8-bit scales of sub-blocks); the layouts are ggml's.
"""

import torch

from . import registry, validate

# kind -> (elements per block, bytes per block)
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}


def dequantize_ggml(blocks, kind, *, out=None):
    """Decodes rows of ggml blocks to f32.

    blocks: uint8 [..., row bytes], last dimension contiguous, any row stride and alignment (little-endian).
    kind:   one of :data:`BLOCKS`; the row's bytes must be whole blocks.
    out:    f32 [..., row elements] to write to, last dimension contiguous; must not overlap ``blocks``.

    With d and m the block's f16 scale and minimum, in f32 and in this order of operations::

        Q4_0  d * (q - 8)        Q8_0  d * q        Q4_K  (d * scale) * q - (m * min)
        Q4_1  d * q + m                             Q6_K  (d * scale) * (q - 32)

    so every backend returns the same bits (of a NaN only that it is one). Returns ``out``, or a new tensor.
    Raises ValueError or TypeError that names the argument.
    """
    validate.tensor("blocks", blocks, (torch.uint8,))
    if kind not in BLOCKS:
        raise ValueError(f"kind: expected one of {', '.join(BLOCKS)}, got {kind!r}")
    if blocks.dim() == 0:
        raise ValueError("blocks: expected at least 1 dimension, got a scalar")
    validate.rows("blocks", blocks)
    elements, size = BLOCKS[kind]
    row_bytes = blocks.shape[-1]
    if row_bytes % size:
        raise ValueError(f"blocks: expected rows of whole {kind} blocks ({size} bytes each), got {row_bytes} bytes")
    shape = (*blocks.shape[:-1], row_bytes // size * elements)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=blocks.device)
    else:
        validate.output("out", out, torch.float32, shape, blocks.device)
        validate.disjoint({"out": out}, {"blocks": blocks})
    if out.numel():
        device = validate.device_type(blocks)
        registry.call("dequantize_ggml", device, _matrix("blocks", blocks), kind, _matrix("out", out))
    return out


def _matrix(name, value):
    """The same memory as rows of a matrix, which is the form that backends get."""
    if value.dim() == 2:
        return value
    if value.dim() == 1:
        return value[None]
    try:
        return value.view(-1, value.shape[-1])
    except RuntimeError:
        raise ValueError(f"{name}: expected evenly spaced rows, got strides {list(value.stride())}") from None
